"""Walks through the code of a device that end a loop early: once its repetitions only move what they did before.

If a repetition leaves the same state as the one before, with all names moved to the next microbatches, the next one
does the same again. So the rest is not run: the state is moved to the end of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from superscaler.ir.loops import Loop, Rolled, runs_of
from superscaler.ir.mask import extents
from superscaler.ir.program import (
    ROLES,
    VALUES,
    Forward,
    Give,
    Instruction,
    Load,
    Loss,
    Role,
    Send,
    Slice,
    Task,
    Update,
    Value,
)  # fmt: skip

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


class Walker(Protocol):
    """Runs the instructions of a device on a state."""

    def step(self, at: int, i: Instruction) -> None:
        """Run an instruction."""

    def state(self, pace: Pace, turns: int) -> object:
        """Return the state on which the next instructions depend, moved by so many repetitions."""

    def skip(self, pace: Pace, turns: int, before: Any, now: Any) -> None:
        """Do the last repetition again, so many times. `before`, `now`: the states at its ends."""


def walk(code: Sequence[Instruction], walker: Walker, paces: Mapping[int, Pace | None]) -> None:
    """Run code. `paces`: of its loops, by the number of the run."""
    at = 0
    for number, run in enumerate(runs_of(code)):
        pace = paces.get(number)
        if pace is not None and isinstance(code, Rolled) and isinstance(run, Loop):
            _walk_loop(code, number, run.count, at, walker, pace)
        else:
            for here, i in enumerate(run, at):
                walker.step(here, i)
        at += len(run)


def _walk_loop(code: Rolled, number: int, count: int, at: int, walker: Walker, pace: Pace) -> None:
    before: object = None
    for turn in range(count):
        for here, i in enumerate(code.repetition(number, turn), at + turn * pace.length):
            walker.step(here, i)
        if turn < count - 1 and (_is_power(turn) or _is_power(turn - 1)):
            # Moved to the end of the loop: there is no microbatch before the first one.
            state = walker.state(pace, count - turn)
            if _is_power(turn - 1) and state == before:
                walker.skip(pace, count - 1 - turn, before, state)
                return
            before = state


def _is_power(number: int) -> bool:
    """Return whether a number is a power of two, or 0. States of later repetitions are compared less often."""
    return number >= 0 and number & (number - 1) == 0


def paces_of(code: Sequence[Instruction], *tasks: Mapping[Task, Any]) -> dict[int, Pace | None]:
    """Return the paces of the loops of code. `tasks`: what else an instruction depends on, by its task."""
    return {n: pace_of(run, *tasks) for n, run in enumerate(runs_of(code)) if isinstance(run, Loop)}


def pace_of(loop: Loop, *tasks: Mapping[Task, Any]) -> Pace | None:
    """Return the pace of a loop, None if its repetitions differ by more than a move."""
    points, keys = set[int](), set[tuple[Value | Task, Value | Task]]()
    for one, two in zip(loop.first, loop.second, strict=True):
        if isinstance(one, Give | Loss | Update) or not _is_alike(one, two):
            return None
        keys.update(zip(_keys(one), _keys(two), strict=True))
        if isinstance(one, Send) and isinstance(two, Send):
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
        if role in (Role.MESSAGE, Role.NOTE) or name == "task" or (isinstance(one, Forward) and name == "at"):
            # The part of a forward is that of its task.
            continue
        a, b = getattr(one, name), getattr(two, name)
        if role in VALUES:
            is_same = isinstance(a, Value) or [v is None for v in a] == [v is None for v in b]
        elif role is Role.EVEN and isinstance(one, Load | Slice):
            is_same = extents(a) == extents(b)
        else:
            is_same = a == b
        if not is_same:
            return False
    return True
