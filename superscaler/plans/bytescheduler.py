"""ByteScheduler (Peng et al., 2019): data parallelism whose gradients are summed in the order in which the next forward
needs the weights, while that forward runs. Two iterations are a step.

ahead  of how many of the last blocks gradients are sent as they are made, while the backward goes on (default: half);
       those of the others are, first layers first, once it has ended
"""

from __future__ import annotations

from itertools import pairwise

from superscaler.plans.along import along_axis
from superscaler.plans.data_parallel import data_parallel
from superscaler.verbs import Graph, InputError, Op, op_order


@along_axis(last=True)
def bytescheduler(graph: Graph, n: int, axis: str, ahead: int | None = None) -> None:
    data_parallel.cut(graph, n, axis)
    graph.unroll(2)
    found = _layers(graph)
    ahead = len(found) // 2 if ahead is None else ahead
    if not 0 <= ahead <= len(found):
        raise InputError(f"bytescheduler:ahead={ahead} of {len(found)} layers; choose 0 to {len(found)}.")
    late = len(found) - ahead
    order = [*reversed(found[late:]), *found[:late]]
    for (_, before), (_, after) in pairwise(order):
        op_order(graph, graph.select(ops=before, kind="C"), graph.select(ops=after, kind="C"))
    for (forward, _), (_, updates) in pairwise(found):
        op_order(graph, graph.select(ops=forward), graph.select(ops=updates))


def _layers(graph: Graph) -> list[tuple[list[Op], list[Op]]]:
    """Return the layers in order: their ops in the second iteration, and the updates of their weights before that."""
    block_of = {op.name: block.path for block in graph.blocks for op in block.ops}
    found: dict[str, tuple[list[Op], list[Op]]] = {}
    taken: set[str] = set()
    for op in (op for op in graph.forward_ops if op.iteration):
        forward, updates = found.setdefault(block_of.get(op.name, op.name), ([], []))
        forward.append(op)
        read = dict.fromkeys(o.tensor for o in op.inputs if o.tensor in graph.updates and o.tensor not in taken)
        updates += (graph.updates[graph.model.nexts[tensor]] for tensor in read)
        taken |= read.keys()
    return [layer for layer in found.values() if layer[1]]
