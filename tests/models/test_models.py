"""The named models: they build, give a scalar loss that trains, and their batches tell wrong averages apart."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from torch import Tensor

from superscaler.errors import InputError
from superscaler.models import BuiltModel, build

SMALL = ["gpt2:size=tiny", "llama:size=tiny", "mlp"]


def loss_of(built: BuiltModel) -> Tensor:
    out = built.module(*built.args, **built.kwargs)
    return out if isinstance(out, Tensor) else out.loss


@pytest.mark.parametrize("spec", SMALL)
def test_a_model_gives_a_scalar_loss_that_reaches_every_parameter(spec: str) -> None:
    built = build(spec)
    loss = loss_of(built)
    loss.backward()
    assert loss.shape == ()
    # Random weights know nothing: the loss is that of a uniform guess.
    classes = {"gpt2:size=tiny": 512, "llama:size=tiny": 512, "mlp": 10}[spec]
    assert loss.item() == pytest.approx(torch.tensor(classes).log().item(), rel=0.05)
    assert built.module.training
    assert all(p.grad is not None and p.grad.isfinite().all() for p in built.module.parameters())


@pytest.mark.parametrize("spec", SMALL)
def test_weights_depend_on_the_seed_only(spec: str) -> None:
    seed = ":seed=1" if spec == "mlp" else ",seed=1"
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, other = build(spec), build(spec + seed)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    again = build(spec)
    pairs = zip(first.module.parameters(), again.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not all(torch.equal(a, b) for a, b in zip(first.module.parameters(), other.module.parameters(), strict=True))
    assert all(torch.equal(first.kwargs[k], again.kwargs[k]) for k in first.kwargs)


@pytest.mark.parametrize("spec", SMALL)
def test_halves_of_a_batch_count_different_numbers_of_labels(spec: str) -> None:
    labels = build(spec).kwargs["labels"]
    counts = [int((half != -100).sum()) for half in labels.chunk(2)]
    assert counts[0] != counts[1]
    assert min(counts) > 0


@pytest.mark.parametrize("spec", SMALL)
def test_batches_are_equal_for_equal_steps_and_fit_the_examples(spec: str) -> None:
    built = build(spec)
    assert built.make_batch is not None
    second, again, third = built.make_batch(1), built.make_batch(1), built.make_batch(2)
    for name, example in built.kwargs.items():
        assert (second[name].shape, second[name].dtype) == (example.shape, example.dtype)
        assert torch.equal(second[name], again[name])
        assert not torch.equal(second[name], third[name])
    assert second["labels"].untyped_storage().data_ptr() not in {
        t.untyped_storage().data_ptr() for name, t in second.items() if name != "labels"
    }


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        # Published sizes: 124M and 1558M (Radford et al. 2019, tied head counted once), Llama 3.2 1B, Llama 3.1 8B.
        ("gpt2:device=meta", 124_439_808),
        ("gpt2:size=xl,device=meta", 1_557_611_200),
        ("llama:device=meta", 1_235_814_400),
        ("llama:size=8b,device=meta", 8_030_261_248),
    ],
)
def test_the_families_own_sizes_on_meta(spec: str, parameters: int) -> None:
    built = build(spec)
    assert sum(p.numel() for p in built.module.parameters()) == parameters
    tensors = [*built.module.parameters(), *built.module.buffers(), *built.kwargs.values()]
    assert {t.device.type for t in tensors} == {"meta"}
    assert built.make_batch is not None
    assert {t.device.type for t in built.make_batch(0).values()} == {"cpu"}


def test_keys_change_the_model() -> None:
    built = build("llama:size=tiny,layers=3,hidden=48,heads=6,kv_heads=3,seq=8,batch=2,vocab=300")
    state = built.module.state_dict()
    assert state["model.layers.2.self_attn.k_proj.weight"].shape == (24, 48)
    assert state["lm_head.weight"].shape == (300, 48)
    assert built.kwargs["input_ids"].shape == (2, 8)
    assert not any(k.startswith("model.layers.3") for k in state)


@pytest.mark.parametrize(
    ("spec", "rate"), [("gpt2:device=meta", 0.1), ("gpt2:size=tiny", 0.0), ("gpt2:size=tiny,dropout=0.25", 0.25)]
)
def test_dropout_is_the_familys_own_and_zero_for_tiny(spec: str, rate: float) -> None:
    rates = {m.p for m in build(spec).module.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {rate}


def test_building_and_running_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    loss_of(build("gpt2:size=tiny"))
    loss_of(build("llama:size=tiny"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("gtp2", "unknown model 'gtp2'; did you mean 'gpt2'?"),
        ("gpt2:size=tiney", "unknown size 'tiney'; did you mean 'tiny'?"),
        ("gpt2:size=tiny,layer=2", "unknown key 'layer'; did you mean 'layers'?"),
        ("mlp:size=tiny", "unknown key 'size'"),
        ("gpt2:size=tiny,layers=two", "layers is 'two', but it must be a whole number"),
        ("gpt2:size=tiny,dropout=x", "dropout is 'x', but it must be a number"),
        ("llama:size=tiny,tied=maybe", "tied is 'maybe', but it must be true or false"),
        ("mlp:layers", "the key 'layers' has no value; write layers=VALUE"),
        ("mlp:layers=1,layers=2", "given twice, 1 and 2"),
        ("mlp:batch=0", "batch is 0, but it must be 1 or more"),
        ("mlp:seed=-1", "seed is -1, but it must be 0 or more"),
        ("mlp:device=cuda", "unknown device 'cuda'"),
        ("gpt2:size=tiny,dropout=1", "dropout is 1.0, but it must be at least 0 and below 1"),
        ("gpt2:size=tiny,dropout=nan", "dropout is nan"),
        ("gpt2:size=tiny,heads=5", "hidden=64 cannot be shared by heads=5"),
        ("llama:size=tiny,kv_heads=3", "heads=4 cannot be shared by kv_heads=3"),
        ("llama:size=tiny,hidden=12", "heads of 3 channels"),
        ("gpt2:size=tiny,seq=1", "a sequence of 2 or more"),
    ],
)
def test_bad_specs_are_told_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        build(spec)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=re.escape("pip install 'superscaler[hf]'")):
        build("gpt2:size=tiny")
