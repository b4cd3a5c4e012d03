"""Checkpoints: saved under one plan, loaded under another, whole, exact, and never half."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.comm.threads import run_ranks
from superscaler.errors import InputError
from superscaler.models import build
from superscaler.plans import resolve
from superscaler.runtime.load import modules
from superscaler.runtime.step import Step, build_step
from superscaler.store.checkpoint import CheckpointHead, checkpoints, discard, lock, prune, write_shard
from superscaler.store.pieces import located, sizes
from superscaler.store.save import Saver
from superscaler.store.tensor_file import write_tensors
from superscaler.store.tensors import open_checkpoint
from superscaler.train.loop import train_rank
from superscaler.train.options import RankOptions
from tests.helpers.ran import on_ranks
from tests.helpers.sweeps import few, slow

# Those that training goes on under, and the optimizer there.
PLANS = {
    "single": (1, "SGD"),
    "data_parallel": (2, "AdamW"),
    "tensor_parallel": (2, "AdamW"),
    "pipeline_1f1b": (2, "SGD"),
    "hybrid:dp=2,tp=2": (4, "AdamW"),
    "offloaded": (2, "AdamW"),
}
# Those that a checkpoint goes between; most cut weights along other dims than the first.
BETWEEN = {
    "single": 1,
    "tensor_parallel": 2,
    "pipeline_1f1b": 2,
    "zero:stage=3": 4,
    "zero:2,stage=3 x tensor_parallel:2": 4,
    "swap:what=both": 2,
    "interlaced:microbatches=1": 2,
    "hybrid:pp=2,dp=2+1,zero=1": 3,
}
WORLDS = {plan: world for plan, (world, _) in PLANS.items()} | BETWEEN


def offloaded(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Weights and the optimizer's state are on the hosts, but for some."""
    resolve("data_parallel")(graph, cluster)
    ss.op_assign(graph, [op for op in graph.ops if op.kind == "optimizer"][1:], "host")


class Block(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.packed, self.norm, self.out = nn.Linear(8, 18), nn.BatchNorm1d(4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.packed(x).split([4, 4, 10], -1)
        h = self.norm((a * b).flatten(0, 1)).view(*x.shape[:-1], 4)
        return F.dropout(x + self.out(h) + (c**2).mean(-1, keepdim=True), self.dropout)


class Mixed(nn.Module):
    """Tied and packed weights, batch norms, a frozen weight, one that nothing reads, a buffer that becomes constant."""

    scale: Tensor

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.unread = nn.Parameter(torch.randn(3))
        self.register_buffer("scale", torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x) * (self.scale * 2) + self.frozen
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), x.flatten())


def tokens(number: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 16, (8, 6), generator=torch.Generator().manual_seed(number + 100 * seed))


def mixed(seed: int = 0) -> tuple[nn.Module, dict[str, Any], str]:
    torch.manual_seed(seed)
    return Mixed(), {"x": tokens(0)}, "x"


def exact(seed: int = 0) -> tuple[nn.Module, dict[str, Any], str]:
    """In float64 without dropout, so that eager steps of the module are the same steps."""
    torch.manual_seed(seed)
    return Mixed(dropout=0.0).double(), {"x": tokens(0)}, "x"


def gpt(seed: int = 0) -> tuple[nn.Module, dict[str, Any], str]:
    built = build(f"gpt2:size=tiny,layers=2,hidden=16,heads=2,vocab=16,seq=6,batch=8,dropout=0.1,seed={seed}")
    return built.module, built.kwargs, "input_ids"


MODELS: dict[str, Callable[..., tuple[nn.Module, dict[str, Any], str]]] = {"mixed": mixed, "exact": exact, "gpt": gpt}


@cache
def captured(model: str, optimizer: str, seed: int) -> ss.Graph:
    module, kwargs, _ = MODELS[model](seed)
    return ss.capture(module, kwargs=kwargs, optimizer=trained_by(optimizer, module), check=False)


