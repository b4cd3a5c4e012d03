"""Data parallelism: every device runs the whole model on its part of the batch (paper, algorithm 1).

`halves`: gradients of bf16 and fp16 weights are sent in that dtype, and added in float32 (`send_halves`).
"""

from __future__ import annotations

from superscaler.plans.lib.products import along_axis
from superscaler.verbs import Graph, Split, op_trans


@along_axis(nests=True)
def data_parallel(graph: Graph, n: int, axis: str, halves: bool = False) -> None:
    if halves:
        graph.send_halves()
    op_trans(graph, graph.forward_ops, Split("batch", n, axis=axis))
