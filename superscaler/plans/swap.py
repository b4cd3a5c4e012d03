"""Data parallel, with what rests between forward and backward, or between steps, in the memory of the hosts.

what=activations  what each block reads; the block is computed again from it
what=optimizer    weights and the optimizer's state, which are trained there
what=both         both
"""

from __future__ import annotations

from superscaler.plans.along import along_axis
from superscaler.plans.gradient_accumulation import gradient_accumulation
from superscaler.plans.shared import layers
from superscaler.verbs import Graph, InputError, Insert, Recompute, op_assign, op_trans

WHAT = ("activations", "optimizer", "both")


@along_axis(again=True)
def swap(graph: Graph, n: int, axis: str, what: str = "activations", microbatches: int = 1) -> None:
    if what not in WHAT:
        raise InputError(f"swap:what={what}: choose {', '.join(WHAT)}.")
    gradient_accumulation.cut(graph, n, axis, microbatches=microbatches)
    for layer in layers(graph) if what != "optimizer" else ():
        again = op_trans(graph, layer.ops, Recompute())
        op_assign(graph, op_trans(graph, again, Insert()), "host")
    if what != "activations":
        op_assign(graph, [op for op in graph.ops if not (op.is_forward or op.is_write)], "host")
