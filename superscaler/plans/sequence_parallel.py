"""Megatron-LM's sequence parallelism: tensor parallel inside attention and MLP, cut along the sequence everywhere else.

The all_reduce of tensor parallelism becomes a reduce_scatter along the sequence and an all_gather before the next
product: as much communication, but norms, residuals and their saved tensors are cut, too. Ops that depend on inputs
alone are computed by all devices.

With `regather` the input of a product is gathered again for its backward, instead of being kept whole from the forward
on. Then all activations of a layer are divided by the number of devices, for one more all_gather of each.
"""

from __future__ import annotations

from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import along, decompose_losses, sequences, tensor_splits
from superscaler.verbs import Graph, Regather, Split, op_trans


@along_axis()
def sequence_parallel(graph: Graph, n: int, axis: str, regather: bool = False, vocabulary: bool = True) -> None:
    tokens = sequences(graph, "sequence_parallel", n)
    if vocabulary:
        decompose_losses(graph, n)
    splits = tensor_splits(graph, n, axis, lookups=vocabulary)
    for op in graph.forward_ops:
        factor = "" if op.from_data else along(op, tokens)
        for cut in splits.get(op.name, [Split(factor, n, axis=axis)] if factor else []):
            op_trans(graph, op, cut)
    # What is recomputed is gathered for that anyway.
    kept = [op for name in splits if not (op := graph.op(name)).region]
    if regather and kept and n > 1:
        op_trans(graph, kept, Regather())
