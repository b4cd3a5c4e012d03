"""Paces: the moves between the repetitions of the loops of a device, for what is simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from superscaler.ir.loops import Loop, loops_of
from superscaler.ir.program import (
    Instruction,
    Task,
    Value,
)  # fmt: skip
from superscaler.ir.running.machine import Lap
from superscaler.ir.running.turns import is_alike, keys

K = TypeVar("K", bound=Value | Task)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pace:
    """The move from one repetition to the next, in the code, in microbatches, in starts of sends."""

    length: int
    microbatches: int
    points: int

    def moved(self, key: K, turns: int) -> K:
        """Return a name, or a task, so many repetitions later. One without a microbatch stays."""
        if key.microbatch < 0:
            return key
        return key._replace(microbatch=key.microbatch + turns * self.microbatches)  # type: ignore[return-value]

    def names(self, held: Mapping[K, T], turns: int) -> dict[K, T]:
        """Return the values that names, or tasks, hold so many repetitions later."""
        return {self.moved(key, turns): value for key, value in held.items()}


def laps_of(code: Sequence[Instruction], *tasks: Mapping[Task, Any]) -> list[Lap[Pace]]:
    """Return the loops of code that have a pace. `tasks`: what else an instruction depends on, by its task."""
    paces = ((start, loop, pace_of(loop, *tasks)) for start, loop in loops_of(code))
    return [Lap(start, len(loop.first), loop.count, pace) for start, loop, pace in paces if pace is not None]


def pace_of(loop: Loop, *tasks: Mapping[Task, Any]) -> Pace | None:
    """Return the pace of a loop, None if its repetitions differ by more than a move."""
    points, pairs = set[int](), set[tuple[Value | Task, Value | Task]]()
    for one, two in zip(loop.first, loop.second, strict=True):
        if not is_alike(one, two):
            return None
        pairs.update((a, b) for a, b in zip(keys(one), keys(two), strict=True) if a is not None and b is not None)
        if one.is_send:
            points.add(two.point - one.point)
    microbatches = {b.microbatch - a.microbatch for a, b in pairs if a.microbatch >= 0 or a != b}
    if len(microbatches) != 1 or len(points) > 1 or 0 in microbatches:
        return None
    pace = Pace(len(loop.first), microbatches.pop(), max(points, default=0))
    if any(pace.moved(a, 1) != b for a, b in pairs):
        return None
    own, rest = [a for a, _ in pairs if isinstance(a, Task)], range(1, loop.count)
    is_same = all(t[pace.moved(task, k)] is t[pace.moved(task, 1)] for t in tasks for task in own for k in rest)
    return pace if is_same else None
