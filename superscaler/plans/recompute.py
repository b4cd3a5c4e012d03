"""Data parallel, with parts of the model computed again in the backward instead of kept.

what=block      each block: of it what it reads is kept
what=full       so, and what is outside the blocks
what=attention  products of activations with each other (attention), and what is made for them alone, back to the
                products with weights before it: little to compute again, and large at long sequences
"""

from __future__ import annotations

from superscaler.plans.gradient_accumulation import gradient_accumulation
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import layers, made_for, stretches
from superscaler.verbs import Graph, InputError, Op, Recompute, op_trans


@along_axis(recomputes=True)
def recompute(graph: Graph, n: int, axis: str, what: str = "block", microbatches: int = 1) -> None:
    regions = {"block": _blocks, "full": _full, "attention": _attention}
    if what not in regions:
        raise InputError(f"recompute:what={what}: choose {', '.join(regions)}.")
    found = [ops for ops in regions[what](graph) if any(op.has_mirror or op.region for op in ops)]
    if not found:
        raise InputError(f"recompute:what={what}: the model has nothing of this kind to compute again.")
    gradient_accumulation.cut(graph, n, axis, microbatches=microbatches)
    for ops in found:
        op_trans(graph, ops, Recompute())


def _blocks(graph: Graph) -> list[list[Op]]:
    return [list(layer.ops) for layer in layers(graph)]


def _full(graph: Graph) -> list[list[Op]]:
    return [ops for _, ops in stretches(graph)]


def _attention(graph: Graph) -> list[list[Op]]:
    """Return a region for each product of activations that does not lead to another one alone."""
    weights = graph.model.weights | graph.model.from_weights
    own = {op.name: op for op in graph.forward_ops if not op.flops or weights.isdisjoint(o.tensor for o in op.inputs)}
    found: list[list[Op]] = []
    for op in reversed(own.values()):
        if op.flops and not any(op in ops for ops in found):
            found.append(made_for(graph, [op], own))
    return found[::-1]
