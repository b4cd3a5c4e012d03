"""The buffers of communication, from its start to its wait: those of `comm/distributed.py` under NCCL."""

from __future__ import annotations

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
        case "all_gather" | "rd_gather":
            return _gathered(i, p, is_one, ascending, flat, results)
        case "reduce_scatter":
            # Chunks of another dim than the first are copied, then all are stacked.
            copied = 0 if is_one and not way.sizes and way.give == 0 else flat
            return Buffers(inside=copied, shared=flat, result=block(flat // p))
        case _:
            copied = flat if way.give > 0 else 0
            return Buffers(inside=copied, shared=2 * flat, made=results)


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
