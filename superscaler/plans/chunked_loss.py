"""Data parallel, with the head and the loss in parts of the tokens: the scores of all tokens never exist together.

A part has its backward right after its forward, so that nothing is computed twice and the result is exact (fused
operators do the same: Hsu et al. 2024, Liger Kernel). Parts are recomputed in the backward instead in a stage of a
pipeline, which runs its forward as a whole, and where the loss is added to others. If the head shares its weight with
the embedding, the gradients of both are sent to the other devices, not their sum.

parts=N   the number of parts of the tokens that a device has at once

Its own devices are data parallel: `chunked_loss:1,parts=8 x zero:8,stage=1`.
"""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

from superscaler.plans.gradient_accumulation import gradient_accumulation
from superscaler.plans.lib.head_and_loss import head_and_loss, rows_of
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import is_staged
from superscaler.verbs import Graph, InputError, Recompute, Split, op_order, op_trans


@along_axis(recomputes=True, last=True)
def chunked_loss(graph: Graph, n: int, axis: str, parts: int = 8, microbatches: int = 1) -> None:
    if parts < 2:
        raise InputError(f"chunked_loss:parts={parts}: give 2 or more.")
    gradient_accumulation.cut(graph, n, axis, microbatches=microbatches)
    tail = head_and_loss(graph)
    factor = rows_of(graph, tail, parts)
    cut = [op_trans(graph, op, Split(factor, parts)) for op in tail]
    if is_staged(graph) or not all(op.indices for op in tail):
        op_trans(graph, [tail], Recompute())
        return
    batches = [len(a.sizes) for a in graph.grids[tail[0].name].axes if a.is_microbatch]
    numbers = range(prod(batches)) if batches else [None]
    for number, k in product(numbers, range(parts - 1)):
        before, after = ([own[..., at] for own in cut] for at in (k, k + 1))
        op_order(graph, graph.select(None, before, number, "B"), graph.select(None, after, number))
    for one, other in pairwise(numbers):
        op_order(graph, graph.select(None, None, one, "B"), graph.select(None, None, other))
