"""Regular orders of pipelines with one stage on each device: forwards ahead, then turns of one work of each kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from superscaler.planner.orders.works import Rows, Work


class Lane(NamedTuple):
    """The order of a device: forwards `ahead` of the first turn; second halves so many turns `behind` the first ones,
    with their place in a turn; whether backwards are `split`.
    """

    ahead: int
    behind: int = 0
    is_late: bool = True
    is_split: bool = False

    def row(self, stage: int, count: int) -> list[Work]:
        """Return the works of a stage for so many microbatches.

        >>> "".join(kind for _, kind in Lane(1, 1, is_split=True).row(0, 3))
        'FFIFIWIWW'
        """
        ahead, behind = min(self.ahead, count), min(self.behind, count) if self.is_split else 0
        row = [(stage, "F")] * ahead
        for k in range(count):
            halves = [(stage, "W")] * (self.is_split and k >= behind)
            back = [(stage, "I" if self.is_split else "B")]
            row += [(stage, "F")] * (k + ahead < count)
            row += [*back, *halves] if self.is_late or not behind else [*halves, *back]
        return row + [(stage, "W")] * behind


def rows_of(lanes: Sequence[Lane], count: int) -> Rows:
    """Return the order of all devices."""
    return [lane.row(stage, count) for stage, lane in enumerate(lanes)]


def first(kept: Sequence[int], can_split: Sequence[int]) -> Iterator[tuple[Lane, ...]]:
    """Yield the orders of 1F1B and of zero bubbles, and those with more forwards ahead. `kept`: activations of 1F1B."""
    plain = [Lane(k - 1) for k in kept]
    for more in (0, 1):
        yield tuple(lane._replace(ahead=lane.ahead + more) for lane in plain)
    last = len(kept) - 1
    for depth in (1, 2) if can_split else ():
        yield tuple(
            Lane(depth * (last - d), depth * d, is_split=True) if d in can_split else Lane(depth * (last - d))
            for d in range(last + 1)
        )


def beside(lanes: Sequence[Lane], can_split: Sequence[int]) -> Iterator[tuple[Lane, ...]]:
    """Yield orders that differ in one device, or in all forwards that are ahead."""
    for step in (1, -1):
        if all(lane.ahead + step >= 0 for lane in lanes):
            yield tuple(lane._replace(ahead=lane.ahead + step) for lane in lanes)
    for d, lane in enumerate(lanes):
        others = [lane._replace(ahead=lane.ahead + step) for step in (1, -1)]
        if lane.is_split:
            others += [lane._replace(behind=lane.behind + step) for step in (1, -1)]
            others.append(lane._replace(is_late=not lane.is_late))
        if d in can_split:
            others.append(lane._replace(is_split=not lane.is_split))
        for other in others:
            if min(other.ahead, other.behind) >= 0:
                yield (*lanes[:d], other, *lanes[d + 1 :])
