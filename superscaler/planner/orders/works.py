"""Works of a pipeline as a problem of scheduling: their seconds, their devices, and what these can keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf

# The stage and the kind of a work; the n-th of a kind is that of microbatch n.
Work = tuple[int, str]
Rows = list[list[Work]]
# What a work adds to the activations that its device keeps.
_KEEPS = {"F": 1, "B": -1, "W": -1}
# An order is better by more than this share of a step.
BETTER = 1e-9


@dataclass(frozen=True)
class Works:
    """The works of a step of a pipeline: F, and B or its halves I and W, of each stage and of `count` microbatches.

    All microbatches take the same time, so that none overtakes another one.

    place    the device of each stage
    seconds  by stage and kind
    sends    seconds of a message between each stage and the next one; 0 on one device
    rooms    the activations that each device can keep: from F to B, or to W
    after    seconds of each device after its last work
    split    the stages whose backward comes in halves
    """

    place: tuple[int, ...]
    seconds: tuple[Mapping[str, float], ...]
    sends: tuple[float, ...]
    rooms: tuple[int, ...]
    after: tuple[float, ...]
    count: int
    split: frozenset[int] = frozenset()

    @cached_property
    def halved(self) -> frozenset[int]:
        """Return the stages whose halves are known."""
        return frozenset(s for s, own in enumerate(self.seconds) if "I" in own)

    def of(self, count: int) -> Works:
        """Return the works of another number of microbatches."""
        return replace(self, count=count)

    @cached_property
    def back(self) -> list[float]:
        """Return the seconds of each stage until the stage before has its gradient."""
        return [own["I" if s in self.split else "B"] for s, own in enumerate(self.seconds)]

    @cached_property
    def own(self) -> list[list[int]]:
        """Return the stages of each device."""
        return [[s for s, d in enumerate(self.place) if d == device] for device in range(len(self.rooms))]

    @cached_property
    def needs(self) -> list[int]:
        """Return the room after which a forward of each stage cannot stop its device: for later stages of that, too."""
        return [sum(other >= s for other in self.own[d]) for s, d in enumerate(self.place)]

    @cached_property
    def after_backward(self) -> list[float]:
        """Return the least seconds of a step after a backward of each stage."""
        found = list[float]()
        for s, device in enumerate(self.place):
            half = self.seconds[s]["W"] if s in self.split else 0.0
            before = found[-1] + self.sends[s - 1] + self.back[s - 1] if s else 0.0
            found.append(max(self.after[device] + half, before))
        return found

    @cached_property
    def after_forward(self) -> list[float]:
        """Return the least seconds of a step after a forward of each stage."""
        found = [self.back[-1] + self.after_backward[-1]]
        for s in reversed(range(len(self.place) - 1)):
            found.append(self.sends[s] + self.seconds[s + 1]["F"] + found[-1])
        return found[::-1]

    @cached_property
    def rounds(self) -> list[float]:
        """Return the least seconds from the start of a forward of each stage until its activations are gone."""
        found, behind = list[float](), 0.0
        for s in reversed(range(len(self.place))):
            around = self.seconds[s]["F"] + behind + self.back[s]
            found.append(around + (self.seconds[s]["W"] if s in self.split else 0.0))
            behind = around + 2 * self.sends[s - 1]
        return found[::-1]


class State:
    """Works that are done, in the order of their devices. `do` and `undo` go on and back. `needs`: the room that a
    forward of each stage needs.
    """

    def __init__(self, works: Works, needs: Sequence[int] = (), rooms: Sequence[int] = ()) -> None:
        self.works, stages = works, range(len(works.place))
        self.needs, self.rooms = needs or [1 for _ in stages], rooms or works.rooms
        self.forward: list[list[float]] = [[] for _ in stages]
        self.backward: list[list[float]] = [[] for _ in stages]
        self.halves = [0 for _ in stages]
        self.free = [0.0 for _ in works.rooms]
        self.kept = [0 for _ in works.rooms]
        self.rows: Rows = [[] for _ in works.rooms]

    def start(self, stage: int, kind: str) -> float:
        """Return when the next work of a kind could start; infinity if it cannot, as things are."""
        works, forward, backward = self.works, self.forward, self.backward
        device = works.place[stage]
        if kind == "F":
            k = len(forward[stage])
            if k == works.count or self.kept[device] + self.needs[stage] > self.rooms[device]:
                return inf
            if stage == 0:
                return self.free[device]
            if len(forward[stage - 1]) <= k:
                return inf
            return max(self.free[device], forward[stage - 1][k] + works.sends[stage - 1])
        k = len(backward[stage])
        if kind == "W":
            return self.free[device] if self.halves[stage] < k else inf
        if k >= len(forward[stage]):
            return inf
        ready = max(self.free[device], forward[stage][k])
        if stage + 1 == len(works.place):
            return ready
        if len(backward[stage + 1]) <= k:
            return inf
        return max(ready, backward[stage + 1][k] + works.sends[stage])

    def ready(self, device: int) -> Iterator[tuple[float, Work]]:
        """Yield the works that a device could do next, with their starts."""
        for stage in self.works.own[device]:
            for kind in "IWF" if stage in self.works.split else "BF":
                start = self.start(stage, kind)
                if start < inf:
                    yield start, (stage, kind)

    def do(self, work: Work, start: float) -> tuple[float, Work]:
        """Do a work; return what `undo` needs."""
        stage, kind = work
        device = self.works.place[stage]
        before, end = self.free[device], start + self.works.seconds[stage][kind]
        self.free[device] = end
        self.rows[device].append(work)
        if kind == "F":
            self.forward[stage].append(end)
            self.kept[device] += 1
        elif kind == "W":
            self.halves[stage] += 1
            self.kept[device] -= 1
        else:
            self.backward[stage].append(end)
            self.kept[device] -= kind == "B"
        return before, work

    def undo(self, done: tuple[float, Work]) -> None:
        before, (stage, kind) = done
        device = self.works.place[stage]
        self.free[device] = before
        self.rows[device].pop()
        if kind == "F":
            self.forward[stage].pop()
            self.kept[device] -= 1
        elif kind == "W":
            self.halves[stage] -= 1
            self.kept[device] += 1
        else:
            self.backward[stage].pop()
            self.kept[device] += kind == "B"

    @property
    def end(self) -> float:
        """Return the end of a step whose works are all done."""
        return max(free + after for free, after in zip(self.free, self.works.after, strict=True))


def kept_by(row: Sequence[Work]) -> int:
    """Return the activations that a device keeps at most.

    >>> kept_by([(0, kind) for kind in "FFIFWIW"])
    3
    """
    return max(accumulate(_KEEPS.get(kind, 0) for _, kind in row))


def finish(works: Works, rows: Sequence[Sequence[Work]]) -> float:
    """Return the seconds of a step in an order; infinity if it cannot run, or needs more room."""
    state, at, left = State(works), [0] * len(rows), sum(map(len, rows))
    while left:
        before = left
        for device, row in enumerate(rows):
            while at[device] < len(row):
                start = state.start(*row[at[device]])
                if start == inf:
                    break
                state.do(row[at[device]], start)
                at[device] += 1
                left -= 1
        if left == before:
            return inf
    return state.end
