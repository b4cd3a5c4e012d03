"""Loops over microbatches in emitted Python: the start of a body, and its moving values."""

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap

from superscaler.emit.lists import Instruction, Makers, Row, names, tidied, values_of
from superscaler.ir import program as p
from superscaler.ir.communication import batches
from superscaler.ir.loops import NONE, SEEN, Loop, Rolled, Run, Span, find_spans
from superscaler.ir.names import family
from superscaler.ir.program import Role, Value


@dataclass(frozen=True)
class Section:
    """A run of instructions that run once, or `count` times: then `later` has them in the second repetition."""

    rows: Sequence[Row]
    later: Sequence[Row] = ()
    count: int = 1

    @cached_property
    def _moves(self) -> set[tuple[Value, Value]]:
        """Return the values of a body, each with its value in the second repetition."""
        pairs = zip(self.rows, self.later, strict=False)
        return {pair for (one, *_), (other, *_) in pairs for pair in zip(values_of(one), values_of(other), strict=True)}

    @cached_property
    def moving(self) -> set[Value]:
        """Return the values of a body that differ between repetitions."""
        return {a for a, b in self._moves if a != b}

    @cached_property
    def period(self) -> int:
        """Return the microbatches from one repetition to the next, 0 if other numbers of its values move."""
        steps = {b.microbatch - a.microbatch for a, b in self._moves if a != b}
        is_plain = all(a._replace(microbatch=b.microbatch) == b for a, b in self._moves)
        fixed = {a for a, b in self._moves if a == b}
        return steps.pop() if len(steps) == 1 and is_plain and not self.moving & fixed else 0

    def tidied(self, at_rest: Container[Value], makers: Makers) -> "Section":
        """Return the section with rows in the form in which they are written; see `lists.tidied`."""
        both = [(*now, *later) for now, later in zip(self.rows, self.later or self.rows, strict=True)]
        # In a loop, values of earlier repetitions take the place of those that were made before it.
        rows = tidied(both, at_rest, makers if self.count == 1 else {})
        cut = len(self.rows[0]) if self.rows else 0
        return Section([row[:cut] for row in rows], [row[cut:] for row in rows] if self.later else (), self.count)

    def changed(self, change: Callable[[Instruction], Instruction]) -> "Section":
        """Return the section with other instructions."""
        rows, later = ([tuple(map(change, row)) for row in some] for some in (self.rows, self.later))
        return Section(rows, later, self.count)

    def made(self) -> Iterator[Value]:
        """Yield the moving values that the body makes, in order."""
        return (v for i, *_ in self.rows for v in names(i, Role.WRITE) if v in self.moving)

    def kept(self) -> list[Value]:
        """Return the moving values that are not made and freed in one repetition, for its own microbatch."""
        freed = {v for i, *_ in self.rows for v in names(i, Role.END)}
        times = Counter(map(family, self.moving))
        given = self._given()
        own = {family(v) for v in self.made() if v in freed and times[family(v)] == 1 and v not in given}
        return [v for v in self.moving if family(v) not in own]

    def _given(self) -> set[Value]:
        """Return the values that a repetition reads before it makes them, as a sum that it adds to in place."""
        made, found = set[Value](), set[Value]()
        for i, *_ in self.rows:
            found.update(v for role in (Role.READ, Role.LAST) for v in names(i, role) if v not in made)
            made.update(names(i, Role.WRITE))
        return found


def runs_of(codes: Sequence[Sequence[p.Instruction]]) -> list[Section]:
    """Return the code of devices that run one program, as sections. Messages that start together stay in one
    repetition.
    """
    rolled = [code if isinstance(code, Rolled) else Rolled((tuple(code),)) for code in codes]
    runs = [_unparted(code) for code in _looped(rolled)]
    found = []
    for run, *others in zip(*runs, strict=True):
        some = (run, *others)
        if not isinstance(run, Loop):
            found.append(Section(list(zip(*some, strict=True))))
            continue
        first, second = ([getattr(r, name) for r in some] for name in ("first", "second"))
        loop = Section(list(zip(*first, strict=True)), list(zip(*second, strict=True)), run.count)
        # Only loops whose sole moving number is the microbatch stay loops.
        found.append(loop if loop.period else Section(list(zip(*some, strict=True))))
    return found


def _looped(codes: Sequence[Rolled]) -> list[Rolled]:
    """Return code in which a run beside its loops, as a warm-up, has loops where it repeats by microbatch."""
    found = [list[Run]() for _ in codes]
    for runs in zip(*(code.runs for code in codes), strict=True):
        here = 0
        for span in () if isinstance(runs[0], Loop) else _spans(runs[0]):
            loops = [loop for run in runs if (loop := _loop(tuple(run[span.start : span.end]), span)) is not None]
            if len(loops) == len(runs):
                for own, run, loop in zip(found, runs, loops, strict=True):
                    own += [tuple(run[here : span.start]), loop]
                here = span.end
        for own, run in zip(found, runs, strict=True):
            own.append(run if isinstance(run, Loop) else run[here:])
    return [Rolled(tuple(own)) for own in found]


def _spans(code: Sequence[p.Instruction]) -> Iterator[Span]:
    """Yield where code seems to repeat with the next microbatch each time, by the names of its values."""
    forms, first = list[Hashable](), list[int]()
    for i in code:
        values, task = values_of(i), () if i.task is None else (i.task,)
        forms.append((type(i), *(of._replace(microbatch=0) for of in task), *map(family, values)))
        first.append(next((of.microbatch for of in (*task, *values) if of.microbatch != NONE), NONE))
    inside = {n for a, b in batches(code).items() for n in range(a + 1, b + 1)}
    for span in find_spans(forms, first, 1):
        start = next((n for n in span.body if n not in inside), span.end)
        count = (span.end - start) // span.length
        if count >= SEEN:
            yield Span(start, span.length, count)


def _loop(code: tuple[p.Instruction, ...], span: Span) -> Loop | None:
    """Return a loop that is the code of a span, None if its numbers do not move evenly."""
    loop = Loop(code[: span.length], code[span.length : 2 * span.length], span.count)
    try:
        return loop if tuple(loop) == code else None
    except ValueError:
        # Tuples of numbers have different lengths.
        return None


def _unparted(code: Rolled) -> list[Run]:
    """Return code whose loops separate no messages that start together; other loops are written out."""
    found: list[Run] = [()]
    for run, after in zip(code.runs, [*code.runs[1:], ()], strict=True):
        before = found[-1]
        if isinstance(run, Loop):
            last, behind = _end(run), after.first if isinstance(after, Loop) else after
            if not any(starmap(_is_one, ((before, run.first), (run.first, run.second), (last, behind)))):
                found += [run, ()]
                continue
        found[-1] = (*before, *run)
    return found


def _end(loop: Loop) -> tuple[Instruction, ...]:
    """Return the end of the last repetition, from the instruction on that may start a message."""
    at = next((n for n, i in reversed([*enumerate(loop.first)]) if not i.is_between), 0)
    return tuple(Loop(loop.first[at:], loop.second[at:]).repetition(loop.count - 1))


def _is_one(left: Sequence[Instruction], right: Sequence[Instruction]) -> bool:
    a, b = (next((i for i in some if not i.is_between), None) for some in (left[::-1], right))
    return a is not None and b is not None and a.point == b.point >= 0
