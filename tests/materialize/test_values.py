"""Partial values that pass through linear ops: losses that are scaled and added, residuals that stay in parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from superscaler.cluster import Cluster
from superscaler.errors import TransformError
from superscaler.ir.graph import Graph
from superscaler.ir.program import Collective
from superscaler.verbs import Split, ValueSplit, op_assign, op_trans
from tests.helpers.ran import Around, captured, equal


def scaled(m: Around, x: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, scaled, plus a mean of activations, plus a weight penalty: ops after the sum over the batch."""
    hidden = torch.tanh(m.first(x))
    out = m.second(hidden) + x
    loss = nn.functional.cross_entropy(m.head(out), labels, ignore_index=2)
    return loss * 0.5 + 0.1 * hidden.pow(2).mean() + 0.01 * m.head.weight.pow(2).sum()


@pytest.fixture(scope="module")
def graph() -> Graph:
    labels = torch.tensor([2, 2, 2, 0, 1, 3, 4, 0])
    layers = {"first": nn.Linear(8, 16), "second": nn.Linear(16, 8), "head": nn.Linear(8, 5)}
    return captured(lambda: (Around(scaled, **layers), (torch.randn(8, 8), labels)))


def test_a_loss_with_ops_after_its_sum_equals_under_microbatches(graph: Graph) -> None:
    spec, world = "hybrid:dp=2,pp=2,microbatches=2", 4
    equal(graph, spec, world)


def test_a_residual_may_stay_in_value_parts(graph: Graph) -> None:
    """Row-parallel product, bias and residual: reduced once, after the additions, each addend counted once."""
    mlp = next(i.factor for op in graph.ops if op.module == "second" for i in op.indices if i.mark == "summed")

    def plan(graph: Graph, cluster: Cluster) -> None:
        for op in graph.forward_ops:
            adds = op.target == "aten.add.Tensor" and op.module in ("second", "") and len(op.outputs[0].slots) == 2
            passes = adds and any(o.tensor in made for o in op.inputs)
            made.update(o.tensor for o in op.outputs if passes or (op.module == "second" and op.find(mlp) is not None))
            op_assign(graph, op_trans(graph, op, ValueSplit(2) if passes else Split(mlp, 2)), cluster.devices)

    made: set[str] = set()
    ran = equal(graph, plan)
    grids = ran.graph.grids
    assert {"linear_1", "add"} <= {name for name, grid in grids.items() if any(a.partial_inputs for a in grid.axes)}
    assert any(isinstance(i, Collective) and i.kind == "all_reduce" for i in ran.code())


def test_an_op_that_is_not_linear_is_refused(graph: Graph) -> None:
    op = next(op for op in graph.ops if op.target == "aten.tanh.default")
    with pytest.raises(TransformError, match="not linear in that input"):
        op_trans(graph.copy(), op, ValueSplit(2))
