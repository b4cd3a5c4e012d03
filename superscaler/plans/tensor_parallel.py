"""Tensor parallelism as in Megatron-LM: heads and MLP hidden of each block, found from the factors.

If the devices divide the classes of a loss, embedding, head and loss are cut on these: three numbers a token are sent,
and no scores. `vocabulary=false` leaves embeddings and losses whole.
"""

from __future__ import annotations

from superscaler.plans.lib.meshes import at_place
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import decompose_losses, tensor_splits
from superscaler.verbs import Graph, op_trans


@along_axis()
def tensor_parallel(graph: Graph, n: int, axis: str, vocabulary: bool = True) -> None:
    cut_tensors(graph, n, axis, vocabulary)


def cut_tensors(graph: Graph, n: int, axis: str, vocabulary: bool, place: int | None = None) -> None:
    """Cut the ops at a place of a pipeline into `n` along an axis; all ops by default."""
    if vocabulary:
        decompose_losses(graph, n, place)
    splits = tensor_splits(graph, n, axis, lookups=vocabulary)
    for op in at_place(graph, [graph.op(name) for name in splits], place):
        for cut in splits[op.name]:
            op_trans(graph, [op], cut)
