"""Gradient accumulation: microbatches run one after the other, and the sum of their gradients is sent once."""

from __future__ import annotations

from superscaler.plans.lib.products import along_axis
from superscaler.verbs import Graph, InputError, Microbatch, Split, op_trans


@along_axis(batches=True)
def gradient_accumulation(graph: Graph, n: int, axis: str, microbatches: int = 4) -> None:
    batch = graph.factors.get("batch")
    if batch and not (1 <= microbatches <= batch.size and (n == 1 or batch.size % (n * microbatches) == 0)):
        raise InputError(
            f"microbatches={microbatches} on each of {n} devices does not divide the batch of {batch.size}; choose a "
            f"divisor of {batch.size // n}, or another batch."
        )
    if microbatches > 1:
        op_trans(graph, graph.forward_ops, Microbatch(microbatches))
    # A batch of one is no factor.
    if n > 1:
        op_trans(graph, graph.forward_ops, Split("batch", n, axis=axis))
