"""Data parallelism: every device runs the whole model on its part of the batch (paper, algorithm 1)."""

from __future__ import annotations

from superscaler.verbs import Cluster, Graph, Replicate, Split, op_assign, op_trans, sprogram


@sprogram
def data_parallel(graph: Graph, cluster: Cluster) -> None:
    n = len(cluster.devices)
    for op in graph.ops:
        algorithm = Split("batch", n) if op.is_forward else Replicate(n)
        op_assign(graph, op_trans(graph, op, algorithm), cluster.devices)
