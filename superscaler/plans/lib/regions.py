"""The regions of a model that are recomputed: each block, all ops, or the products of attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from superscaler.plans.lib.meshes import at_place
from superscaler.plans.lib.shared import layers, made_for, stretches, weights_of
from superscaler.plans.lib.sizes import REGIONS
from superscaler.verbs import Graph, InputError, Op, Recompute, op_trans


def regions(graph: Graph, what: str) -> list[list[Op]]:
    """Return the ops that are recomputed together. Raises InputError if there are none."""
    if found := [ops for ops in WHATS[what](graph) if any(op.has_mirror or op.region for op in ops)]:
        return found
    raise InputError(f"recompute:what={what}: the model has nothing of this kind to recompute.")


def recompute_stages(graph: Graph, values: Sequence[str]) -> None:
    """Recompute what `hybrid:recompute=` says of each stage of a pipeline; of all stages, if it is one value."""
    places = range(len(values)) if len(values) > 1 else [None]
    for place, value in zip(places, values, strict=True):
        for region in regions(graph, REGIONS[value]) if value != "none" else ():
            if at_place(graph, region, place):
                op_trans(graph, region, Recompute())


def _attention(graph: Graph) -> list[list[Op]]:
    """Return a region for each product of activations that does not lead to another one alone."""
    weights = weights_of(graph)
    own = {op.name: op for op in graph.forward_ops if not op.flops or weights.isdisjoint(o.tensor for o in op.inputs)}
    found: list[list[Op]] = []
    for op in reversed(own.values()):
        if op.flops and not any(op in ops for ops in found):
            found.append(made_for(graph, [op], own))
    return found[::-1]


WHATS: Mapping[str, Callable[[Graph], list[list[Op]]]] = {
    "block": lambda graph: [list(layer.ops) for layer in layers(graph)],
    "full": lambda graph: [ops for _, ops in stretches(graph)],
    "attention": _attention,
}
