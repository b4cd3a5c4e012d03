"""Checkpoints as other programs have them: Hugging Face's library, plain safetensors, torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from transformers import AutoModelForCausalLM

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.comm.threads import run_ranks
from superscaler.errors import InputError
from superscaler.models import build
from superscaler.runtime.load import modules
from superscaler.runtime.step import Step, build_step
from superscaler.store.convert import export, import_weights
from superscaler.store.pieces import whole
from superscaler.store.tensors import open_checkpoint
from tests.helpers.sweeps import slow

SPECS = {
    "gpt2": "gpt2:size=tiny,layers=2,hidden=16,heads=2,vocab=64,seq=6,batch=4",
    "llama": "llama:size=tiny,layers=1,hidden=16,heads=2,kv_heads=1,vocab=64,seq=6,batch=4",
    "t5": "t5:size=tiny,layers=1",
}


def run(name: str, plan: str, work: Callable[[Step, Callable[[], object]], object], world: int = 1) -> None:
    """Call `work` on each device of a plan, with its step and what takes one."""
    built = build(SPECS[name])
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-2)
    graph = ss.capture(built.module, built.args, built.kwargs, optimizer)
    found, captured = ss.compile(graph, plan, f"local:{world}").compiled, graph.captured
    code, values = modules(found.emitted.files), initial_values(found.graph.model, captured.values)
    batch = {key: value.clamp(min=0) for key, value in captured.batch.items()}

    def rank(communicator: Any) -> None:
        fixed = captured.fixed if communicator.rank == 0 else {}
        step = build_step(describe(found), code, values, communicator, fixed)
        work(step, lambda: step(batch))

    run_ranks(world, rank)


def trained(name: str, folder: Path) -> None:
    """Train two steps of a model and save."""
    run(name, "tensor_parallel", lambda step, train: (train(), train(), step.save(folder)), world=2)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    trained("gpt2", folder)
    return folder


@pytest.mark.parametrize("name", ["llama", *slow("gpt2", "t5")])
def test_an_export_opens_in_transformers_with_equal_logits(name: str, tmp_path: Path) -> None:
    trained(name, tmp_path / "kept")
    files = export(tmp_path / "kept", tmp_path / "out", "safetensors", lambda: build(SPECS[name]).module)
    assert {"config.json", "model.safetensors"} <= set(files)
    built = build(SPECS[name] + ",seed=3")
    assert ss.load_weights(built.module, tmp_path / "kept") == []
    theirs = type(built.module).from_pretrained(tmp_path / "out")
    for module in (built.module, theirs):
        module.eval()
    logits = [module(*built.args, **built.kwargs).logits for module in (built.module, theirs)]
    assert torch.equal(*logits)
    if name == "gpt2":
        # Its config alone names the class.
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert model.lm_head.weight is model.transformer.wte.weight
        assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    # The same files start training, and tied weights are in them once.
    again, _ = import_weights(tmp_path / "out", tmp_path / "again")
    assert {n: tuple(e.shape) for n, e in open_checkpoint(again).tensors.items()}.items() <= {
        n: tuple(t.shape) for n, t in theirs.state_dict().items()
    }.items()
    other = build(SPECS[name] + ",seed=4").module
    assert ss.load_weights(other, again) == []
    assert all(torch.equal(v, built.module.state_dict()[n]) for n, v in other.state_dict().items())


class Own(nn.Module):
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("hidden", torch.ones(2), persistent=False)


def test_a_module_of_ones_own_is_exported_with_its_names(tmp_path: Path) -> None:
    save_file({"second.weight": torch.eye(4)}, tmp_path / "theirs.safetensors")
    assert export(tmp_path / "theirs.safetensors", tmp_path / "out", "safetensors", Own) == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert list(found) == ["first.weight"]
    assert torch.equal(found["first.weight"], torch.eye(4))
    for out in (Path("/"), tmp_path / "out"):
        with pytest.raises(InputError, match=rf"{out} is there already and is not empty"):
            export(tmp_path / "theirs.safetensors", out, "safetensors", Own)
    save_file({"second.weight": torch.eye(4), "first.weight": torch.ones(4, 4)}, tmp_path / "untied.safetensors")
    with pytest.raises(InputError, match=r"first.weight and second.weight differ in .*, but this model ties them"):
        ss.load_weights(Own(), tmp_path / "untied.safetensors")
    save_file({"second.weight": torch.eye(4, dtype=torch.float64)}, tmp_path / "wide.safetensors")
    with pytest.raises(InputError, match=r"is float64 of shape \(4, 4\) in .*, but float32 of shape \(4, 4\)"):
        ss.load_weights(Own(), tmp_path / "wide.safetensors")
    save_file({"second.weight": torch.eye(4, dtype=torch.bfloat16)}, tmp_path / "narrow.safetensors")
    assert ss.load_weights(Own(), tmp_path / "narrow.safetensors") == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_distributed_checkpoint_both_ways(gpt2: Path, tmp_path: Path) -> None:
    export(gpt2, tmp_path / "out", "distributed", nn.Module)
    module = build(SPECS["gpt2"] + ",seed=5").module
    expected = build(SPECS["gpt2"]).module
    ss.load_weights(expected, gpt2)
    state = {
        "model": module.state_dict(),
        "optimizer": {"state": {"transformer.wpe.weight": {"step": torch.zeros(())}}},
    }
    dcp.load(state, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    assert all(torch.equal(v, expected.state_dict()[n]) for n, v in state["model"].items())
    assert state["optimizer"]["state"]["transformer.wpe.weight"]["step"] == 2
    with pytest.raises(InputError, match=r"reading a pickle runs whatever code is in it; if you trust .* --trust"):
        import_weights(tmp_path / "out", tmp_path / "again")
    assert not (tmp_path / "again").exists()
    other = build(SPECS["gpt2"] + ",seed=6").module
    ss.load_weights(other, import_weights(tmp_path / "out", tmp_path / "again", trust=True)[0])
    assert all(torch.equal(v, expected.state_dict()[n]) for n, v in other.state_dict().items())
    # The optimizer's state comes along.
    ours, theirs = open_checkpoint(gpt2), open_checkpoint(tmp_path / "again")
    for name, entry in ours.tensors.items():
        assert (theirs.tensors[name].states, theirs.tensors[name].steps) == (entry.states, entry.steps)
        for state in entry.states:
            assert torch.equal(*(stored.read(name, whole(entry.shape), state) for stored in (ours, theirs)))
    assert any(entry.states for entry in ours.tensors.values())

    def goes_on(step: Step, train: Callable[[], object]) -> None:
        assert step.restore(tmp_path / "again") == 0
        assert {float(state["step"]) for state in step.state.updates.optimizer.state.values()} == {2.0}
        train()

    run("gpt2", "single", goes_on)
    (tmp_path / "out" / ".metadata").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"out is no folder of torch.distributed.checkpoint, or is damaged"):
        import_weights(tmp_path / "out", tmp_path / "third", trust=True)
    assert not (tmp_path / "third").exists()


def test_a_disk_that_is_full_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    save_file({"first.weight": torch.eye(4)}, tmp_path / "theirs.safetensors")
    monkeypatch.setattr("superscaler.store.formats.save_file", write)
    monkeypatch.setattr("superscaler.store.folder.write_tensors", write)
    for work in (
        lambda: export(tmp_path / "theirs.safetensors", tmp_path / "out", "safetensors", Own),
        lambda: import_weights(tmp_path / "theirs.safetensors", tmp_path / "out"),
    ):
        with pytest.raises(
            InputError, match=r"out cannot be written: .*No space left on device .*; choose another folder"
        ):
            work()
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.safetensors"]
