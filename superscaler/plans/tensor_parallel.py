"""Tensor parallelism as in Megatron-LM: heads and MLP hidden of each block, found from the factors."""

from __future__ import annotations

from superscaler.plans.along import along_axis
from superscaler.plans.shared import tensor_splits
from superscaler.verbs import Graph, op_trans


@along_axis()
def tensor_parallel(graph: Graph, n: int, axis: str) -> None:
    for name, cuts in tensor_splits(graph, n, axis).items():
        for cut in cuts:
            op_trans(graph, [graph.op(name)], cut)
