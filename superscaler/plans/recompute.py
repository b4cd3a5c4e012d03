"""Data parallel, with parts of the model recomputed in the backward instead of kept.

what=block      each block; it keeps its inputs only
what=full       each block, and the ops outside the blocks
what=attention  products of activations with each other (attention), and the ops that serve them alone, back to the
                products with weights before them: cheap to recompute, and large at long sequences
levels=N        regions in regions: with 2, runs of sqrt(n) of the n blocks are recomputed, and then each block of a
                run; with 3, runs of cbrt(n) blocks in runs of as many runs. About N x n^(1/N) inputs are kept
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil

from superscaler.plans.gradient_accumulation import gradient_accumulation
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import layers, made_for, stretches, weights_of
from superscaler.verbs import Graph, InputError, Op, Recompute, op_trans


@along_axis(recomputes=True)
def recompute(graph: Graph, n: int, axis: str, what: str = "block", levels: int = 1, microbatches: int = 1) -> None:
    if what not in _REGIONS:
        raise InputError(f"recompute:what={what}: choose {', '.join(_REGIONS)}.")
    if levels < 1 or (levels > 1 and what == "attention"):
        raise InputError(f"recompute:levels={levels}: give 1 or more, and 1 for attention, whose inputs are kept.")
    found = regions(graph, what)
    gradient_accumulation.cut(graph, n, axis, microbatches=microbatches)
    runs = _runs(len(found), levels)
    op_trans(graph, [[op for ops in found[first:end] for op in ops] for first, end in runs], Recompute())


def regions(graph: Graph, what: str) -> list[list[Op]]:
    """Return the ops that are recomputed together. Raises InputError if there are none."""
    if found := [ops for ops in _REGIONS[what](graph) if any(op.has_mirror or op.region for op in ops)]:
        return found
    raise InputError(f"recompute:what={what}: the model has nothing of this kind to recompute.")


def _runs(count: int, levels: int) -> list[tuple[int, int]]:
    """Return the runs (first region, region after the last) of each level, those of outer levels first.

    >>> _runs(5, 2)
    [(0, 3), (3, 5), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    """
    size = ceil(round(count ** (1 / levels), 6))
    sizes = [size**level for level in reversed(range(levels))]
    return list(dict.fromkeys((k, min(k + some, count)) for some in sizes for k in range(0, count, some)))


def _attention(graph: Graph) -> list[list[Op]]:
    """Return a region for each product of activations that does not lead to another one alone."""
    weights = weights_of(graph)
    own = {op.name: op for op in graph.forward_ops if not op.flops or weights.isdisjoint(o.tensor for o in op.inputs)}
    found: list[list[Op]] = []
    for op in reversed(own.values()):
        if op.flops and not any(op in ops for ops in found):
            found.append(made_for(graph, [op], own))
    return found[::-1]


_REGIONS: Mapping[str, Callable[[Graph], list[list[Op]]]] = {
    "block": lambda graph: [list(layer.ops) for layer in layers(graph)],
    "full": lambda graph: [ops for _, ops in stretches(graph)],
    "attention": _attention,
}
