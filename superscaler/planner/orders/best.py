"""The best order that is found: a regular one, or one by list scheduling, then by branch and bound: the order of
few microbatches, with a part that repeats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf
from typing import Any

from superscaler.planner.orders import regular
from superscaler.planner.orders.branch import bound, improved
from superscaler.planner.orders.lists import Way, listed, moved, repeated
from superscaler.planner.orders.regular import Lane, rows_of
from superscaler.planner.orders.works import Rows, Work, Works, finish

# An order of more activations, or more halves, or that is less regular, is taken below so many times the seconds.
_WORTH = 0.998
# The microbatches of list scheduling, for each device.
_FEW = 3
# Works that are done in regular orders, in lists, in moves, and in repetitions of these; nodes of branch and bound.
_REGULAR, _LISTED, _MOVED, _AGAIN, _NODES = 50_000, 25_000, 200_000, 20_000, 1_500
# Orders of few microbatches that are made longer.
_REPEATED = 3
# Branch and bound orders so many works at most.
_BRANCHED = 240
# Shares of a forward for which a device waits for a backward, or for a forward before a half.
_PATIENCE = 0.0, 0.3


@dataclass(frozen=True)
class Found:
    """An order of works, and the seconds of its step."""

    seconds: float
    works: Works
    rows: Rows


def best_order(
    works: Works, kept: Sequence[int], can_split: Sequence[int] = (), known: Callable[[int], Rows] | None = None
) -> Found:
    """Return the shortest step that is found, in a known order where none is shorter; infinite seconds if none is.

    `kept`: the activations that devices keep in the order from which others start, 1F1B's for example. `can_split`:
    stages whose backward can be in halves. `known`: an order of so many microbatches.
    """
    best, least = Found(inf, works, []), bound(works, can_split)
    own = [_in(works.of(count), known(count)) for count in (works.count, _few(works))] if known else []
    for found in chain(own[:1], _regular(works, kept, can_split), _irregular(works, kept, can_split, own[1:])):
        if found.seconds < _WORTH * best.seconds:
            best = found
        if _WORTH * best.seconds <= least:
            break
    ended = _in(best.works, _ended(best.works, best.rows)) if best.rows else best
    return ended if _WORTH * ended.seconds <= best.seconds else best


def _ended(works: Works, rows: Rows) -> Rows:
    """Return an order in which each device does the longer halves for weights before shorter ones, as soon as they are
    ready: those that it does last have the fewest gradients to send when no work is left.
    """
    found = list[list[Work]]()
    for row in rows:
        ready, own = Counter[int](), list[Work]()
        for stage, kind in row:
            ready[stage] += kind == "I"
            longest = max(+ready, key=lambda s: works.seconds[s]["W"]) if kind == "W" else stage
            ready[longest] -= kind == "W"
            own.append((longest, kind))
        found.append(own)
    return found


def _few(works: Works) -> int:
    """Return the number of microbatches whose order is found by lists."""
    return min(works.count, _FEW * len(works.rooms))


def _in(works: Works, rows: Rows) -> Found:
    """Return a known order of works."""
    own = replace(works, split=frozenset(stage for row in rows for stage, kind in row if kind == "I"))
    return Found(finish(own, rows), own, rows)


def _regular(works: Works, kept: Sequence[int], can_split: Sequence[int]) -> Iterator[Found]:
    if len(works.place) > len(works.rooms):
        return
    few = works.of(min(works.count, (_FEW + 1) * len(kept)))

    def seconds(lanes: tuple[Lane, ...]) -> tuple[float, int]:
        own, rows = _split(few, lanes), rows_of(lanes, few.count)
        return finish(own, rows), sum(map(len, rows))

    tried = _climbed(regular.first(kept, can_split), lambda some: regular.beside(some, can_split), seconds, _REGULAR)
    for lanes in tried[:1]:
        own, rows = _split(works, lanes), rows_of(lanes, works.count)
        yield Found(finish(own, rows), own, rows)


def _split(works: Works, lanes: Sequence[Lane]) -> Works:
    return replace(works, split=frozenset(d for d, lane in enumerate(lanes) if lane.is_split))


def _climbed(
    first: Iterable[Any], others: Callable[[Any], Iterable[Any]], seconds: Callable[[Any], tuple[float, int]], left: int
) -> list[Any]:
    """Return all that were tried, the best first: the first ones, and those beside the best.

    It ends where nothing is better, or so many works were done. `seconds`: gives those of a step, and the works that
    were done for that.
    """
    found = dict[Any, float]()

    def tries(some: Iterable[Any]) -> Any:
        nonlocal left
        for one in some:
            if one not in found and left > 0:
                found[one], done = seconds(one)
                left -= done
        return min(found, key=lambda one: found[one])

    best, before = tries(first), None
    while best != before and left > 0:
        before, best = best, tries(others(best))
    # Those that were tried first are simpler.
    return sorted(found, key=lambda one: found[one])


def _irregular(works: Works, kept: Sequence[int], can_split: Sequence[int], known: Sequence[Found]) -> Iterator[Found]:
    """Yield orders of all microbatches: known ones of few, and the best by lists, each made shorter."""
    few = works.of(_few(works))

    def seconds(way: Way) -> tuple[float, int]:
        found, rows = listed(replace(few, split=way.split), way)
        return found, sum(map(len, rows))

    ways = _climbed(_first(few, kept, can_split), lambda way: _beside(few, way, can_split), seconds, _LISTED)
    owns = [(replace(few, split=way.split), way) for way in ways[:_REPEATED]]
    for found in (*known, *(Found(end, own, rows) for own, way in owns for end, rows in [listed(own, way)])):
        if found.seconds < inf:
            yield _shorter(found, works.count)


def _shorter(found: Found, count: int) -> Found:
    """Return a better order, of so many microbatches."""
    own, end, rows = found.works, found.seconds, found.rows
    if bound(own) < end:
        if sum(map(len, rows)) <= _BRANCHED:
            end, rows, _ = improved(own, end, rows, _NODES // _REPEATED)
        end, rows = moved(own, end, rows, _MOVED // _REPEATED)
    whole = own.of(count)
    end, rows = repeated(whole, rows, _AGAIN // _REPEATED)
    return Found(end, whole, rows)


def _first(works: Works, kept: Sequence[int], can_split: Sequence[int]) -> Iterator[Way]:
    """Yield ways in which devices keep a few more activations than in an order, and several stages are split."""
    most = [min(room, works.count * len(own)) for room, own in zip(works.rooms, works.own, strict=True)]
    more = [[*kept], [k + 1 for k in kept], [2 * k - 1 for k in kept], most]
    splits = dict.fromkeys(frozenset(some) for some in ((), can_split, can_split[1:], can_split[-1:]))
    for split in splits:
        for count in more:
            rooms = tuple(map(min, count, most))
            for patience in _PATIENCE:
                for is_eager in (False, True):
                    yield Way(split, rooms, is_eager, patience * works.seconds[0]["F"])


def _beside(works: Works, way: Way, can_split: Sequence[int]) -> Iterator[Way]:
    """Yield ways that differ in the activations of a device, or in a stage that is split."""
    for device, room in enumerate(works.rooms):
        for count in (way.rooms[device] - 1, way.rooms[device] + 1):
            if len(works.own[device]) <= count <= room:
                yield way._replace(rooms=(*way.rooms[:device], count, *way.rooms[device + 1 :]))
    for stage in can_split:
        yield way._replace(split=way.split ^ {stage})
