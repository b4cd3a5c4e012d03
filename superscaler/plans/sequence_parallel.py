"""Megatron-LM's sequence parallelism: tensor parallel inside attention and MLP, cut along the sequence everywhere else.

The all_reduce of tensor parallelism becomes a reduce_scatter along the sequence and an all_gather before the next
product: as much communication, but norms, residuals and their saved tensors are cut, too. Ops that depend on inputs
alone are computed by all devices.

With `regather` the input of a product is gathered again for its backward, instead of being kept whole from the forward
on. Then all activations of a layer are divided by the number of devices, for one more all_gather of each.
"""

from __future__ import annotations

from superscaler.plans.lib.meshes import at_place
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import along, decompose_losses, sequences, tensor_splits
from superscaler.verbs import Graph, Regather, Split, op_trans


@along_axis()
def sequence_parallel(graph: Graph, n: int, axis: str, regather: bool = False, vocabulary: bool = True) -> None:
    cut_sequence(graph, n, axis, regather, vocabulary)


def cut_sequence(graph: Graph, n: int, axis: str, regather: bool, vocabulary: bool, place: int | None = None) -> None:
    """Cut the ops at a place of a pipeline into `n` along an axis; all ops by default."""
    tokens = sequences(graph, "sequence_parallel", n)
    if vocabulary:
        decompose_losses(graph, n, place)
    splits = tensor_splits(graph, n, axis, lookups=vocabulary)
    own = at_place(graph, graph.forward_ops, place)
    for op in own:
        factor = "" if op.from_data else along(op, tokens)
        for cut in splits.get(op.name, [Split(factor, n, axis=axis)] if factor else []):
            op_trans(graph, op, cut)
    # What is recomputed is gathered for that anyway.
    kept = [op for op in own if op.name in splits and not op.region]
    if regather and kept and n > 1:
        op_trans(graph, kept, Regather())
