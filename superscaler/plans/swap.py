"""Data parallel, with tensors in the memory of the hosts between forward and backward, or between steps.

what=activations  the inputs of each block, which is recomputed from them
what=optimizer    weights and the optimizer's state, which are trained there
what=both         both
"""

from __future__ import annotations

from collections.abc import Sequence

from superscaler.plans.gradient_accumulation import gradient_accumulation
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import layers
from superscaler.verbs import Graph, InputError, Insert, Op, Recompute, op_assign, op_trans

WHAT = ("activations", "optimizer", "both")


@along_axis(recomputes=True)
def swap(graph: Graph, n: int, axis: str, what: str = "activations", microbatches: int = 1) -> None:
    if what not in WHAT:
        raise InputError(f"swap:what={what}: choose {', '.join(WHAT)}.")
    gradient_accumulation.cut(graph, n, axis, microbatches=microbatches)
    for layer in layers(graph) if what != "optimizer" else ():
        is_first = not reads_activations(graph, layer.ops)
        recomputed = op_trans(graph, layer.ops, Recompute())
        if not is_first:
            op_assign(graph, op_trans(graph, recomputed, Insert()), "host")
    if what != "activations" and not graph.updates:
        raise InputError(f"swap:what={what}: nothing is trained, so that no weights rest on hosts; leave swap out.")
    if what != "activations":
        op_assign(graph, [op for op in graph.ops if not (op.is_forward or op.is_write)], "host")


def reads_activations(graph: Graph, ops: Sequence[Op]) -> bool:
    """Return whether ops read activations from outside; a first layer may read data alone."""
    makers, inside = graph.model.producers, {op.name for op in ops}
    read = (makers[o.tensor][0] for op in ops for o in op.inputs if o.tensor in makers)
    return any(maker.name not in inside and not maker.from_data for maker in read)
