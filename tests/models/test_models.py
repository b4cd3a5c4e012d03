"""The named models: they build, give a scalar loss that trains, and their batches tell wrong averages apart."""

from __future__ import annotations

import re
import sys
from math import log
from pathlib import Path

import pytest
import torch
from torch import Tensor

import superscaler as ss
from superscaler import artifact, models
from superscaler.errors import InputError
from superscaler.models import BuiltModel, build
from tests.helpers.sweeps import few, slow

# Spec -> the loss of random weights: that of a uniform guess, of so many classes.
LOSSES = {
    **dict.fromkeys(("gpt2:size=tiny", "llama:size=tiny"), log(512)),
    **dict.fromkeys(("gpt3:size=tiny", "mbart:size=tiny", "bert:size=tiny", "mixtral:size=tiny"), log(320)),
    # T5 starts with logits of variance 1, which cost another half.
    "t5:size=tiny": log(320) + 0.5,
    **dict.fromkeys(("mlp", "vit:size=tiny", "swin:size=tiny"), log(10)),
}


def loss_of(built: BuiltModel) -> Tensor:
    out = built.module(*built.args, **built.kwargs)
    return out if isinstance(out, Tensor) else out.loss


@pytest.mark.parametrize("spec", few(LOSSES, *range(9)))
def test_a_model_trains_and_depends_on_its_seed_only(spec: str, capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.random.get_rng_state()
    built, other = build(spec), build(spec + (":seed=1" if spec == "mlp" else ",seed=1"))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    again = build(spec)
    first, second, third = (list(x.module.parameters()) for x in (built, again, other))
    assert all(map(torch.equal, first, second))
    assert not all(map(torch.equal, first, third))
    assert all(torch.equal(built.kwargs[k], again.kwargs[k]) for k in built.kwargs)
    loss = loss_of(built)
    loss.backward()
    assert loss.shape == ()
    assert loss.item() == pytest.approx(LOSSES[spec], rel=0.05)
    assert built.module.training
    assert all(p.grad is not None and p.grad.isfinite().all() for p in first)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("spec", LOSSES)
def test_batches_are_those_of_their_steps_and_halves_count_different_numbers_of_labels(spec: str) -> None:
    built = build(spec)
    counts = [int((half != -100).sum()) for half in built.kwargs["labels"].chunk(2)]
    assert counts[0] != counts[1]
    assert min(counts) > 0
    assert built.make_batch is not None
    second, again, third = built.make_batch(1), built.make_batch(1), built.make_batch(2)
    for name, example in built.kwargs.items():
        assert (second[name].shape, second[name].dtype) == (example.shape, example.dtype)
        assert torch.equal(second[name], again[name])
        assert not torch.equal(second[name], third[name])
    assert second["labels"].untyped_storage().data_ptr() not in {
        t.untyped_storage().data_ptr() for name, t in second.items() if name != "labels"
    }


EXPERTS = "mlp=768,experts=128,chosen=8,vocab=151936"


@pytest.mark.parametrize(
    ("spec", "parameters"),
    [
        # Published sizes: 124M and 1558M (Radford et al. 2019, tied head counted once), Llama 3.2 1B, Llama 3.1 8B,
        # Llama 2 7B and 13B.
        ("gpt2:device=meta", 124_439_808),
        *slow(("gpt2:size=xl,device=meta", 1_557_611_200)),
        ("llama:device=meta", 1_235_814_400),
        ("llama:size=8b,device=meta", 8_030_261_248),
        ("llama:size=7b,device=meta", 6_738_415_616),
        *slow(("llama:size=13b,device=meta", 13_015_864_320)),
        # BERT, T5, ViT and Mixtral as published with these configs (T5: tied once; ViT: 1000 classes).
        ("bert:device=meta", 109_514_298),
        *slow(("bert:size=large,device=meta", 335_174_458)),
        *slow(("t5:device=meta", 60_506_624)),
        *slow(("t5:size=base,device=meta", 222_903_552)),
        *slow(("t5:size=large,device=meta", 737_668_096)),
        *slow(("t5:size=3b,device=meta", 2_851_598_336)),
        *slow(("t5:size=11b,device=meta", 11_307_321_344)),
        ("vit:device=meta", 86_567_656),
        *slow(("vit:size=large,device=meta", 304_326_632), ("vit:size=huge,device=meta", 632_045_800)),
        ("mixtral:device=meta,batch=1", 46_702_792_704),
        *slow(("mixtral:size=8x22b,device=meta,batch=1", 140_630_071_296)),
        # The shape of Qwen3-30B-A3B, less its norms of queries and keys.
        *slow(
            (
                f"mixtral:layers=48,hidden=2048,heads=32,kv_heads=4,head=128,{EXPERTS},device=meta,batch=1",
                30_532_122_624 - 48 * 256,
            )
        ),
    ],
)
def test_the_families_own_sizes_on_meta(spec: str, parameters: int) -> None:
    built = build(spec)
    assert sum(p.numel() for p in built.module.parameters()) == parameters
    assert {t.device.type for t in (*built.module.parameters(), *built.kwargs.values())} == {"meta"}
    # Constants are computed from buffers.
    assert not any(buffer.is_meta for buffer in built.module.buffers())
    assert built.make_batch is not None
    assert {t.device.type for t in built.make_batch(0).values()} == {"cpu"}


# The paper's table: billions of parameters, layers, hidden size, heads.
PAPER = {
    "gpt3": {"1.3b": (1.3, 24, 2048, 32), "2.6b": (2.6, 32, 2560, 32), "6.7b": (6.7, 32, 4096, 32),
             "15b": (15, 48, 5120, 32), "175b": (175, 96, 12288, 96)},
    "swin": {"1.8b": (1.8, 32, 512, 16), "6.6b": (6.6, 48, 768, 24), "13b": (13, 56, 1024, 32),
             "30b": (30, 64, 1536, 32)},
    "mbart": {"4.7b": (4.7, 24, 3072, 16), "9.5b": (9.5, 32, 4096, 32), "20b": (20, 48, 5120, 32),
              "32b": (32, 56, 6144, 32)},
}  # fmt: skip


SIZES = [(name, size) for name, sizes in PAPER.items() for size in sizes]


# The largest take seconds to build.
@pytest.mark.parametrize(("name", "size"), few(SIZES, 0, 1, 9))
def test_the_papers_sizes_on_meta(name: str, size: str) -> None:
    billions, layers, hidden, heads = PAPER[name][size]
    built = build(f"{name}:size={size},batch=1,device=meta")
    config = built.module.config
    if name == "swin":
        found = (sum(config.depths), config.embed_dim, config.num_heads[0])
        assert built.kwargs["pixel_values"].shape == (1, 3, 1536, 1536)
    elif name == "mbart":
        found = (config.encoder_layers + config.decoder_layers, config.d_model, config.decoder_attention_heads)
        assert (built.kwargs["input_ids"].shape[1], config.vocab_size) == (1024, 500_000)
    else:
        found = (config.n_layer, config.n_embd, config.n_head)
        assert built.kwargs["input_ids"].shape[1] == (2048 if size == "175b" else 16384)
    assert found == (layers, hidden, heads)
    assert sum(p.numel() for p in built.module.parameters()) == pytest.approx(billions * 1e9, rel=0.05)


def test_a_size_that_stays_though_another_changes_is_said(caplog: pytest.LogCaptureFixture) -> None:
    sizes = "layers=1,hidden=80,heads=8,vocab=64,seq=8,batch=1,device=meta"
    build(f"llama:{sizes},intermediate=160,kv_heads=8")
    build(f"llama:size=tiny,{sizes}")
    assert not caplog.records
    build(f"llama:{sizes}")
    assert "llama: mlp=8192, kv_heads=8 stay those of size=1b; give them too" in caplog.text


def test_keys_change_the_model() -> None:
    built = build("llama:size=tiny,layers=3,hidden=48,heads=6,kv_heads=3,seq=8,batch=2,vocabulary=300,intermediate=160")
    state = built.module.state_dict()
    assert state["model.layers.2.self_attn.k_proj.weight"].shape == (24, 48)
    assert state["lm_head.weight"].shape == (300, 48)
    assert built.kwargs["input_ids"].shape == (2, 8)
    assert state["model.layers.0.mlp.up_proj.weight"].shape == (160, 48)
    assert not any(k.startswith("model.layers.3") for k in state)


@pytest.mark.parametrize(
    ("spec", "rate"), [("gpt2:device=meta", 0.1), ("gpt2:size=tiny", 0.0), ("gpt2:size=tiny,dropout=0.25", 0.25)]
)
def test_dropout_is_the_familys_own_and_zero_for_tiny(spec: str, rate: float) -> None:
    rates = {m.p for m in build(spec).module.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {rate}


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
        ("gpt2:size=tiny,heads=5", "hidden=64 is not divisible by heads=5"),
        ("llama:size=tiny,kv_heads=3", "heads=4 is not divisible by kv_heads=3"),
        ("llama:size=tiny,mlp=8,intermediate=9", "mlp and intermediate are one key"),
        ("llama:size=tiny,hidden=12", "heads of 3 channels"),
        ("gpt2:size=tiny,seq=1", "a sequence of 2 or more"),
        ("gpt3:size=tiny,heads=7", "gpt3: hidden=48 is not divisible by heads=7"),
        ("mbart:size=tiny,layers=3", "layers=3 cannot be halved"),
        ("mbart:size=tiny,vocab=2", "vocab=2, but its special tokens are numbers 0 to 2"),
        ("mixtral:size=tiny,chosen=13", "chosen=13 experts of a token, but there are experts=12"),
        ("mixtral:size=tiny,balance=nan", "balance=nan of the router's loss; give 0 (none) or more"),
        ("mixtral:size=tiny,heads=16", "mixtral: hidden=48 with heads=16 makes heads of 3 channels"),
        ("mixtral:size=tiny,head=5", "mixtral: head=5 is odd, but its rotary embedding turns pairs of them"),
        ("swin:size=tiny,depths=2-x", "depths is '2-x', but it must be the layers of each stage, as 2-2-6-2"),
        ("swin:size=tiny,drop_path=1", "drop_path is 1.0, but it must be at least 0 and below 1"),
        ("swin:size=tiny,window=5", "makes 12 patches a side, but windows of 5 in 2 stages need a multiple of 10"),
        ("vit:size=tiny,image=21", "image=21 is not divisible by patch=4"),
    ],
)
def test_bad_specs_are_told_what_is_wrong(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        build(spec)


def test_without_transformers_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=re.escape("pip install 'superscaler[hf]'")):
        build("gpt2:size=tiny")


def test_a_model_that_does_not_fit_the_memory_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system ends a process that takes more than there is, without a word. 1,557.6 million weights are 6.2 GB."""
    monkeypatch.setattr(models, "free_memory", lambda: 6 * 10**9)
    with pytest.raises(InputError, match=r"its weights take 6\.2 GB, of which 6\.0 GB are free; choose smaller sizes"):
        models.build("gpt2:size=xl")
    assert next(models.build("gpt2:size=tiny").module.parameters()).device.type == "cpu"


def test_weights_that_a_plan_draws_fit_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = models.build("mlp:device=meta")
    optimizer = torch.optim.SGD(built.module.parameters(), lr=0.1)
    plan = ss.compile(ss.capture(built.module, kwargs=built.kwargs, optimizer=optimizer), "single", "local:1")
    needed = sum(p.nbytes for p in built.module.parameters())
    monkeypatch.setattr(artifact, "free_memory", lambda: needed - 1)
    with pytest.raises(InputError, match="write the plan directory on a machine with more memory"):
        plan.save(tmp_path / "plan", evaluation=False)
    monkeypatch.setattr(artifact, "free_memory", lambda: needed)
    plan.save(tmp_path / "plan", evaluation=False)
