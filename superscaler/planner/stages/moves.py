"""Stages of pipelines with a shorter step than others, found by moves of blocks: no formula says where in a pipeline
the slow stages cost least.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice, pairwise

import numpy as np

from superscaler.groups import group_by
from superscaler.planner.costs import Costs
from superscaler.planner.orders.measured import MANY
from superscaler.planner.orders.works import Rows, Works, finish
from superscaler.planner.space import SCHEDULES
from superscaler.planner.stages.balance import Allowed, Floats, Ints
from superscaler.plans.lib.schedules import RULES

# The microbatches of each device in a step by which stages are compared, and the works of all these steps.
_FEW, _WORKS = 2, 12_000
# The share of the slowest stage that counts beside a step.
_UNEVEN = 0.1


class Moves:
    """The stages of a pipeline of so many devices under a schedule: of a V, two on each device, else one. `tails`: the
    seconds of each stage after its last work, by its first block and its end.
    """

    def __init__(
        self, costs: Costs, run_of: Ints, schedule: str, devices: int, allowed: Allowed, tails: Sequence[Floats] = ()
    ) -> None:
        # What is outside of the blocks is early in the model, or late.
        self.rest, self.early = float(costs.rest.turn), costs.rest.early
        self.until = np.concatenate([[0.0], np.cumsum([costs.runs[n].turn for n in run_of])])
        self.schedule, self.devices, self.tails = schedule, devices, tails
        self.place = (*range(devices), *(reversed(range(devices)) if schedule == "zbv" else ()))
        self.allowed = [allowed(stage, len(self.place)) for stage in range(len(self.place))]

    def seconds(self, bounds: Sequence[int]) -> list[float]:
        """Return the seconds of each stage."""
        found = [float(self.until[b] - self.until[a]) for a, b in pairwise(bounds)]
        return [found[0] + self.early, *found[1:-1], found[-1] + self.rest - self.early]

    def best(self, microbatches: int, firsts: Sequence[Sequence[int]]) -> list[int]:
        """Return stages with the shortest step that is found from some first ones, by moves of a block."""
        count = min(microbatches, _FEW * self.devices)
        tries = _WORKS // (3 * len(self.place) * count)
        found = (self._moved(tuple(some), count, microbatches - count, tries) for some in firsts)
        return [*min(found)[1]]

    def _moved(self, best: tuple[int, ...], count: int, more: int, tries: int) -> tuple[float, tuple[int, ...]]:
        """Return the seconds of a step, and the stages, after moves that make it shorter."""
        seconds = {best: self.step(best, count, more)}
        while len(seconds) < tries:
            own = seconds[best]
            for other in islice((some for some in self._beside(best) if some not in seconds), tries - len(seconds)):
                seconds[other] = self.step(other, count, more)
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

    def step(self, bounds: Sequence[int], count: int, more: int = 0) -> float:
        """Return the seconds of a step, where a forward and the halves of a backward take as long, and a share of the
        slowest stage: of steps almost as short, that of more equal stages is taken. So many `more` microbatches take
        the seconds of the slowest device.
        """
        seconds = self.seconds(bounds)
        stages = tuple({"F": x / 3, "I": x / 3, "W": x / 3, "B": 2 * x / 3} for x in seconds)
        sends, rooms = (0.0,) * (len(stages) - 1), (MANY,) * self.devices
        tails = zip(self.tails, pairwise(bounds), strict=False)
        after = tuple(float(tail[end]) for tail, end in tails) or (0.0,) * self.devices
        works = Works(self.place, stages, sends, rooms, after, count, frozenset(range(len(stages))))
        own = group_by(range(len(stages)), self.place.__getitem__).values()
        slowest = max(sum(seconds[stage] for stage in some) for some in own)
        return finish(works, _rows(self.schedule, self.devices, count)) + more * slowest + _UNEVEN * max(seconds)


@cache
def _rows(schedule: str, devices: int, count: int) -> Rows:
    return [[(work.stage, work.kind) for work in row] for row in RULES[SCHEDULES[schedule]](devices, count)]
