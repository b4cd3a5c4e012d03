"""Views of weights and buffers: a step reads, returns and keeps what they are before its updates, as PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.artifact import slots_of
from superscaler.certify.certificate import check_program
from superscaler.errors import ScheduleError
from superscaler.plans import resolve
from superscaler.runtime.executor import take
from superscaler.runtime.step import Step
from tests.helpers.ran import SProgram, captured, on_ranks
from tests.helpers.sweeps import slow


class Views(nn.Module):
    """A product with a detached weight; buffers set to weights, averages and each other; outputs that are views."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.e = (nn.Linear(4, 4, bias=False) for _ in range(3))
        for name in ("average", "last", "turned", "one", "other", "input"):
            self.register_buffer(name, torch.randn(4, 4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        weight, before = self.e.weight, self.one.t()
        loss = (self.b(x).tanh() @ weight.detach()).square().sum() + self.e(self.a(x).tanh()).square().sum()
        with torch.no_grad():
            self.average.mul_(0.9).add_(weight * 0.1)
            self.last.copy_(weight)
            self.turned.copy_(weight.t())
            turn = self.one.t().clone()
            self.one.copy_(self.other.t())
            self.other.copy_(turn)
            self.input.copy_(x)
        return {"loss": loss, "w": weight, "views": [weight.detach(), weight[1:3].t(), weight.view(2, 8)], "b": before}


class Bare(nn.Module):
    """The loss itself is a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"loss": self.e.bias[0], "views": [self.e.weight.t()]}


def early(graph: ss.Graph, cluster: ss.Cluster, before: str = "a") -> None:
    """Update one weight before the backward of a module, or of the product with a view of it."""
    resolve("data_parallel")(graph, cluster)
    ops = [op for op in graph.forward_ops if op.module == before or (not before and "matmul" in op.target)]
    ss.op_order(graph, graph.op("update.e.weight"), graph.select(ops=ops, kind="B"))


def both(make: Callable[[], nn.Module]) -> tuple[ss.Graph, nn.Module]:
    """Return a captured module, and one of the same weights."""
    graph = captured(lambda: (make(), torch.randn(4, 4)), outputs=True)
    return graph, copy.deepcopy(graph.captured.call.module)


CASES: list[tuple[Callable[[], nn.Module], SProgram | str, int]] = [
    *slow((Views, "single", 1)),
    *slow((Views, "tensor_parallel", 2)),
    *slow((Views, "zero:stage=3", 2)),
    *slow((Views, early, 2)),
    (Bare, "single", 1),
]


@pytest.mark.parametrize(("make", "plan", "world"), CASES)
def test_views_are_what_they_are_before_the_updates(
    make: Callable[[], nn.Module], plan: SProgram | str, world: int
) -> None:
    graph, twin = both(make)
    compiled = ss.compile(graph, plan, f"local:{world}").compiled
    check_program(compiled.program)

    def run(step: Step) -> list[Any]:
        return [(step(graph.captured.batch), step.outputs, step.state.weights) for _ in range(3)]

    found = on_ranks(compiled, run)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for k in range(3):
        optimizer.zero_grad()
        result = twin(*graph.captured.batch.values())
        wanted = [x.detach().clone() for x in (result.get("w"), *result["views"], result.get("b")) if x is not None]
        expected = result["loss"].detach().clone()
        result["loss"].backward()
        optimizer.step()
        for loss, outputs, _ in (steps[k] for steps in found):
            torch.testing.assert_close(loss, expected)
            given = [outputs.get("w"), *outputs["views"], outputs.get("b")]
            torch.testing.assert_close([x for x in given if x is not None], wanted)
    state = twin.state_dict()
    for device, steps in zip(compiled.program.devices, found, strict=True):
        for held in device.weights:
            expected = take(state[held.tensor], slots_of(graph.model, held.tensor), held.box)
            torch.testing.assert_close(steps[-1][2][str(held.name)].detach(), expected, msg=held.tensor)


def test_an_update_before_what_reads_a_view_is_refused() -> None:
    graph, _ = both(Views)
    with pytest.raises(ScheduleError, match=r"U of e.weight .* needs B of matmul .* \(read before update, as detach\)"):
        ss.compile(graph, partial(early, before=""), "local:2")
