"""Loops in code: a body whose numbers move evenly from one microbatch, or one layer, to the next."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, repeat
from typing import Any

from superscaler.ir.instructions.fields import Move, Role, mover, moving
from superscaler.ir.program import Instruction

# The least number of repetitions of a body that counts as a loop, unless fewer are asked for.
SEEN = 3
# The roles of the fields that may differ between repetitions.
_MOVED = {None, *Role} - {Role.NOTE}


# The microbatch of an instruction or value that is equal in all microbatches.
NONE = -1


@dataclass(frozen=True)
class Loop:
    """A body repeated `count` times. Two repetitions are given; the numbers of the others continue them evenly."""

    first: tuple[Instruction, ...]
    second: tuple[Instruction, ...]
    count: int = 1

    def __len__(self) -> int:
        return len(self.first) * self.count

    def __iter__(self) -> Iterator[Instruction]:
        return (i for at in range(self.count) for i in self.repetition(at))

    def repetition(self, at: int) -> Iterator[Instruction]:
        """Yield the instructions of a repetition, which may be one beyond `count`."""
        return (move(at) for move in self._moves) if at else iter(self.first)

    @cached_property
    def _moves(self) -> list[Move]:
        """Return each instruction as a function of the repetition."""
        pairs = zip(self.first, self.second, strict=True)
        return [moving(pair, _MOVED, lambda _, values: mover(values)) for pair in pairs]


Run = tuple[Instruction, ...] | Loop


@dataclass(frozen=True)
class Rolled(Sequence[Instruction]):
    """A sequence of runs: instructions that run once, and loops."""

    runs: tuple[Run, ...]

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[Instruction]:
        return (i for run in self.runs for i in run)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice) or "expanded" in vars(self):
            return self.expanded[key]
        at = key if 0 <= key < self._length else range(self._length)[key]
        number = bisect_right(self.starts, at) - 1
        run, place = self.runs[number], at - self.starts[number]
        if not isinstance(run, Loop):
            return run[place]
        turn, place = divmod(place, len(run.first))
        return self.repetition(number, turn)[place]

    def repetition(self, number: int, turn: int) -> tuple[Instruction, ...]:
        """Return the instructions of a repetition of the loop that is the run with a number."""
        if (number, turn) not in self._made:
            run = self.runs[number]
            assert isinstance(run, Loop)
            self._made[number, turn] = tuple(run.repetition(turn))
        return self._made[number, turn]

    def spot(self, at: int) -> tuple[Loop, int, int, int] | None:
        """Return the loop of an instruction, the number of that run, the repetition, and the place in it."""
        number = bisect_right(self.starts, at) - 1
        run = self.runs[number]
        return (run, number, *divmod(at - self.starts[number], len(run.first))) if isinstance(run, Loop) else None

    @cached_property
    def starts(self) -> list[int]:
        """The position of the first instruction of each run."""
        return [0, *accumulate(map(len, self.runs))][:-1]

    @cached_property
    def _made(self) -> dict[tuple[int, int], tuple[Instruction, ...]]:
        """The repetitions made so far, by run and number."""
        return {}

    @cached_property
    def expanded(self) -> tuple[Instruction, ...]:
        """Return all instructions."""
        return tuple(self)

    def changed(self, change: Callable[[Instruction], Instruction | None]) -> Rolled:
        """Return the same code with changed instructions; those that become None are left out."""

        def made(some: Iterable[Instruction]) -> tuple[Instruction, ...]:
            return tuple(i for i in map(change, some) if i is not None)

        return Rolled(
            tuple(
                replace(run, first=made(run.first), second=made(run.second)) if isinstance(run, Loop) else made(run)
                for run in self.runs
            )
        )


def kinds_of(code: Sequence[Instruction]) -> Iterator[type]:
    """Yield the kind of each instruction, without making those of loops."""
    for run in runs_of(code):
        yield from [*map(type, run.first)] * run.count if isinstance(run, Loop) else map(type, run)


def weighted(code: Sequence[Instruction]) -> Iterator[tuple[Instruction, int]]:
    """Yield instructions with weights. A weighted sum of their numbers is the sum over all instructions of the code.

    A number is a + k (b - a) in the k-th of n repetitions. The sum is a (n - t) + b t, where t = n (n - 1) / 2.
    """
    for run in runs_of(code):
        if isinstance(run, Loop):
            t = run.count * (run.count - 1) // 2
            yield from zip(run.first, repeat(run.count - t))
            yield from zip(run.second, repeat(t))
        else:
            yield from zip(run, repeat(1))


def runs_of(code: Sequence[Instruction]) -> Sequence[Run]:
    """Return the instructions of a device as its loops and the runs between them."""
    return code.runs if isinstance(code, Rolled) else (tuple(code),)


def loops_of(code: Sequence[Instruction]) -> list[tuple[int, Loop]]:
    """Return the loops of code, each with the place of its first instruction."""
    return (
        [(at, run) for at, run in zip(code.starts, code.runs, strict=True) if isinstance(run, Loop)]
        if isinstance(code, Rolled)
        else []
    )


@dataclass(frozen=True)
class Span:
    """A body of `length` instructions, `count` times in a row from `start` on."""

    start: int
    length: int
    count: int

    @property
    def body(self) -> range:
        return range(self.start, self.start + self.length)

    @property
    def end(self) -> int:
        return self.start + self.length * self.count


def find_spans(forms: Sequence[Hashable], microbatches: Sequence[int], period: int, seen: float = SEEN) -> list[Span]:
    """Return the spans in which a sequence repeats, `seen` times at least, with microbatches `period` later each time.
    NONE stays NONE.
    """
    known: dict[Hashable, int] = {}
    own = [(known.setdefault(f, len(known)), k) for f, k in zip(forms, microbatches, strict=True)]
    moved = [(f, k if k == NONE else k + period) for f, k in own]
    at = {name: n for n, name in enumerate(own) if name[1] != NONE}
    # By lag, the first element that is not repeated so much later, of those that were looked at.
    found, ends, here = list[Span](), dict[int, int](), 0
    while here < len(own):
        lag = at.get(moved[here], 0) - here
        if lag > 0 and ends.get(lag, 0) <= here:
            last = len(own) - lag
            ends[lag] = next((n for n in range(here, last) if own[n + lag] != moved[n]), last)
        if lag > 0 and ends[lag] - here >= (seen - 1) * lag:
            found.append(Span(here, lag, (ends[lag] - here) // lag + 1))
            here = found[-1].end
        else:
            here += 1
    return found


def steady_spans(
    spans: Sequence[Span], forms: Sequence[Hashable], microbatches: Sequence[int], is_work: Sequence[bool]
) -> list[Span]:
    """Return the spans that grow with more microbatches, in order.

    Of overlapping spans, the one with most kinds of work is taken, then the longest: a warm-up or cool-down repeats
    with fewer kinds.
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
