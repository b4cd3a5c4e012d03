"""Paces: the moves between the repetitions of the loops of a device, for what is simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from superscaler.ir.loops import Loop, loops_of
from superscaler.ir.mask import extents
from superscaler.ir.program import (
    ROLES,
    VALUES,
    Instruction,
    Role,
    Task,
    Value,
)  # fmt: skip
from superscaler.ir.running.machine import Lap

# The fields of each kind of instruction with names, or a task.
_NAMED = {kind: tuple(n for n, role in roles.items() if role in VALUES or n == "task") for kind, roles in ROLES.items()}
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
    points, keys = set[int](), set[tuple[Value | Task, Value | Task]]()
    for one, two in zip(loop.first, loop.second, strict=True):
        if one.outlives or not _is_alike(one, two):
            return None
        keys.update(zip(_keys(one), _keys(two), strict=True))
        if one.is_send:
            points.add(two.point - one.point)
    microbatches = {b.microbatch - a.microbatch for a, b in keys if a.microbatch >= 0 or a != b}
    if len(microbatches) != 1 or len(points) > 1 or 0 in microbatches:
        return None
    pace = Pace(len(loop.first), microbatches.pop(), max(points, default=0))
    if any(pace.moved(a, 1) != b for a, b in keys):
        return None
    own, rest = [a for a, _ in keys if isinstance(a, Task)], range(1, loop.count)
    is_same = all(t[pace.moved(task, k)] is t[pace.moved(task, 1)] for t in tasks for task in own for k in rest)
    return pace if is_same else None


def _keys(i: Instruction) -> Iterator[Value | Task]:
    """Yield the names and the task of an instruction."""
    for name in _NAMED[type(i)]:
        value = getattr(i, name)
        if isinstance(value, Value | Task):
            yield value
        else:
            yield from (v for v in value if v is not None)


def _is_alike(one: Instruction, two: Instruction) -> bool:
    """Return whether instructions differ only in names, numbers of messages, and places of pieces of equal sizes."""
    for name, role in ROLES[type(one)].items():
        # The part at which a forward starts is that of its task.
        if role in (Role.MESSAGE, Role.NOTE) or name in ("task", "at"):
            continue
        a, b = getattr(one, name), getattr(two, name)
        if role in VALUES:
            is_same = isinstance(a, Value) or [v is None for v in a] == [v is None for v in b]
        elif role is Role.EVEN and one.takes_piece:
            is_same = extents(a) == extents(b)
        else:
            is_same = a == b
        if not is_same:
            return False
    return True
