"""The buffers of communication, from its start to its wait: those of `comm/distributed.py` under NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from superscaler.ir.model import width
from superscaler.ir.program import Collective, CollectiveArg
from superscaler.simulate.works import block


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of a collective on one device, in bytes.

    inside   the most while it starts, beside those that stay
    shared   what all of its handles hold until the wait: of the first one, or (`last`) of the last one
    result   the storage of the results, 0 where each wait makes its own
    made     the bytes that each wait makes
    sources  whether the sources are read until then; `source`: the result is the source itself
    """

    inside: int = 0
    shared: int = 0
    last: int = 0
    result: int = 0
    made: tuple[int, ...] = field(default=())
    sources: bool = False
    source: bool = False


def buffers(i: Collective, place: int) -> Buffers:
    """Return the buffers of a collective on the device at this place of the group."""
    p, is_one, size = len(i.group), len(i.ways) == 1, width(i.dtype)
    way, ascending = i.ways[0], tuple(sorted(i.group)) == tuple(i.group)
    given = [block(size * way.elements) for way in i.ways]
    results = tuple(block(size * prod(way.shape)) for way in i.ways)
    flat = given[0] if is_one else block(size * sum(way.elements for way in i.ways))
    if p == 1:
        return Buffers(result=flat) if i.kind == "all_reduce" or not is_one else Buffers(source=True)
    match i.kind:
        case "all_reduce" | "reduce":
            return Buffers(result=flat)
        case "broadcast":
            return Buffers(source=True) if i.root == place or i.sources[0] is not None else Buffers(result=results[0])
        case "rd_gather" if place != i.root:
            return Buffers(sources=True)
        case "all_gather" | "rd_gather":
            return _gathered(i, p, is_one, ascending, flat, results)
        case "reduce_scatter":
            return _scattered(i, is_one, ascending, given, flat, block(flat // p))
        case _:
            # Chunks of the first dim, in the order of the ranks, lie in memory as they are sent.
            is_read = way.give == 0 and ascending
            return Buffers(flat if way.give else 0, shared=flat * (2 - is_read), made=results, sources=is_read)


def _scattered(i: Collective, is_one: bool, ascending: bool, given: Sequence[int], flat: int, result: int) -> Buffers:
    # Chunks of another dim than the first are copied; those that do not lie in the order of the ranks are stacked.
    copied = sum(size for size, way in zip(given, i.ways, strict=True) if way.give or way.sizes)
    if not is_one:
        # The copies are joined, and freed before the result is made.
        return Buffers(max(copied - result, 0 if ascending else flat), shared=flat, result=result)
    is_read = ascending and not copied
    return Buffers(copied, shared=flat * (not is_read), result=result, sources=is_read)


def _gathered(i: Collective, p: int, is_one: bool, ascending: bool, flat: int, results: tuple[int, ...]) -> Buffers:
    way = i.ways[0]
    if not is_one:
        return Buffers(shared=flat, last=p * flat, made=results)
    if way.sizes:
        return Buffers(shared=flat if _is_padded(way) else 0, last=p * flat, made=results, sources=True)
    if way.take == 0 and ascending:
        return Buffers(result=p * flat, sources=True)
    return Buffers(last=p * flat, made=results, sources=True)


def _is_padded(way: CollectiveArg) -> bool:
    return max(way.take, way.give) >= 0 and way.view[max(way.take, way.give)] != max(way.sizes)
