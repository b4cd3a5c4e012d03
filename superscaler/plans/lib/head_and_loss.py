"""The head of a model with its loss, and the factors of its rows."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler.plans.lib.shared import cuts_along, inner_blocks, weights_of
from superscaler.verbs import Graph, InputError, Op


def head_and_loss(graph: Graph) -> list[Op]:
    """Return the last product with a weight outside the blocks, and the ops that follow from it."""
    weights, inside = weights_of(graph), {op.name for block in inner_blocks(graph) for op in block.ops}
    outside = [op for op in graph.forward_ops if op.name not in inside]
    products = ((k, op) for k, op in enumerate(outside) if op.has_mirror and op.flops)
    heads = [k for k, op in products if not weights.isdisjoint(o.tensor for o in op.inputs)]
    if not heads:
        raise InputError(
            "chunked_loss: no product with a weight outside the blocks has a backward to order; leave it out, or "
            "recompute blocks alone (recompute:what=block)."
        )
    head = outside[heads[-1]]
    made, found = {o.tensor for o in head.outputs}, [head]
    for op in outside[heads[-1] + 1 :]:
        if not made.isdisjoint(o.tensor for o in op.inputs):
            made.update(o.tensor for o in op.outputs)
            found.append(op)
    return found


def rows_of(graph: Graph, tail: Sequence[Op], parts: int) -> str:
    """Return the factor of the most rows of a head that `parts` divides and that all ops of its tail have, cut alike so
    far. The batch, which others cut, is the last choice.
    """
    head, ops, weights = tail[0], [op for op in tail if op.indices], weights_of(graph)
    rows = {i for o in head.inputs if o.tensor not in weights for i in o.slots if i is not None}
    # The rows of a device, by factor.
    found = dict[str, int]()
    for factor in (i.factor for at, i in enumerate(head.indices) if at in rows and i.mark == "spatial"):
        cuts = {cuts_along(graph, op, (factor,)) for op in ops}
        if len(cuts) == 1 and all(op.find(factor) is not None for op in ops):
            found[factor] = graph.factors[factor].size // cuts.pop()
    fitting = [factor for factor, size in found.items() if size % parts == 0]
    if not fitting:
        sizes = ", ".join(f"{factor} of {size}" for factor, size in found.items()) or "none"
        raise InputError(
            f"chunked_loss:parts={parts}: the rows of {head.name} on a device, which the loss sums over, are {sizes}; "
            "choose a number of parts that divides one of these."
        )
    return max(fitting, key=lambda factor: (factor != "batch", found[factor]))
