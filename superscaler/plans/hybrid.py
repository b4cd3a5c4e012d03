"""Data, tensor and pipeline parallelism together: dp x tp devices for each of pp stages."""

from __future__ import annotations

import numpy as np

from superscaler.plans.shared import check_uses_all, order_stages, schedule_1f1b, stages, tensor_splits
from superscaler.verbs import Cluster, Graph, Microbatch, Replicate, Split, op_assign, op_trans, sprogram


@sprogram
def hybrid(graph: Graph, cluster: Cluster, dp: int = 1, tp: int = 1, pp: int = 1, microbatches: int = 1) -> None:
    check_uses_all(cluster, "hybrid", dp=dp, tp=tp, pp=pp)
    splits = tensor_splits(graph, tp)
    parts = stages(graph, pp)
    for stage, ops in enumerate(parts):
        for op in ops:
            algorithms = [Microbatch(microbatches), Split("batch", dp), *splits.get(op.name, [Replicate(tp)])]
            made = graph.parts(op)
            for algorithm in algorithms:
                made = op_trans(graph, made, algorithm)
            op_assign(graph, made, stage * dp * tp + np.arange(dp * tp).reshape(made.cells.shape[1:]))
    order_stages(graph, parts, schedule_1f1b(pp, microbatches))
