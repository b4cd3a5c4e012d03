"""Tensor parallelism as in Megatron-LM: heads and MLP hidden of each block, found from the factors."""

from __future__ import annotations

import numpy as np

from superscaler.plans.shared import tensor_splits
from superscaler.verbs import Cluster, Graph, Replicate, op_assign, op_trans, sprogram


@sprogram
def tensor_parallel(graph: Graph, cluster: Cluster) -> None:
    n = len(cluster.devices)
    splits = tensor_splits(graph, n)
    devices = np.arange(n)
    for op in graph.forward_ops:
        parts = graph.parts(op)
        for algorithm in splits.get(op.name, [Replicate(n)]):
            parts = op_trans(graph, parts, algorithm)
        op_assign(graph, parts, devices.reshape(parts.cells.shape))