def trained_by(optimizer: str, module: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in module.parameters() if p.requires_grad]
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    made: torch.optim.Optimizer = getattr(torch.optim, optimizer)(
        [{"params": trained[:2], "lr": 1e-2}, {"params": trained[2:], "lr": 3e-3}], **options
    )
    return made


@cache
def compiled(model: str, plan: str, optimizer: str = "AdamW") -> Any:
    # The statistics of a batch norm are those of the whole batch.
    told = f"{plan}:microbatches={2 if model == 'gpt' else 1}" if plan == "pipeline_1f1b" else plan
    given = offloaded if plan == "offloaded" else told
    return ss.compile(captured(model, optimizer, 0), given, ss.Cluster.local(WORLDS[plan])).compiled


def run(model: str, plan: str, work: Callable[[Step], Any], optimizer: str = "AdamW", seed: int = 0) -> list[Any]:
    """Call `work` with the step of each rank, in threads."""
    found, held = compiled(model, plan, optimizer), captured(model, optimizer, seed).captured
    described, code = json.loads(json.dumps(describe(found, seed))), modules(found.emitted.files)
    values = initial_values(found.graph.model, held.values)
    unread = {n: values[n] for n in described["tensors"] if n not in described["slots"]}

    def rank(communicator: Any) -> Any:
        fixed = {n: v.clone() for n, v in {**unread, **held.fixed}.items()} if communicator.rank == 0 else {}
        step = build_step(described, code, {n: v.clone() for n, v in values.items()}, communicator, fixed)
        result = work(step)
        step.close()
        return result

    return run_ranks(WORLDS[plan], rank)


def train(step: Step, model: str, numbers: range) -> list[float]:
    names = {"x": tokens, "input_ids": tokens, "labels": tokens}
    return [float(step({name: names[name](number) for name in step.inputs})) for number in numbers]


def state(step: Step) -> list[tuple[str, Any, Any, Tensor]]:
    """Return a copy of what a rank has: of each weight, buffer and state of the optimizer which piece it is."""
    found = [(n, v.shape, [[(0, k)] for k in v.shape], v.clone()) for n, v in step.fixed.items()]
    for entry in step.state.tables["weights"]:
        if entry["tensor"] in step.plan["tensors"]:
            weight, (name, ranges) = step.state.weights[entry["name"]], located(step.plan, entry)
            shape = step.plan["tensors"][entry["tensor"]]["shape"]
            states = step.state.updates.optimizer.state.get(weight, {}) if step.state.updates.optimizer else {}
            found.append((name, shape, ranges, weight.detach().clone()))
            for key, value in states.items():
                place = ((), []) if key == "step" else (shape, ranges)
                found.append((f"{name} {key}", *place, value.clone()))
    return found


def whole(found: list[list[tuple[str, Any, Any, Tensor]]]) -> dict[str, Tensor]:
    """Return the whole tensors of the `state` of all ranks."""
    made: dict[str, Tensor] = {}
    for name, shape, ranges, value in (piece for rank in found for piece in rank):
        out = made.setdefault(name, torch.full(shape, float("nan"), dtype=torch.float64))
        index = [torch.cat([torch.arange(a, b) for a, b in dim]) for dim in ranges]
        out[torch.meshgrid(*index, indexing="ij") if index else ()] = value.double()
    return made


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert not any(x.isnan().any() for x in one.values())
    assert [n for n in one if not torch.equal(one[n], other[n])] == []


@cache
def saved(model: str, plan: str, optimizer: str, folder: Path) -> dict[str, Tensor]:
    """Train three steps under a plan and save; return the state."""

    def work(step: Step) -> Any:
        train(step, model, range(3))
        step.lr = [0.5 * rate for rate in step.groups.rates()]
        step.save(folder)
        return state(step)

    return whole(run(model, plan, work, optimizer))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@cache
