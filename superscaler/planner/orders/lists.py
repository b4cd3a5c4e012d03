"""List scheduling: each device always takes the first of its works, by a rank, that can start."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import inf
from typing import NamedTuple

from superscaler.planner.orders.works import BETTER, Rows, State, Work, Works, finish

# A work moves so many places.
_DISTANCES = 1, 2, 3, 5


class Way(NamedTuple):
    """A way of list scheduling. `split`: the stages whose backward comes in halves. `rooms`: activations that each
    device keeps at most. `is_eager`: forwards, from which the path to the end is longest, go before backwards.
    `patience`: seconds for which a device waits for a work of a lower rank.
    """

    split: frozenset[int]
    rooms: tuple[int, ...]
    is_eager: bool = False
    patience: float = 0.0


def listed(works: Works, way: Way) -> tuple[float, Rows]:
    """Return the seconds of a step, and its order; infinity if it cannot end in so little room."""
    state = State(works, works.needs, way.rooms)
    devices = range(len(works.rooms))
    rank = {"F": 0, "I": 1, "B": 1, "W": 2} if way.is_eager else {"F": 1, "I": 0, "B": 0, "W": 2}
    best = [_first(state, d, rank, way.patience) for d in devices]
    while True:
        device = min(devices, key=lambda d: best[d][0])
        first, start, work = best[device]
        if first == inf:
            break
        state.do(work, start)
        stage = work[0]
        beside = (works.place[s] for s in (stage - 1, stage + 1) if 0 <= s < len(works.place))
        for d in {device, *beside}:
            best[d] = _first(state, d, rank, way.patience)
    is_whole = all(len(some) == works.count for some in state.backward)
    return (state.end if is_whole else inf), state.rows


def _first(state: State, device: int, rank: dict[str, int], patience: float) -> tuple[float, float, Work]:
    """Return when a device could start anything, and the start of the work that it takes then, and that work."""
    found = list(state.ready(device))
    if not found:
        return inf, inf, (0, "")
    first = min(start for start, _ in found)
    start, work = min(
        (pair for pair in found if pair[0] <= first + patience),
        key=lambda pair: (rank[pair[1][1]], -pair[1][0] if pair[1][1] == "F" else pair[1][0], pair[0]),
    )
    return first, start, work


def moved(works: Works, seconds: float, rows: Rows, left: int) -> tuple[float, Rows]:
    """Return an order in which no work is better some places earlier in its row, after so many works were done."""
    before = inf
    while seconds < before:
        before = seconds
        for device, distance in product(range(len(rows)), _DISTANCES):
            for at in range(len(rows[device]) - distance) if left > 0 else ():
                row = rows[device]
                end, left = at + distance, left - sum(map(len, rows))
                other = [*row[:at], row[end], *row[at:end], *row[end + 1 :]]
                found = [*rows[:device], other, *rows[device + 1 :]]
                if row[at] != row[end] and (step := finish(works, found)) < seconds * (1 - BETTER):
                    seconds, rows = step, found
    return seconds, rows


def repeated(works: Works, rows: Rows, left: int) -> tuple[float, Rows]:
    """Return the order of all microbatches after that of few: in each row a part with one work of each kind repeats.

    The parts are chosen row by row, so that the step is shortest, in so many works that are done. The seconds are
    infinite if a row has no such part.
    """
    added = works.count - sum(work == rows[0][0] for work in rows[0])
    places = [_parts(row) for row in rows]
    if not added or not all(places):
        return (inf if added else finish(works, rows)), rows

    def whole(at: Sequence[int]) -> Rows:
        return [_longer(row, start, added) for row, start in zip(rows, at, strict=True)]

    chosen = [some[len(some) // 2] for some in places]
    best = finish(works, whole(chosen))
    for device, some in enumerate(places):
        for start in some if left > 0 else ():
            left -= sum(map(len, rows)) + added * sum(len({*row}) for row in rows)
            other = [*chosen[:device], start, *chosen[device + 1 :]]
            if (seconds := finish(works, whole(other))) < best:
                best, chosen = seconds, other
    return best, whole(chosen)


def _parts(row: Sequence[Work]) -> list[int]:
    """Return the starts of the parts of a row that have one work of each kind."""
    kinds = len({*row})
    return [start for start in range(len(row) - kinds + 1) if len({*row[start : start + kinds]}) == kinds]


def _longer(row: list[Work], start: int, added: int) -> list[Work]:
    end = start + len({*row})
    return row[:start] + row[start:end] * added + row[start:]
