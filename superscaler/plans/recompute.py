"""Data parallel, with parts of the model recomputed in the backward instead of kept.

what=block      each block; it keeps its inputs only
what=full       each block, and the ops outside the blocks
what=attention  products of activations with each other (attention), and the ops that serve them alone, back to the
                products with weights before them: cheap to recompute, and large at long sequences
levels=N        regions in regions: with 2, runs of sqrt(n) of the n blocks are recomputed, and then each block of a
                run; with 3, runs of cbrt(n) blocks in runs of as many runs. About N x n^(1/N) inputs are kept
"""

from __future__ import annotations

from math import ceil

from superscaler.plans.gradient_accumulation import gradient_accumulation
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.regions import WHATS, regions
from superscaler.verbs import Graph, InputError, Recompute, op_trans


@along_axis(recomputes=True)
def recompute(graph: Graph, n: int, axis: str, what: str = "block", levels: int = 1, microbatches: int = 1) -> None:
    if what not in WHATS:
        raise InputError(f"recompute:what={what}: choose {', '.join(WHATS)}.")
    if levels < 1 or (levels > 1 and what == "attention"):
        raise InputError(f"recompute:levels={levels}: give 1 or more, and 1 for attention, whose inputs are kept.")
    found = regions(graph, what)
    gradient_accumulation.cut(graph, n, axis, microbatches=microbatches)
    runs = _runs(len(found), levels)
    op_trans(graph, [[op for ops in found[first:end] for op in ops] for first, end in runs], Recompute())


def _runs(count: int, levels: int) -> list[tuple[int, int]]:
    """Return the runs (first region, region after the last) of each level, those of outer levels first.

    >>> _runs(5, 2)
    [(0, 3), (3, 5), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    """
    size = ceil(round(count ** (1 / levels), 6))
    sizes = [size**level for level in reversed(range(levels))]
    return list(dict.fromkeys((k, min(k + some, count)) for some in sizes for k in range(0, count, some)))
