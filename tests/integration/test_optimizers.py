"""Optimizers as torch computes them: parameter groups, momentum, frozen parameters, under every placement."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from superscaler.errors import InputError
from superscaler.ir.graph import Graph
from superscaler.plan import capture, compile
from superscaler.runtime.step import Step
from tests.helpers.ran import Around, equal, on_ranks
from tests.helpers.sweeps import slow


def two_groups(module: nn.Module) -> list[dict[str, object]]:
    parameters = list(module.parameters())
    flat = [p for p in parameters if p.dim() < 2]
    return [{"params": flat, "weight_decay": 0.0, "lr": 3e-3}, {"params": [p for p in parameters if p.dim() > 1]}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, amsgrad=True),
    "groups": lambda m: torch.optim.AdamW(two_groups(m), lr=1e-3, weight_decay=0.1),
    # All want gradients, and some are updated.
    "some": lambda m: torch.optim.AdamW([p for n, p in m.named_parameters() if not n.startswith("h.0.")], lr=1e-3),
    "frozen": lambda m: torch.optim.AdamW([p for n, p in m.named_parameters() if not n.startswith("h.0.")], lr=1e-3),
}


def in_blocks(m: Around, ids: Tensor, labels: Tensor) -> Tensor:
    x = m.table(ids)
    for block in m.h:
        x = x + block(x)
    return nn.functional.cross_entropy(m.head(m.norm(x)), labels)


def stack() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))
    ends = {"table": nn.Embedding(12, 8), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 12, bias=False)}
    return Around(in_blocks, h=nn.ModuleList(layers), **ends), (torch.arange(8), torch.arange(8) + 2)


@cache
def trained_by(name: str) -> Graph:
    module, inputs = stack()
    for key, parameter in module.named_parameters():
        parameter.requires_grad_(name != "frozen" or not key.startswith("h.0."))
    return capture(module, inputs, optimizer=OPTIMIZERS[name](module), check=False)


PIPELINE = "pipeline_1f1b:stages=2,microbatches=2"


@pytest.mark.parametrize(
    ("name", "spec"),
    [("some", PIPELINE), *slow(("groups", PIPELINE), *((name, "tensor_parallel") for name in OPTIMIZERS))],
)
def test_a_step_equals_torch(name: str, spec: str) -> None:
    graph = trained_by(name)
    equal(graph, spec)
    updated = {op.inputs[0].tensor for op in graph.ops if not op.is_forward}
    assert any(tensor.startswith("h.0.") for tensor in updated) == (name not in ("some", "frozen"))


def two() -> nn.Module:
    layers = {"first": nn.Linear(8, 33), "second": nn.Linear(33, 1)}
    return Around(lambda m, x: m.second(m.first(x).tanh()).square().mean(), **layers)


@pytest.mark.filterwarnings("ignore:.*have float16 gradients")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("made", [torch.optim.SGD, partial(torch.optim.AdamW, eps=1e-3)], ids=["SGD", "AdamW"])
def test_weights_are_those_of_eager_training_in_their_own_dtype(
    made: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    """Torch's fused updates are for float32: of halves its SGD changes no weight on the CPU."""
    torch.manual_seed(0)
    module, x = two().to(dtype), torch.randn(4, 8, dtype=dtype)
    eager = copy.deepcopy(module)
    graph = capture(module, (x,), optimizer=made(module.parameters(), lr=0.05), check=False)

    def run(step: Step) -> tuple[dict[str, Tensor], list[object]]:
        for _ in range(2):
            step({"inputs_0": x})
        return step.state_dict()["weights"], [g["fused"] for g in step.state.updates.optimizer.param_groups]

    ((weights, fused),) = on_ranks(compile(graph, "single", "local:1"), run)
    optimizer = made(eager.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        eager(x).backward()
        optimizer.step()
    is_single = dtype == torch.float32
    near = {"rtol": 1e-6, "atol": 1e-7} if is_single else {"rtol": 0.0, "atol": 0.0}
    for name, want in eager.named_parameters():
        torch.testing.assert_close(weights[name.replace(".", "_")], want.detach(), **near)
    assert fused == [True if is_single else None]


def in_matrices(m: Around, x: Tensor) -> Tensor:
    return m.last(m.second(m.first(x).tanh()) + x).square().mean()


def test_an_optimizer_of_matrices_gets_whole_ones() -> None:
    """Muon: under ZeRO each matrix rests on one device; under tensor parallelism on all, which read their part."""
    torch.manual_seed(0)
    ends = [nn.Linear(a, b, bias=False) for a, b in ((8, 16), (16, 8), (8, 6))]
    module, x = Around(in_matrices, **dict(zip(("first", "second", "last"), ends, strict=True))), torch.randn(8, 8)
    graph = capture(module, (x,), optimizer=torch.optim.Muon(module.parameters(), lr=0.05), check=False)
    for plan, count, copies in (
        ("data_parallel", 2, 2),
        ("zero:stage=2,microbatches=2", 2, 1),
        ("zero:stage=1,shard=2", 4, 2),
        ("zero:2,stage=3 x tensor_parallel:2", 4, 2),
    ):
        devices = equal(graph, plan, count).program.devices
        boxes = [(w.tensor, tuple(w.box)) for device in devices for w in device.weights]
        assert sorted(boxes) == sorted(
            (f"{name}.weight", tuple((0, size) for size in layer.weight.shape))
            for name, layer in zip(("first", "second", "last"), ends, strict=True)
            for _ in range(copies)
        )
        assert all(device.weights for device in devices)

    def two_steps(step: Step) -> dict[str, Tensor]:
        for _ in range(2):
            step({"inputs_0": x})
        return {w["tensor"]: step.state.weights[w["name"]].detach() for w in step.state.tables["weights"]}

    found = on_ranks(compile(graph, "zero:stage=1", "local:2"), two_steps)
    optimizer = torch.optim.Muon(module.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        module(x).backward()
        optimizer.step()
    for name, want in module.named_parameters():
        # It computes the update in bfloat16.
        torch.testing.assert_close((found[0] | found[1])[name], want.detach(), rtol=1e-3, atol=1e-3)


class Mixed(nn.Module):
    """Matrices, an embedding and vectors; the first matrix is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(32, 8), nn.LayerNorm(8), nn.Linear(8, 32, bias=False)
        self.first, self.last = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        gate, up = self.first(self.norm(x)).split([16, 8], -1)
        return nn.functional.cross_entropy(self.head(x + self.last(gate.view(*up.shape, 2).sum(-1) * up)).mT, labels)

    def optimizers(self, lr: float = 0.05) -> list[torch.optim.Optimizer]:
        matrices = [self.first.weight, self.last.weight]
        rest = [p for p in self.parameters() if all(p is not one for one in matrices)]
        decayed = [{"params": rest[:1]}, {"params": rest[1:], "weight_decay": 0.0}]
        return [torch.optim.Muon(matrices, lr=lr), torch.optim.AdamW(decayed, lr=lr / 5)]


def test_optimizers_share_the_parameters_out(tmp_path: Path) -> None:
    """Muon for matrices, which stay whole, and AdamW for the rest; so in checkpoints, that other plans resume."""
    torch.manual_seed(0)
    module, batch = Mixed(), {"ids": torch.randint(0, 32, (8, 4)), "labels": torch.randint(0, 32, (8, 4))}
    graph = capture(module, kwargs=batch, optimizer=module.optimizers(), check=False)
    first = compile(graph, "zero:stage=2,microbatches=2", "local:2")
    held = [w.tensor for device in first.compiled.program.devices for w in device.weights]
    assert (held.count("last.weight"), held.count("first.weight"), held.count("head.weight")) == (1, 1, 2)
    halves = capture(module, kwargs=batch, optimizer=module.optimizers(), precision="bf16", check=False)
    equal(halves, "zero:stage=3", 2)

    def two_steps(step: Step, rate: float) -> dict[str, Tensor]:
        if rate < 1:
            step.restore(tmp_path)
        step.lr = [rate * r for r in (0.05, 0.01, 0.01)]
        for _ in range(2):
            step(batch)
        step.save(tmp_path)
        return {w["tensor"]: step.state.weights[w["name"]].detach() for w in step.state.tables["weights"]}

    on_ranks(first, partial(two_steps, rate=1.0))
    found = on_ranks(compile(graph, "tensor_parallel", "local:2"), partial(two_steps, rate=0.5))
    optimizers = module.optimizers()
    for number in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        module(**batch).backward()
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5 if number == 2 else 1
            optimizer.step()
    for name in ("norm.weight", "last.weight", "first.weight"):
        torch.testing.assert_close(found[0][name], module.get_parameter(name).detach(), rtol=2e-3, atol=2e-3)
    with pytest.raises(
        InputError, match=r"last.weight is a parameter of two optimizers; leave it out of one of them\.$"
    ):
        capture(module, kwargs=batch, optimizer=[*module.optimizers(), torch.optim.SGD([module.last.weight])])
    with pytest.raises(InputError, match="has no optimizer"):
        capture(module, kwargs=batch, optimizer=[])


def test_other_optimizers_of_torch_are_refused_by_name() -> None:
    module = nn.Linear(4, 4)
    for kind, why in ((torch.optim.LBFGS, "several times"), (torch.optim.Adafactor, "rows and columns")):
        with pytest.raises(InputError, match=f"torch.optim.{kind.__name__} .*{why}.*; take one of AdamW, Adam, SGD"):
            capture(module, (torch.ones(2, 4),), optimizer=kind(module.parameters()))


def test_a_step_without_an_optimizer_is_refused() -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(InputError, match=r"which has no default; pass optimizer=torch.optim.AdamW"):
        capture(module, (torch.ones(2, 4),))


def steps_of(optimizer: str, then: Callable[[Step], object], spec: str = "pipeline_1f1b:stages=2") -> list[object]:
    """Return what `then` makes of each of two ranks."""
    return on_ranks(compile(trained_by(optimizer), spec, "local:2"), then)


def test_a_number_sets_the_rate_of_all_groups_where_they_have_one() -> None:
    def halve(step: Step) -> object:
        step.lr = step.lr / 2  # type: ignore[operator]
        return step.lr, [group["lr"] for group in step.state.updates.optimizer.param_groups]

    assert steps_of("sgd", halve) == [(0.05, [0.05])] * 2


def test_groups_keep_rates_of_their_own() -> None:
    def halve(step: Step) -> object:
        assert step.lr == (3e-3, 1e-3)
        step.lr = [rate / 2 for rate in step.lr]  # type: ignore[union-attr]
        saved = step.state_dict()
        step.lr = (1, 1)
        step.load_state_dict(saved)
        return step.lr, [group["lr"] for group in step.state.updates.optimizer.param_groups]

    assert steps_of("groups", halve) == [((1.5e-3, 5e-4), [1.5e-3, 5e-4])] * 2


def test_a_rank_without_a_group_knows_its_rate() -> None:
    """Of three groups the first rank has none of the last weight, and the second none of the embeddings."""
    module, inputs = stack()
    named = dict(module.named_parameters())
    ends = [[p for n, p in named.items() if n.startswith(end)] for end in ("table", "norm")]
    rest = [p for n, p in named.items() if n.startswith(("h.", "head"))]
    groups = [{"params": p, "lr": lr} for p, lr in zip([*ends, rest], (0.1, 0.2, 0.3), strict=True)]
    graph = capture(module, inputs, optimizer=torch.optim.SGD(groups), check=False)
    plan = compile(graph, "pipeline_1f1b:stages=2", "local:2")

    def rates(step: Step) -> object:
        before, step.lr = step.lr, (0.4, 0.5, 0.6)
        return before, step.state_dict()

    def resumed(step: Step) -> object:
        step.load_state_dict(saved[step.rank][1])
        return step.lr, [group["lr"] for group in step.state.updates.optimizer.param_groups]

    saved = on_ranks(plan, rates)
    assert [before for before, _ in saved] == [(0.1, 0.2, 0.3)] * 2
    assert on_ranks(plan, resumed) == [((0.4, 0.5, 0.6), [0.4, 0.6]), ((0.4, 0.5, 0.6), [0.5, 0.6])]


@pytest.mark.parametrize(
    ("optimizer", "value", "message"),
    [
        ("groups", 1e-4, r"2 parameter groups have the learning rates 0.003, 0.001, which 0.0001 would make equal"),
        ("groups", [1e-4], "1 learning rates were assigned, but the optimizer has 2 parameter groups"),
        ("sgd", [0.1, 0.2], "2 learning rates were assigned, but the optimizer has 1 parameter groups"),
        ("sgd", -0.1, "step.lr cannot be -0.1; a learning rate is a finite number of 0 or more"),
        ("groups", [0.1, float("nan")], "step.lr cannot be .*nan"),
    ],
)
def test_rates_that_do_not_fit_the_groups_are_refused(optimizer: str, value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        steps_of(optimizer, lambda step: setattr(step, "lr", value))
