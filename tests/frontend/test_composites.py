"""Composite operators replaced one by one give the program of torch's second trace."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram

from superscaler.frontend import composites, export
from superscaler.frontend.capture import capture
from superscaler.models import build
from tests.graphs import step_of
from tests.sweeps import slow


class Shaped(nn.Module):
    """Composite operators that return a view, a copy, or their input; several results; a number that nobody reads; the
    name of a Python builtin.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 6))
        self.offsets = torch.arange(4.0)

    def forward(self, input: Tensor) -> Tensor:
        torch.rand(3)
        left, right = input.to(input.dtype).chunk(2, dim=1)
        h = (left.t().reshape(-1) + right.t().contiguous().flatten()).unflatten(0, (6, -1))
        h = h.contiguous() @ self.weight.movedim(0, 1).float()
        return (h.to(torch.float64).float() * self.offsets.expand_as(h).sum()).pow(2).mean()


class Changed(nn.Module):
    """A change in place, which only the second trace makes a value of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        h[:, :3].mul_(2.0)
        return h.reshape(-1).pow(2).sum()


class Running(nn.Module):
    """Statistics that are updated in place, although the schema of the operator does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, 12)
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("var", torch.ones(12))

    def forward(self, x: Tensor) -> Tensor:
        h = F.batch_norm(self.linear(x), self.get_buffer("mean"), self.get_buffer("var"), training=True)
        return h.pow(2).sum()


def nodes(exported: ExportedProgram) -> list[tuple[Any, ...]]:
    """Return all that a trace reads, without assertions, which it drops."""
    read = ("val", "stack_trace", "nn_module_stack", "custom")
    return [
        (
            node.name,
            node.op,
            str(node.target),
            str((node.args, node.kwargs)),
            *(str(node.meta.get(key)) for key in read),
        )
        for node in exported.graph.nodes
        if "_assert" not in str(node.target)
    ]


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare each export with that of a second trace. Its numbers: how often torch traced a second time."""
    second: list[int] = []
    traced = ExportedProgram.run_decompositions

    def counted(exported: ExportedProgram, table: Any = None) -> ExportedProgram:
        second.append(len(exported.graph.nodes))
        return traced(exported, table)

    def both(exported: ExportedProgram, table: Mapping[Any, Any]) -> ExportedProgram:
        expected = traced(exported, dict(table))
        found = composites.decomposed(exported, table)
        assert nodes(found) == nodes(expected)
        assert str(found.graph_signature) == str(expected.graph_signature)
        return found

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    monkeypatch.setattr(export, "decomposed", both)
    return second


@pytest.mark.parametrize(("make", "count"), [(Shaped, 0), (Changed, 1), (Running, 1)])
def test_only_changes_in_place_need_a_second_trace(
    make: Callable[[], nn.Module], count: int, traces: list[int]
) -> None:
    assert step_of(make(), torch.rand(6, 12))
    assert len(traces) == count


@pytest.mark.parametrize(
    "spec",
    [
        "gpt2:size=tiny",
        *slow(*(f"{name}:size=tiny" for name in ("alphafold2", "bert", "gpt3", "llama", "swin", "t5", "vit"))),
    ],
)
def test_models_are_those_of_a_second_trace(spec: str, traces: list[int]) -> None:
    built = build(spec)
    assert capture(built.module, built.args, built.kwargs, check=False)
