"""Data, tensor and pipeline parallelism together: dp x tp devices for each of pp stages."""

from __future__ import annotations

from superscaler.plans.data_parallel import data_parallel
from superscaler.plans.pipeline import pipeline
from superscaler.plans.tensor_parallel import tensor_parallel
from superscaler.verbs import Cluster, Graph, op_assign, sprogram


@sprogram
def hybrid(
    graph: Graph,
    cluster: Cluster,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    microbatches: int = 1,
    vocabulary: bool = True,
) -> None:
    mesh = cluster.mesh(pp=pp, dp=dp, tp=tp)
    pipeline.cut(graph, pp, "pp", microbatches=microbatches)
    for n in mesh.by_server("dp"):
        data_parallel.cut(graph, n, "dp")
    tensor_parallel.cut(graph, tp, "tp", vocabulary=vocabulary)
    op_assign(graph, graph.forward_ops, mesh)
