"""Stages of a V: each device has one on the way in and one on the way out, and the slowest device counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from itertools import islice, pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from superscaler.planner.costs import Costs
from superscaler.planner.orders.measured import MANY
from superscaler.planner.orders.works import Rows, Works, finish
from superscaler.planner.space import SCHEDULES
from superscaler.planner.stages.balance import Allowed, Floats, Ints
from superscaler.plans.lib.schedules import RULES

# The accuracy of the slowest device's seconds: halvings of what they can be.
_HALVINGS = 12
# The microbatches of each device in a step by which stages are compared, and the works of all these steps.
_FEW, _WORKS = 2, 12_000
# Sums in another order differ by less.
_ROUNDED = 1e-12
# The share of the slowest stage that counts beside a step.
_UNEVEN = 0.1


class Folded:
    """The stages of a V of so many devices. `slow`: some that are allowed."""

    def __init__(self, costs: Costs, run_of: Ints, devices: int, allowed: Allowed, slow: Sequence[int]) -> None:
        # The first device has all that is outside of the blocks, early in the model or late.
        self.rest, self.early, self.devices, self.slow = float(costs.rest.turn), costs.rest.early, devices, [*slow]
        self.until = np.concatenate([[0.0], np.cumsum([costs.runs[n].turn for n in run_of])])
        # The seconds of the blocks between two.
        self.inner = np.triu(self.until[None, :] - self.until[:, None]) + np.tril(
            np.full((len(self.until),) * 2, inf), -1
        )
        self.allowed = [allowed(stage, 2 * devices) for stage in range(2 * devices)]
        # The least seconds of a stage of 0, 1, ... blocks.
        count = len(self.until)
        self.shortest = np.maximum.accumulate([self.inner.diagonal(n).min() for n in range(count)])

    @cached_property
    def least(self) -> list[int]:
        """Return the first block of each stage, and the end of the last one, so that the slowest device is fastest."""
        low, high = float(self.until[-1]) / self.devices, self._slowest(self.slow)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._reached(middle)[-1].diagonal().min() < inf else (middle, high)
        high *= 1 + _ROUNDED
        return self._traced(self._reached(high), high)

    def _slowest(self, bounds: Sequence[int]) -> float:
        stages = self.seconds(bounds)
        return max(a + b for a, b in zip(stages[: self.devices], stages[: self.devices - 1 : -1], strict=True))

    def seconds(self, bounds: Sequence[int]) -> list[float]:
        """Return the seconds of each stage."""
        found = [float(self.until[b] - self.until[a]) for a, b in pairwise(bounds)]
        return [found[0] + self.early, *found[1:-1], found[-1] + self.rest - self.early]

    def _reached(self, limit: float) -> list[Floats]:
        """Return for 0, 1, ... devices the seconds of the blocks between their stages, by the first of these and the
        end; infinite where they cannot have the others within a limit.
        """
        found = [np.full(self.inner.shape, inf)]
        found[0][0, -1] = self.inner[0, -1]
        most = int(np.searchsorted(self.shortest, limit * (1 + _ROUNDED), side="right"))
        for device in range(self.devices):
            into, out = (self.allowed[k] for k in (device, 2 * self.devices - 1 - device))
            # The stage on the way out ends where the later ones begin: the same, from the other end of the model.
            before = _least(_least(found[-1], into, most).T[::-1], out.T[::-1, ::-1], most)[::-1].T
            is_within = before + (0.0 if device else self.rest) <= limit + np.where(self.inner < inf, self.inner, -inf)
            found.append(np.where(is_within, self.inner, inf))
        return found

    def _traced(self, reached: Sequence[Floats], limit: float) -> list[int]:
        """Return stages within a limit, those of a device as equal as can be."""
        middles = np.flatnonzero(reached[-1].diagonal() < inf)
        a = b = int(middles[np.abs(self.until[middles] - self.until[-1] / 2).argmin()])
        bounds = [a]
        for device in reversed(range(self.devices)):
            into, out = self.allowed[device][:, a], self.allowed[2 * self.devices - 1 - device][b]
            last, first = (0.0, 0.0) if device else (self.rest - self.early, self.early)
            is_some = into[:, None] & out[None, :] & (reached[device] + first + last <= limit + self.inner[a, b])
            one, other = self.until[a] - self.until + first, self.until - self.until[b] + last
            table = np.where(is_some, np.abs(one[:, None] - other[None, :]), inf)
            a, b = map(int, np.unravel_index(table.argmin(), table.shape))
            bounds = [a, *bounds, b]
        return bounds

    def best(self, microbatches: int) -> list[int]:
        """Return stages with the shortest step that is found from two others, by moves of a block."""
        count = min(microbatches, _FEW * self.devices)
        tries = _WORKS // (6 * self.devices * count)
        found = (self._moved(tuple(some), count, tries) for some in (self.least, self.slow))
        return [*min(found)[1]]

    def _moved(self, best: tuple[int, ...], count: int, tries: int) -> tuple[float, tuple[int, ...]]:
        """Return the seconds of a step, and the stages, after moves that make it shorter."""
        seconds = {best: self.step(best, count)}
        while len(seconds) < tries:
            own = seconds[best]
            for other in islice((some for some in self._beside(best) if some not in seconds), tries - len(seconds)):
                seconds[other] = self.step(other, count)
                if seconds[other] < own:
                    best = other
                    break
            else:
                break
        return seconds[best], best

    def _beside(self, bounds: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield stages that are allowed, and where a block of one is in another one."""
        last = len(bounds) - 2
        for apart, first in ((n, k) for n in range(1, last + 1) for k in range(last + 1 - n)):
            for step in (-1, 1):
                moved = (at + step * (first < k <= first + apart) for k, at in enumerate(bounds))
                other = tuple(moved)
                if all(
                    0 <= a <= b < len(self.until) and self.allowed[k][a, b] for k, (a, b) in enumerate(pairwise(other))
                ):
                    yield other

    def step(self, bounds: Sequence[int], count: int) -> float:
        """Return the seconds of a step, where a forward and the halves of a backward take as long, and a share of the
        slowest stage: of steps almost as short, that of more equal stages is taken.
        """
        place = (*range(self.devices), *reversed(range(self.devices)))
        seconds = self.seconds(bounds)
        stages = tuple({"F": x / 3, "I": x / 3, "W": x / 3, "B": 2 * x / 3} for x in seconds)
        sends, rooms = (0.0,) * (len(place) - 1), (MANY,) * self.devices
        works = Works(place, stages, sends, rooms, (0.0,) * self.devices, count, frozenset(range(len(place))))
        return finish(works, _rows(self.devices, count)) + _UNEVEN * max(seconds)


def _least(table: Floats, allowed: NDArray[np.bool_], most: int) -> Floats:
    """Return for each end of a stage the least of the rows of a table at its allowed beginnings, fewer than `most`
    blocks before.
    """
    found = np.full(table.shape, inf)
    for length in range(most):
        rows = np.where(allowed.diagonal(length)[:, None], table[: len(table) - length], inf)
        np.minimum(found[length:], rows, out=found[length:])
    return found


@cache
def _rows(devices: int, count: int) -> Rows:
    return [[(work.stage, work.kind) for work in row] for row in RULES[SCHEDULES["zbv"]](devices, count)]
