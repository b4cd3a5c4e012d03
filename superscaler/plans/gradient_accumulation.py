"""Gradient accumulation: microbatches run one after the other, and the sum of their gradients is sent once."""

from __future__ import annotations

from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import batch_of
from superscaler.plans.lib.sizes import check_rows
from superscaler.verbs import Graph, Microbatch, Split, op_trans


@along_axis(batches=True)
def gradient_accumulation(graph: Graph, n: int, axis: str, microbatches: int = 4) -> None:
    check_rows({"batch": batch_of(graph)}, microbatches, devices=n)
    if microbatches > 1:
        op_trans(graph, graph.forward_ops, Microbatch(microbatches))
    # A batch of one is no factor.
    if n > 1:
        op_trans(graph, graph.forward_ops, Split("batch", n, axis=axis))
