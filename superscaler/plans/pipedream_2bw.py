"""PipeDream-2BW (Narayanan et al., 2021): a 1F1B pipeline that reads the weights of one step ago.

W(t+1) = W(t) - lr grad(W(t-1)), W(-1) = W(0): not the steps of the model; `verify` compares them with this recurrence
and says that they are stale by 1.
"""

from __future__ import annotations

from superscaler.plans.lib.products import along_axis
from superscaler.plans.pipeline import pipeline
from superscaler.verbs import Graph, Stale, op_trans


@along_axis(batches=True)
def pipedream_2bw(graph: Graph, n: int, axis: str, microbatches: int | None = None, blocks: str = "") -> None:
    op_trans(graph, graph.forward_ops, Stale())
    pipeline.cut(graph, n, axis, microbatches=microbatches, blocks=blocks)
