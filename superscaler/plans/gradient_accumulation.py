"""Gradient accumulation: the batch in microbatches, one after the other, whose gradients are added up and sent once."""

from __future__ import annotations

from superscaler.verbs import Cluster, Graph, InputError, Microbatch, Replicate, Split, op_assign, op_trans, sprogram


@sprogram
def gradient_accumulation(graph: Graph, cluster: Cluster, microbatches: int = 4) -> None:
    n, batch = len(cluster.devices), graph.factors.get("batch")
    if batch and (microbatches < 1 or batch.size % (n * microbatches)):
        raise InputError(
            f"microbatches={microbatches} on each of {n} devices does not divide the batch of {batch.size}; choose a "
            f"divisor of {batch.size // n}, or another batch."
        )
    for op in graph.ops:
        parts = graph.parts(op)
        for algorithm in (Microbatch(microbatches), Split("batch", n)) if op.is_forward else (Replicate(n),):
            parts = op_trans(graph, parts, algorithm)
        op_assign(graph, parts, cluster.devices)
