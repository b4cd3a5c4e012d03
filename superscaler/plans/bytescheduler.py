"""ByteScheduler (Peng et al., 2019): data parallelism that sums gradients during the next forward, in the order of its
reads. Two iterations are a step.

piece  bytes of a sum: larger gradients are cut into pieces, small ones of a layer are sent together
ahead  share of all gradients that the links are assumed to carry during the backward; it determines the order. A free
       link takes the finished gradient that the next forward reads first. With 0 all are sent after the backward, in
       the order of that forward; with 1 and more nearly in the order in which they are finished
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

from superscaler.plans.data_parallel import data_parallel
from superscaler.plans.lib import gradient_chunks as pieces
from superscaler.plans.lib.products import along_axis
from superscaler.verbs import Graph, InputError, Op, op_order


@along_axis(last=True)
def bytescheduler(graph: Graph, n: int, axis: str, piece: int = 4 * 2**20, ahead: float = 0.5) -> None:
    if piece < 1:
        raise InputError(f"bytescheduler:piece={piece} must be 1 byte or more.")
    if not ahead >= 0:
        raise InputError(f"bytescheduler:ahead={ahead} must be a share of the gradients, 0 or more.")
    data_parallel.cut(graph, n, axis)
    graph.unroll(2)
    layers, made = list(_layers(graph)), pieces.made(graph)
    found = [one for k, (_, ops) in enumerate(layers) for one in pieces.pieces_of(graph, ops, k, piece, made)]
    # On one device nothing is sent.
    for before, after in pairwise(pieces.sent(found, ahead) if n > 1 else ()):
        op_order(graph, before.group, after.group)
    for (forward, _), (_, updates) in pairwise(layers):
        op_order(graph, graph.select(ops=forward), graph.select(ops=updates))


def _layers(graph: Graph) -> Iterator[tuple[list[Op], list[Op]]]:
    """Yield the ops of the second iteration in runs of a block or other module, each with the updates of the weights
    that no earlier run reads.

    A block that is called again reads no new weights.
    """
    block_of, taken = {op.name: block.path for block in graph.blocks for op in block.ops}, set[str]()
    second = (op for op in graph.forward_ops if op.iteration)
    for _, run in groupby(second, key=lambda op: block_of.get(op.name, op.module)):
        ops = list(run)
        read = dict.fromkeys(o.tensor for op in ops for o in op.inputs if o.tensor in graph.updates)
        if new := [tensor for tensor in read if tensor not in taken]:
            taken.update(new)
            yield ops, [graph.updates[graph.model.nexts[tensor]] for tensor in new]
