"""Operators that a plan cuts on the very dim that they work along: the plan computes what the module does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from tests.helpers.graphs import assert_equal, step_of


class Step(nn.Module):
    """Scales an input by a weight, applies an operator to it, and weighs the result: no two elements are alike."""

    def __init__(self, function: Callable[..., Tensor], width: int, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.function, self.layer = function, layer

    def forward(self, x: Tensor) -> Tensor:
        found = self.function(self, x * self.scale)
        return (found * torch.linspace(0.5, 2.0, found.numel()).view(found.shape)).sin().mean()


def layered(step: Step, x: Tensor) -> Tensor:
    found = step.layer(x)  # type: ignore[misc]
    return found if isinstance(found, Tensor) else found[0]


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(8, 12))


X = (4, 8, 8)
# The operator, the operand and dim whose factor is cut (results behind the operands), the module, the input's shape.
CASES: dict[str, tuple[str, int, int, Callable[[], nn.Module], tuple[int, ...]]] = {
    # Its dropout draws nothing, since only the module around it is in training.
    "lstm": ("lstm.input", 0, 0, lambda: Step(layered, 8, nn.LSTM(8, 6, 2, True, True, 0.5, True).eval()), X),
    "gru": ("gru.input", 0, 1, lambda: Step(layered, 8, nn.GRU(8, 6)), X),
    "lstm cell": ("lstm_cell", 0, 0, lambda: Step(layered, 8, nn.LSTMCell(8, 6)), (4, 8)),
    "group norm": ("group_norm", 0, 1, lambda: Step(layered, 8, nn.GroupNorm(4, 8)), X),
    "weight norm": ("_weight_norm", 0, 0, lambda: Step(layered, 8, normed()), (4, 8)),
    "index_add": ("index_add", 1, 0, lambda: Step(lambda _, x: x[0].index_add(0, INDEX, x[1]), 8), X),
    "roll": ("roll", -1, 1, lambda: Step(lambda _, x: x.roll((3, 1), (1, 2)), 8), X),
    "flip": ("flip", -1, 2, lambda: Step(lambda _, x: x.flip(0, 2), 8), X),
    "cumsum": ("cumsum", -1, 1, lambda: Step(lambda _, x: x.cumsum(1), 8), X),
    "max pool": ("max_pool1d", -1, 2, lambda: Step(lambda _, x: F.max_pool1d(x, 2), 8), X),
    "adaptive pool": ("adaptive_avg_pool1d", -1, 2, lambda: Step(lambda _, x: F.adaptive_avg_pool1d(x, 4), 8), X),
    "patches": ("conv1d", -1, 2, lambda: Step(layered, 8, nn.Conv1d(8, 6, 2, 2)), X),
    "upsampling": ("conv_transpose1d", 0, 2, lambda: Step(layered, 8, nn.ConvTranspose1d(8, 6, 2, 2)), X),
    "local response norm": ("avg_pool2d", -1, 3, lambda: Step(lambda _, x: F.local_response_norm(x, 3), 8), X),
}
INDEX = torch.tensor([3, 0, 3, 7, 5, 0, 1, 3])


@pytest.mark.parametrize("name", CASES)
def test_a_plan_along_the_dim_is_equal(name: str) -> None:
    """Parts of results, which read what is beside them, have neighbours on both sides."""
    operator, number, dim, make, shape = CASES[name]
    devices = 4 if number == -1 else 2
    graph = step_of(make(), torch.randn(shape))
    (op,) = [op for op in graph.model.forward_ops if op.target.split(".", 1)[1].removesuffix(".default") == operator]
    operand = (*op.inputs, *op.outputs)[number]
    factor = graph.model.tensors[operand.tensor].slots[dim][0]

    @ss.sprogram
    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        for other in graph.ops:
            parts = ss.op_trans(graph, other, ss.Split(factor, devices, required=other.name == op.name))
            ss.op_assign(graph, parts, cluster.devices)

    assert_equal(graph, plan, devices)


def test_strides_are_those_of_elements_in_order() -> None:
    """Capture leaves out the copy that puts them in order."""
    step = Step(lambda _, x: x.transpose(1, 2).contiguous().as_strided((4, 8, 4), (64, 8, 1)), 8)
    assert_equal(step_of(step, torch.randn(X)), "single", 1)
