"""Checkpoints: saved under one plan, loaded under another, whole, exact, and never half."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.models import build
from superscaler.runtime.pieces import located
from superscaler.runtime.step import Step, build_step, modules
from superscaler.runtime.threads import run_ranks

PLANS = {
    "single": 1,
    "data_parallel": 2,
    "tensor_parallel": 2,
    "pipeline_1f1b": 2,
    "hybrid:dp=2,tp=2": 4,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.packed, self.norm, self.out = nn.Linear(8, 18), nn.BatchNorm1d(4), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.packed(x).split([4, 4, 10], -1)
        h = self.norm((a * b).flatten(0, 1)).view(*x.shape[:-1], 4)
        return F.dropout(x + self.out(h) + (c**2).mean(-1, keepdim=True), 0.1)


class Mixed(nn.Module):
    """Tied and packed weights, batch norms, a frozen weight, one that nothing reads, a buffer that becomes constant."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
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


def gpt(seed: int = 0) -> tuple[nn.Module, dict[str, Any], str]:
    built = build(f"gpt2:size=tiny,layers=2,hidden=16,heads=2,vocab=16,seq=6,batch=8,dropout=0.1,seed={seed}")
    return built.module, built.kwargs, "input_ids"


MODELS: dict[str, Callable[..., tuple[nn.Module, dict[str, Any], str]]] = {"mixed": mixed, "gpt": gpt}


@cache
def compiled(model: str, plan: str, optimizer: str = "AdamW", seed: int = 0) -> Any:
    module, kwargs, _ = MODELS[model](seed)
    trained = [p for p in module.parameters() if p.requires_grad]
    options = {"momentum": 0.9} if optimizer == "SGD" else {}
    made = getattr(torch.optim, optimizer)(
        [{"params": trained[:2], "lr": 1e-2}, {"params": trained[2:], "lr": 3e-3}], **options
    )
    # The statistics of a batch norm are those of the whole batch.
    told = f"{plan}:microbatches={2 if model == 'gpt' else 1}" if plan == "pipeline_1f1b" else plan
    return ss.compile(ss.capture(module, kwargs=kwargs, optimizer=made), told, ss.Cluster.local(PLANS[plan])).compiled


def run(model: str, plan: str, work: Callable[[Step], Any], optimizer: str = "AdamW", seed: int = 0) -> list[Any]:
    """Call `work` with the step of each rank, in threads."""
    found = compiled(model, plan, optimizer, seed)
    captured = found.graph.captured
    described, code = json.loads(json.dumps(describe(found, seed))), modules(found.emitted.files)
    values = initial_values(found.graph.model, captured.values)
    unread = {n: values[n] for n in described["tensors"] if n not in described["slots"]}

    def rank(communicator: Any) -> Any:
        fixed = {n: v.clone() for n, v in {**unread, **captured.fixed}.items()} if communicator.rank == 0 else {}
        step = build_step(described, code, {n: v.clone() for n, v in values.items()}, communicator, fixed)
        result = work(step)
        step.close()
        return result

    return run_ranks(PLANS[plan], rank)


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
            states = step.state.optimizer.state.get(weight, {}) if step.state.optimizer else {}
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
        step.lr = [0.5 * rate for rate in step.rates()]
        step.save(folder)
        return state(step)

    return whole(run(model, plan, work, optimizer))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.mark.parametrize("there", PLANS)
@pytest.mark.parametrize("here", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_any_plan_loads_what_any_other_saved(model: str, here: str, there: str, folders: Path) -> None:
    optimizer = "SGD" if "pipeline" in here else "AdamW"
    folder = folders / f"{model}-{here}"
    before = saved(model, here, optimizer, folder)

    def load(step: Step) -> Any:
        assert step.restore(folder) == 3
        return state(step), step.rates(), step.state.steps, step.state.seed, train(step, model, range(3, 4))

    # Other initial weights, and another seed, so that all there is comes from the checkpoint.
    found = run(model, there, load, optimizer, seed=1)
    equal(before, whole([rank[0] for rank in found]))
    assert all(rank[1:4] == ([5e-3, 1.5e-3], 3, 0) for rank in found)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("plan", PLANS)
def test_training_goes_on_bit_for_bit(plan: str, optimizer: str, tmp_path: Path) -> None:
    through = run("mixed", plan, lambda step: (train(step, "mixed", range(5)), state(step)), optimizer)
    run("mixed", plan, lambda step: (train(step, "mixed", range(3)), step.save(tmp_path)), optimizer)
    resumed = run(
        "mixed", plan, lambda step: (step.restore(tmp_path), train(step, "mixed", range(3, 5)), state(step)), optimizer
    )
    assert [rank[1] for rank in resumed] == [rank[0][3:] for rank in through]
    equal(whole([rank[1] for rank in through]), whole([rank[2] for rank in resumed]))
