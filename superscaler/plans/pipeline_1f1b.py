"""Pipeline parallelism with the 1F1B schedule: contiguous stages balanced by FLOPs, embedding and head included."""

from __future__ import annotations

from superscaler.plans import shared
from superscaler.verbs import Cluster, Graph, Microbatch, op_assign, op_trans, sprogram


@sprogram
def pipeline_1f1b(graph: Graph, cluster: Cluster, stages: int | None = None, microbatches: int = 4) -> None:
    count = len(cluster.devices) if stages is None else stages
    shared.check_uses_all(cluster, "pipeline_1f1b", stages=count)
    parts = shared.stages(graph, count)
    for device, ops in zip(cluster.devices, parts, strict=True):
        op_assign(graph, op_trans(graph, ops, Microbatch(microbatches)), device)
    shared.order_stages(graph, parts, shared.schedule_1f1b(count, microbatches))
