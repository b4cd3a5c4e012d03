"""Data parallelism: every device runs the whole model on its part of the batch (paper, algorithm 1).

`halves`: gradients of bf16 and fp16 weights are sent in that dtype, and added in float32 (`send_halves`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from superscaler.plans.lib.products import along_axis
from superscaler.specs.options import check_shared
from superscaler.verbs import Cluster, Graph, Split, op_trans


def check(sizes: Mapping[str, int], cluster: Cluster, **_: Any) -> None:
    """Raise InputError for a batch that the devices of a cluster do not divide."""
    check_shared(sizes, "batch", devices=len(cluster.devices))


@along_axis(nests=True)
def data_parallel(graph: Graph, n: int, axis: str, halves: bool = False) -> None:
    if halves:
        graph.send_halves()
    op_trans(graph, graph.forward_ops, Split("batch", n, axis=axis))
