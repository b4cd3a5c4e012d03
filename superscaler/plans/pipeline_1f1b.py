"""Pipeline parallelism with the 1F1B schedule: contiguous stages balanced by FLOPs, embedding and head included."""

from __future__ import annotations

from superscaler.plans import shared
from superscaler.plans.along import along_axis
from superscaler.verbs import Graph, InputError, Microbatch, Stage, op_trans


@along_axis()
def pipeline_1f1b(graph: Graph, n: int, axis: str, stages: int | None = None, microbatches: int = 4) -> None:
    if stages not in (None, n):
        raise InputError(f"pipeline_1f1b:stages={stages} on {n} devices: it has as many stages as devices, {n}.")
    parts = shared.stages(graph, n)
    op_trans(graph, graph.forward_ops, Microbatch(microbatches))
    for number, ops in enumerate(parts):
        op_trans(graph, ops, Stage(number, axis))
    shared.order_stages(graph, parts, shared.schedule_1f1b(n, microbatches))
