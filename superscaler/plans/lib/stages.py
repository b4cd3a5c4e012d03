"""Stages of pipelines: contiguous ops, balanced by FLOPs or of given numbers of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from superscaler.plans.lib.shared import inner_blocks
from superscaler.specs.arguments import checked
from superscaler.verbs import Graph, InputError, Op


@checked
def stages(graph: Graph, count: int, blocks: str = "", ops: Sequence[Op] = ()) -> list[list[Op]]:
    """Return the forward ops, or these ones, in `count` contiguous stages whose largest FLOPs is as small as possible.

    Blocks (`inner_blocks`) stay whole; every op outside them (embedding, head, loss) is a unit of its own. `blocks`
    gives the number of blocks of each stage instead, as 3+5+4: ops before the first block are with it, ops after a
    block with that block. Where the first number is 0, its stage has what is before the first block; where the last is,
    what is after the last block. Raises InputError for more stages than there are units.
    """
    units, at = _units(graph, ops or graph.forward_ops)
    if blocks:
        bounds = _bounds(blocks, count, units, at)
        return [[op for unit in units[a:b] for op in unit] for a, b in pairwise([*bounds, len(units)])]
    flops = np.array([sum(map(graph.cost, unit)) for unit in units], dtype=float)
    trained = np.array([sum(op.has_mirror for op in unit) for unit in units], dtype=float)
    most = max(int((x > 0).sum()) for x in (flops, trained))
    if not 1 <= count <= most:
        raise InputError(f"{count} stages do not fit a model of {most} blocks and single ops; choose 1 to {most}.")
    # Every stage gets products to compute; with more stages than that allows, at least something to train.
    bounds = _balance(flops, flops if count <= int((flops > 0).sum()) else trained, count)
    return [[op for unit in units[a:b] for op in unit] for a, b in pairwise(bounds)]


def outer_ends(graph: Graph) -> tuple[bool, bool]:
    """Return whether a first stage without blocks has something to train, and whether a last one has."""
    return _ends(*_units(graph, graph.forward_ops))


def _units(graph: Graph, ops: Sequence[Op]) -> tuple[list[list[Op]], list[int]]:
    """Return the ops of each block, and each op outside of the blocks, in order; and which of these are blocks."""
    block_of = {op.name: block.path for block in inner_blocks(graph) for op in block.ops}
    units: list[list[Op]] = []
    for op in ops:
        path = block_of.get(op.name)
        if units and path is not None and block_of.get(units[-1][-1].name) == path:
            units[-1].append(op)
        else:
            units.append([op])
    return units, [k for k, unit in enumerate(units) if unit[0].name in block_of]


def _ends(units: Sequence[Sequence[Op]], at: Sequence[int]) -> tuple[bool, bool]:
    """Return whether there is something to train before the first block, and after the last one."""
    before, after = (units[: at[0]], units[at[-1] + 1 :]) if at else ((), ())
    return any(op.has_mirror for unit in before for op in unit), any(op.has_mirror for unit in after for op in unit)


def _bounds(blocks: str, count: int, units: Sequence[Sequence[Op]], at: Sequence[int]) -> list[int]:
    """Return the first unit of each stage; the blocks are the units `at`."""
    parts = blocks.split("+")
    sizes = [int(size) for size in parts if size.isdecimal()]
    if len(parts) != count or len(sizes) != count or sum(sizes) != len(at) or not at:
        raise InputError(
            f"blocks={blocks} is {len(parts)} stages of {sum(sizes)} blocks, but there are {count} and {len(at)} "
            "blocks; write a number for each stage, as 3+5+4."
        )
    ends = dict(zip((0, count - 1), zip(("before", "after"), _ends(units, at), strict=True), strict=False))
    for stage in (k for k, size in enumerate(sizes) if size == 0):
        if stage not in ends:
            raise InputError(
                f"blocks={blocks} leaves stage {stage} of {count} without blocks; only the first and the last may have "
                "0. Give it 1 or more."
            )
        where, is_some = ends[stage]
        if not is_some:
            raise InputError(
                f"blocks={blocks} leaves stage {stage} of {count} without blocks, but {where} its blocks the model "
                "trains nothing; give it 1 or more."
            )
    firsts = [*at, at[-1] + 1]
    return [0, *(firsts[sum(sizes[:k])] for k in range(1, count))]


def _balance(costs: np.ndarray, needed: np.ndarray, count: int) -> list[int]:
    """Return the bounds of `count` contiguous groups whose largest cost is smallest, each with something needed."""
    total, present = (np.concatenate([[0.0], np.cumsum(x)]) for x in (costs, needed))
    best = np.full((count + 1, len(total)), np.inf)
    best[0, 0] = 0.0
    cut = np.zeros((count + 1, len(total)), dtype=int)
    for k in range(1, count + 1):
        for end in range(1, len(total)):
            worst = np.maximum(best[k - 1, :end], total[end] - total[:end])
            worst = np.where(present[end] > present[:end], worst, np.inf)
            cut[k, end] = int(worst.argmin())
            best[k, end] = worst[cut[k, end]]
    bounds = [len(costs)]
    for k in range(count, 0, -1):
        bounds.append(int(cut[k, bounds[-1]]))
    return bounds[::-1]
