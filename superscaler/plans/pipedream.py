"""PipeDream (Narayanan et al., 2019): 1F1B in which stage s of p reads weights of p - 1 - s updates ago, without
vertical sync. The forward and the backward of a step read the same weights.

w(t+1) = update(w(t), gradient by w at (each weight v as v(t - n))), n = p - 1 - s of the first stage s that reads v
"""

from __future__ import annotations

from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.stages import stages
from superscaler.plans.pipeline import pipeline
from superscaler.verbs import Graph, Stale, op_trans


@along_axis(batches=True)
def pipedream(graph: Graph, n: int, axis: str, microbatches: int | None = None, blocks: str = "") -> None:
    for age, ops in zip(range(n - 1, 0, -1), stages(graph, n, blocks), strict=False):
        if any(o.tensor in graph.updates for op in ops for o in op.inputs):
            op_trans(graph, ops, Stale(age))
    pipeline.cut(graph, n, axis, microbatches=microbatches, blocks=blocks)
