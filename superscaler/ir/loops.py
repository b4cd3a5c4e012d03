"""Loops: instructions that repeat with every few microbatches, told by two repetitions, and expanded when asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from superscaler.ir.parts import Ints
from superscaler.ir.program import Instruction
from superscaler.ir.spmd import evenly

# How often a body must be there to be one that repeats.
SEEN = 3
# The microbatch of what is the same in all.
NONE = -1


@dataclass(frozen=True)
class Loop:
    """`count` repetitions of a body, of which the first two are given: all numbers of the others move as these do."""

    first: tuple[Instruction, ...]
    second: tuple[Instruction, ...]
    count: int = 1

    def __len__(self) -> int:
        return len(self.first) * self.count

    def __iter__(self) -> Iterator[Instruction]:
        return (i for at in range(self.count) for i in self.repetition(at))

    def repetition(self, at: int) -> Iterator[Instruction]:
        """Yield the instructions of a repetition, which may be one that is not done."""
        for i, moved in zip(self.first, self._moved, strict=True):
            yield replace(i, **{name: move(at) for name, move in moved}) if moved and at else i

    @cached_property
    def _moved(self) -> list[list[tuple[str, Callable[[int], Any]]]]:
        """Return per instruction the fields that move, and what they are in a repetition."""
        found = []
        for a, b in zip(self.first, self.second, strict=True):
            names = (f.name for f in fields(a) if f.compare)
            moves = ((name, mover(getattr(a, name), getattr(b, name))) for name in names)
            found.append([(name, move) for name, move in moves if move is not None])
        return found


def mover(first: Any, second: Any) -> Callable[[int], Any] | None:
    """Return what gives `evenly([first, second], (at,))`, None where both are equal: what moves is looked up once.

    Raises ValueError for tuples of other lengths.
    """
    if first == second:
        return None
    if type(first) is int:
        return lambda at: first + at * (second - first)
    if not isinstance(first, tuple):
        return lambda at: evenly([first, second], (at,))
    pairs = enumerate(zip(first, second, strict=True))
    moving = [(n, move) for n, (a, b) in pairs if (move := mover(a, b)) is not None]
    make: Callable[[list[Any]], Any] = getattr(first, "_make", tuple)

    def moved(at: int) -> Any:
        found = list(first)
        for n, move in moving:
            found[n] = move(at)
        return make(found)

    return moved


Run = tuple[Instruction, ...] | Loop


@dataclass(frozen=True)
class Rolled(Sequence[Instruction]):
    """Instructions in turn: some that are done once, and loops."""

    runs: tuple[Run, ...]

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[Instruction]:
        return (i for run in self.runs for i in run)

    def __getitem__(self, key: Any) -> Any:
        return self.expanded[key]

    @cached_property
    def expanded(self) -> tuple[Instruction, ...]:
        """Return all instructions."""
        return tuple(self)

    def changed(self, change: Callable[[Instruction], Instruction | None]) -> Rolled:
        """Return the same of other instructions, without those that become None."""

        def made(some: Iterable[Instruction]) -> tuple[Instruction, ...]:
            return tuple(i for i in map(change, some) if i is not None)

        return Rolled(
            tuple(
                replace(run, first=made(run.first), second=made(run.second)) if isinstance(run, Loop) else made(run)
                for run in self.runs
            )
        )


@dataclass(frozen=True)
class Span:
    """A body of `length` instructions that is there `count` times from `start` on."""

    start: int
    length: int
    count: int

    @property
    def body(self) -> range:
        return range(self.start, self.start + self.length)

    @property
    def end(self) -> int:
        return self.start + self.length * self.count


def find_spans(forms: Sequence[Hashable], microbatches: Sequence[int], period: int) -> list[Span]:
    """Return where a sequence repeats with microbatches that are `period` later each time; NONE are the same always."""
    known: dict[Hashable, int] = {}
    form = np.array([known.setdefault(f, len(known)) for f in forms], dtype=np.int64)
    at = np.array(microbatches, dtype=np.int64)
    later = {(f, k): n for n, (f, k) in enumerate(zip(form.tolist(), at.tolist(), strict=True)) if k != NONE}
    found, runs, here = list[Span](), dict[int, Ints](), 0
    while here < len(form):
        lag = later.get((int(form[here]), int(at[here]) + period), 0) - here if at[here] != NONE else 0
        if lag > 0 and lag not in runs:
            runs[lag] = _runs(form, at, period, lag)
        count = int(runs[lag][here]) // lag + 1 if lag > 0 else 0
        if count >= SEEN:
            found.append(Span(here, lag, count))
        here += max(lag * count, 1) if count >= SEEN else 1
    return found


def _runs(form: Ints, at: Ints, period: int, lag: int) -> Ints:
    """Return for each place how many from there on are the same `lag` later."""
    moved = np.where(at[:-lag] == NONE, at[lag:] == NONE, at[lag:] - at[:-lag] == period)
    is_same = (form[lag:] == form[:-lag]) & moved
    broken = np.append(np.flatnonzero(~is_same), len(is_same))
    places = np.arange(len(is_same))
    found = np.zeros(len(form), dtype=np.int64)
    found[: len(is_same)] = broken[np.searchsorted(broken, places)] - places
    return found


def steady_spans(
    spans: Sequence[Span], forms: Sequence[Hashable], microbatches: Sequence[int], is_work: Sequence[bool]
) -> list[Span]:
    """Return the spans that go on with more microbatches, in order: of those that share something the one with most
    kinds of work, and then the longest. What only warms up or cools down repeats with fewer.
    """

    def own(span: Span) -> set[Hashable]:
        return {forms[n] for n in span.body if microbatches[n] != NONE}

    def rank(span: Span) -> tuple[int, int]:
        return len({forms[n] for n in span.body if is_work[n]}), span.count

    taken, found = set[Hashable](), list[Span]()
    for span in sorted(spans, key=rank, reverse=True):
        if taken.isdisjoint(own(span)):
            found.append(span)
            taken |= own(span)
    return sorted(found, key=lambda span: span.start)