def eager() -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses of two eager steps after those of `saved`, and the weights and buffers after them."""
    module, _, _ = exact()
    optimizer = trained_by("AdamW", module)
    losses = []
    for number in range(5):
        if number == 3:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        optimizer.zero_grad()
        loss = module(tokens(number))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[3:], {name: value.double() for name, value in module.state_dict().items()}


@pytest.mark.parametrize(
    ("there", "every"), [("zero:2,stage=3 x tensor_parallel:2", 4), *slow(*((plan, 1) for plan in BETWEEN))]
)
def test_steps_after_a_resume_are_those_of_the_module(there: str, every: int, folders: Path) -> None:
    """From checkpoints of every fourth plan, or of each."""
    some = [(number, here) for number, here in enumerate(BETWEEN) if number % every == 0]
    for number, here in some:
        saved("exact", here, "AdamW", folders / f"exact-{number}")

    def resume(step: Step) -> Any:
        found = []
        for number, _ in some:
            assert step.restore(folders / f"exact-{number}") == 3
            assert (step.groups.rates(), step.state.steps, step.state.seed) == ([5e-3, 1.5e-3], 3, 0)
            found.append((train(step, "exact", range(3, 5)), state(step)))
        return found

    # Other initial weights, and another seed, so that all there is comes from the checkpoints.
    ranks = run("exact", there, resume, seed=1)
    losses, weights = eager()
    for at, (_, here) in enumerate(some):
        after = whole([rank[at][1] for rank in ranks])
        off = [abs(a - b) for rank in ranks for a, b in zip(rank[at][0], losses, strict=True)]
        off += [float((after[name] - value).abs().max()) for name, value in weights.items() if name in after]
        assert max(off) < 1e-9, here


@pytest.mark.parametrize("plan", few(PLANS, 3))
def test_training_goes_on_bit_for_bit(plan: str, tmp_path: Path) -> None:
    optimizer = PLANS[plan][1]
    through = run("mixed", plan, lambda step: (train(step, "mixed", range(5)), state(step)), optimizer)
    run("mixed", plan, lambda step: (train(step, "mixed", range(3)), step.save(tmp_path)), optimizer)
    resumed = run(
        "mixed", plan, lambda step: (step.restore(tmp_path), train(step, "mixed", range(3, 5)), state(step)), optimizer
    )
    assert [rank[1] for rank in resumed] == [rank[0][3:] for rank in through]
    equal(whole([rank[1] for rank in through]), whole([rank[2] for rank in resumed]))


def test_a_state_of_other_strides_is_the_same_state() -> None:
    """A fused optimizer walks over memory, whatever the strides of what it was given."""

    def work(step: Step) -> Any:
        train(step, "exact", range(1))
        kept = copy.deepcopy(step.state_dict())
        train(step, "exact", range(1, 2))
        through = state(step)
        for states in kept["optimizer"]["state"].values():
            states |= {name: x.t().contiguous().t() for name, x in states.items() if x.dim() == 2}
        step.load_state_dict(kept)
        train(step, "exact", range(1, 2))
        return through, state(step)

    ((through, again),) = run("exact", "single", work)
    equal(whole([through]), whole([again]))


@pytest.fixture
def checkpoint(folders: Path, tmp_path: Path) -> Path:
    """Return a copy of a folder with one checkpoint of two shards."""
    saved("mixed", "tensor_parallel", "AdamW", folders / "mixed-tensor_parallel")
    shutil.copytree(folders / "mixed-tensor_parallel", tmp_path / "kept")
    return tmp_path / "kept"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


def edit(file: Path, **changes: Any) -> None:
    found = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps(CheckpointHead.signed(found)))


SHARD, MANIFEST = "step-00000003/rank-00001.safetensors", "step-00000003/manifest.json"
# store/test_hostile.py has more, on one rank.
DAMAGE: list[tuple[str, Callable[[Path], object], str]] = [
    (SHARD, flip, "is damaged: it has sha256"),
    (MANIFEST, flip, "is damaged: it has another hash"),
    ("latest", lambda file: (file.parent / MANIFEST).unlink(), "names 'step-00000003', which is no whole checkpoint; "),
    ("latest", lambda file: file.write_text("../kept"), "names '../kept', which is no whole checkpoint"),
]


@pytest.mark.parametrize(("name", "spoil", "message"), DAMAGE)
def test_damage_is_named_and_nothing_is_loaded(
    name: str, spoil: Callable[[Path], object], message: str, checkpoint: Path
) -> None:
    spoil(checkpoint / name)
    told = []

    def work(step: Step) -> None:
        before = state(step)
        with pytest.raises(InputError) as caught:
            step.restore(checkpoint)
        told.append(str(caught.value))
        assert all(torch.equal(one[-1], other[-1]) for one, other in zip(before, state(step), strict=True))
        assert step.state.steps == 0

    run("mixed", "tensor_parallel", work, seed=1)
    # Every rank says the same, also one that reads another shard.
    assert len(told) == 2
    assert told[0] == told[1]
    assert str(checkpoint / name) in told[0]
    assert message in told[0]


def test_a_checkpoint_of_another_model_or_optimizer_is_refused(checkpoint: Path) -> None:
    def refusal(model: str, plan: str, optimizer: str, work: Callable[[Step], object]) -> str:
        with pytest.raises(InputError) as caught:
            run(model, plan, work, optimizer)
        return str(caught.value)

    message = refusal("gpt", "data_parallel", "AdamW", lambda step: step.restore(checkpoint))
    assert "has no transformer." in message
    message = refusal("mixed", "single", "SGD", lambda step: step.restore(checkpoint))
    assert "was trained by AdamW with 2 parameter groups, but this plan has SGD with 2" in message
    file = checkpoint / MANIFEST
    tensors = json.loads(file.read_text())["tensors"]
    edit(file, tensors=tensors | {"more.weight": tensors["frozen"]})
    message = refusal("mixed", "single", "AdamW", lambda step: step.restore(checkpoint))
    assert "has 1 tensors that this model lacks, more.weight first" in message
    edit(file, tensors=tensors | {"frozen": tensors["unread"]})
    message = refusal("mixed", "single", "AdamW", lambda step: step.restore(checkpoint))
    assert "frozen is float32 of shape (3,) in " in message
    assert "float32 of shape (8,) in this model" in message
    edit(file, tensors=tensors | {"frozen": {**tensors["frozen"], "pieces": []}})
    message = refusal("mixed", "single", "AdamW", lambda step: step.restore(checkpoint))
    assert "the pieces of 'frozen' overlap, or leave out some of its 8 elements" in message


def test_a_buffer_that_became_a_constant_must_be_what_it_was(checkpoint: Path, tmp_path: Path) -> None:
    module = mixed(1)[0]
    assert ss.load_weights(module, checkpoint) == []
    module.scale += 1
    save_model(module, str(tmp_path / "other.safetensors"))
    with pytest.raises(InputError, match=r"other values of scale than the module had at capture.*ss.load_weights"):
        run("mixed", "data_parallel", lambda step: step.load_weights(tmp_path / "other.safetensors"))


def test_a_module_gets_its_weights_back(checkpoint: Path, folders: Path) -> None:
    module, before = mixed(1)[0], saved("mixed", "tensor_parallel", "AdamW", folders / "mixed-tensor_parallel")
    assert ss.load_weights(module, checkpoint) == []
    assert module.head.weight is module.emb.weight
    equal({n: v for n, v in before.items() if "exp_avg" not in n and not n.endswith(" step")}, {
        name: value.detach().double() for name, value in module.state_dict().items() if name != "head.weight"
    })  # fmt: skip
    copies = {name: value.clone() for name, value in module.state_dict().items()}
    flip(checkpoint / SHARD)
    with pytest.raises(InputError, match="is damaged"):
        ss.load_weights(module, checkpoint)
    equal(copies, module.state_dict())
    with pytest.raises(InputError, match=r"packed.weight is on the meta device; give it memory first"):
        ss.load_weights(Block().to("meta"), checkpoint)
    with pytest.raises(InputError, match=r"has no weight, one of the model's own"):
        ss.load_weights(nn.Linear(2, 2), checkpoint)


def test_a_packed_weight_is_saved_by_heads(tmp_path: Path) -> None:
    run("gpt", "tensor_parallel", lambda step: step.save(tmp_path))
    module = gpt(1)[0]
    assert ss.load_weights(module, tmp_path) == []
    equal(gpt(0)[0].state_dict(), module.state_dict())


@pytest.mark.parametrize("plan", ["tensor_parallel", "pipeline_1f1b"])
def test_pretrained_weights_are_read_by_slices(plan: str, tmp_path: Path) -> None:
    module = mixed(1)[0]
    tensors = {name: value.clone() for name, value in module.state_dict().items() if name != "emb.weight"}
    tensors["more"] = torch.zeros(1)
    halves = [dict(list(tensors.items())[k::2]) for k in range(2)]
    for number, half in enumerate(halves):
        save_file(half, tmp_path / f"model-{number}.safetensors")
    index = {name: f"model-{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))

    def work(step: Step) -> Any:
        assert step.load_weights(tmp_path) == ["more"]
        return state(step)

    expected = {n: v.double() for n, v in {**module.state_dict()}.items() if n != "head.weight"}
    equal(expected, whole(run("mixed", plan, work)))
    (tmp_path / "model-1.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match=r"model-1.safetensors is no safetensors file, or is damaged"):
        run("mixed", plan, work)


def test_the_oldest_checkpoints_go_and_nothing_is_written_over(tmp_path: Path) -> None:
    def work(step: Step) -> None:
        saver = Saver(step, tmp_path, keep=2)
        for number in range(4):
            train(step, "mixed", range(number, number + 1))
            saver.save()
        # A save waits for the one before it.
        assert [path.name for path in checkpoints(tmp_path)][-1] >= "step-00000003"
        saver.finish()
        assert saver.last == tmp_path / "step-00000004"
        saver.close()
        assert step.save(tmp_path) == tmp_path / "step-00000004.1"

    run("mixed", "data_parallel", work)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".lock", "latest", "step-00000003", "step-00000004", "step-00000004.1"
    ]  # fmt: skip
    (tmp_path / "latest").write_text("step-00000003")
    prune(tmp_path, 1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000003"]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_save_that_fails_leaves_the_others_as_they_were(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full: list[int] = []

    def write(file: Path, tensors: dict[str, Tensor], hurry: threading.Event | None) -> str:
        if full and f"rank-0000{rank}" in file.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_tensors(file, tensors, hurry)

    monkeypatch.setattr("superscaler.store.folder.write_tensors", write)
    told: list[str] = []

    def work(step: Step) -> list[str]:
        saver = Saver(step, tmp_path, on_failure=told.append)
        for number in range(3):
            train(step, "mixed", range(number, number + 1))
            saver.save()
            saver.finish()
            step.state.communicator.barrier()
            full[:] = [1] if number == 0 else []
            step.state.communicator.barrier()
        return saver.failures

    text = f"{tmp_path}/step-00000002/rank-0000{rank}.safetensors cannot be written: No space left on device"
    failures = run("mixed", "tensor_parallel", work)
    assert failures[0] == failures[1] == told
    assert told == [f"the checkpoint of step 2 was not saved: {text}; the checkpoints before it are as they were."]
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001", "step-00000003"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "latest", "step-00000001", "step-00000003"]


LEFT = ".rank-00000.safetensors.0a1b.tmp"


def leftover(folder: Path, *more: str) -> Path:
    """Make what a run that was killed while it saved has left."""
    folder.mkdir()
    for name in (LEFT, "rank-00001.safetensors", "rank-00001.json", ".manifest.json.0a1b.tmp", *more):
        (folder / name).write_text("x")
    return folder


def test_what_killed_runs_left_is_removed_and_nothing_else(checkpoint: Path, tmp_path: Path) -> None:
    gone = [leftover(checkpoint / f"step-{number:08d}{more}") for number, more in ((1, ""), (4, ".2"))]
    (checkpoint / ".latest.mine").write_text("x")
    kept = [
        checkpoint / ".latest.mine",
        leftover(checkpoint / "step-00000007", "notes.txt"),
        leftover(checkpoint / "step-7"),
        leftover(checkpoint / "steps-00000008"),
        leftover(tmp_path / "elsewhere"),
        checkpoint / "step-00000003" / "rank-00000.safetensors",
    ]
    pointer = checkpoint / ".latest.0a1b.tmp"
    pointer.write_text("step-00000001")
    (checkpoint / "step-00000009").symlink_to(tmp_path / "elsewhere")
    kept += [checkpoint / "step-00000009" / LEFT]
    other = lock(checkpoint, is_first=True)
    assert not any(folder.exists() for folder in (*gone, pointer))
    for folder in gone:
        leftover(folder)
    with pytest.raises(InputError, match=f"another run saves into {checkpoint}: process {os.getpid()} on "):
        run("mixed", "data_parallel", lambda step: step.save(checkpoint))
    # A run that writes there may have begun them.
    assert all(folder.is_dir() for folder in gone)
    os.close(other)
    run("mixed", "data_parallel", lambda step: (step.restore(checkpoint), step.save(checkpoint)))
    assert not any(folder.exists() for folder in gone)
    assert all(path.exists() for path in kept)
    assert (checkpoint / "latest").read_text() == "step-00000003.1\n"


def test_what_was_saved_stays_where_older_ones_cannot_go(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(directory: Path, keep: int | None) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("superscaler.store.save.prune", fail)
    found = run("mixed", "data_parallel", lambda step: (step.restore(checkpoint), step.save(checkpoint, keep=1)))
    assert found[0][1] == checkpoint / "step-00000003.1"
    assert open_checkpoint(checkpoint).directory == found[0][1]
    discard(found[0][1])
    assert found[0][1].is_dir()
    discard(checkpoint / "step-00000003")
    assert not (checkpoint / "step-00000003").exists()


def test_a_checkpoint_that_is_moved_while_it_is_written_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(draft: Any, rank: int, *more: Any) -> None:
        if rank == 0:
            write_shard(draft, rank, *more)
            return
        # Rank 0 waits for the shard of rank 1, which is not there when the folder goes.
        while not (draft.path / "rank-00000.json").exists():
            time.sleep(0.01)
        draft.path.rename(tmp_path / "elsewhere")

    monkeypatch.setattr("superscaler.store.save.write_shard", moved)
    with pytest.raises(InputError, match=r"step-00000000 cannot be written: No such file or directory"):
        run("mixed", "tensor_parallel", lambda step: step.save(tmp_path / "kept"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    with pytest.raises(InputError, match=r"file/kept cannot be written: Not a directory"):
        run("mixed", "data_parallel", lambda step: step.save(tmp_path / "file" / "kept"))
    for directory, keep, message in (("", None, "need the name of a folder"), ("x", 0, "0 checkpoints cannot be kept")):
        with pytest.raises(InputError, match=message):
            run("mixed", "single", partial(Step.save, directory=directory, keep=keep))
    assert (tmp_path / "file").read_text() == "kept"


def test_a_run_looks_before_its_first_step_whether_it_can_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("superscaler.train.resume.stop_requests", lambda _: nullcontext(lambda: False))
    held = lock(tmp_path / "held", is_first=True)

    def work(step: Step) -> list[str]:
        found = []
        for folder in (tmp_path / "held", Path("/proc/kept"), tmp_path / "held" / ".lock" / "kept"):
            with pytest.raises(InputError) as caught:
                train_rank(RankOptions(save=folder), tmp_path, load=lambda _, **options: step)
            found.append(str(caught.value))
        assert step.state.steps == 0
        return found

    (texts,) = run("mixed", "single", work)
    os.close(held)
    assert f"another run saves into {tmp_path}/held: process {os.getpid()} on {socket.gethostname()}. Wait" in texts[0]
    assert texts[1].startswith("/proc/kept cannot be written: No such file or directory")
    assert ".lock is a file; choose a folder." in texts[2]
    # The lock is that of a process, not of a file that stays.
    os.close(lock(tmp_path / "held", is_first=True))


def test_each_element_is_saved_once(folders: Path) -> None:
    for plan in PLANS:
        saved("mixed", plan, "AdamW", folders / f"mixed-{plan}-AdamW")
        stored = open_checkpoint(folders / f"mixed-{plan}-AdamW")
        for entry in stored.tensors.values():
            assert sum(math.prod(sizes(piece.ranges)) for piece in entry.pieces) == math.prod(entry.shape)


def test_an_optimizer_with_a_state_is_refused() -> None:
    module, kwargs, _ = mixed()
    optimizer = torch.optim.AdamW(module.parameters())
    module(**kwargs).backward()
    optimizer.step()
    with pytest.raises(InputError, match=r"this AdamW has state of \d+ parameters already, emb.weight first"):
        ss.capture(module, kwargs=kwargs, optimizer=optimizer)


def test_the_loss_scale_goes_on(tmp_path: Path) -> None:
    module, kwargs, _ = mixed()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    graph = ss.capture(module, kwargs=kwargs, optimizer=torch.optim.AdamW(module.parameters()), scaler=scaler)
    found = ss.compile(graph, "data_parallel", "local:2").compiled
    described, code = describe(found), modules(found.emitted.files)
    values = initial_values(found.graph.model, found.graph.captured.values)

    def work(restored: bool, communicator: Any) -> Any:
        step = build_step(described, code, values, communicator)
        if restored:
            step.restore(tmp_path)
        else:
            train(step, "mixed", range(3))
            step.save(tmp_path)
        assert step.state.updates.scaler is not None
        return step.state.updates.scaler.state_dict()

    before, after = (run_ranks(2, partial(work, restored)) for restored in (False, True))
    assert before == after
    assert before[0]["scale"] == 128.0
    assert before[0]["_growth_tracker"] == 1


class Frozen(nn.Module):
    """A frozen embedding that is also the head, around a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(12, 8).requires_grad_(False), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(
            F.linear(self.layer(self.embedding(x)), self.embedding.weight).flatten(0, 1), x.flatten()
        )


def test_pieces_of_a_frozen_weight_that_overlap_are_saved_once(tmp_path: Path) -> None:
    """A device reads all rows for the embedding, two others some of them for the head: each keeps what it reads."""

    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        ss.op_assign(graph, graph.forward_ops, 1)
        head = ss.op_trans(graph, graph.op("linear_1"), ss.Split("vocabulary", sizes=(5, 7)))
        ss.op_assign(graph, head, [0, 2])

    def train(step: Step) -> None:
        step(graph.captured.batch)
        step.save(tmp_path)

    module, loaded, batch = Frozen(), Frozen(), (torch.randint(0, 12, (4, 6)),)
    graph = ss.capture(module, batch, optimizer=torch.optim.SGD(module.layer.parameters(), lr=0.1))
    on_ranks(ss.compile(graph, plan, "local:3"), train)
    assert ss.load_weights(loaded, tmp_path) == []
    assert torch.equal(loaded.embedding.weight, module.embedding.weight)
