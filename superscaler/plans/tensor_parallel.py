"""Tensor parallelism as in Megatron-LM: heads and MLP hidden of each block, found from the factors.

If the devices divide the classes of a loss, embedding, head and loss are cut on these: three numbers a token are sent,
and no scores. `vocabulary=false` leaves embeddings and losses whole.
"""

from __future__ import annotations

from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import decompose_losses, tensor_splits
from superscaler.verbs import Graph, op_trans


@along_axis()
def tensor_parallel(graph: Graph, n: int, axis: str, vocabulary: bool = True) -> None:
    if vocabulary:
        decompose_losses(graph, n)
    for name, cuts in tensor_splits(graph, n, axis, lookups=vocabulary).items():
        for cut in cuts:
            op_trans(graph, [graph.op(name)], cut)
