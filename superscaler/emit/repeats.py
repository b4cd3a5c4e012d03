"""Loops over layers: instructions of a device that repeat with other values in the same places."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from superscaler.emit.lists import Instruction, Lists, Run, Waits, free_name
from superscaler.emit.lists import fields as fields_of
from superscaler.groups import collect
from superscaler.ir import program as p
from superscaler.ir.grid import Ints
from superscaler.ir.names import family
from superscaler.ir.program import ONE, ROLES, VALUES, Task, Value

# The variable of loops over layers.
LAYER = "l"
# A part of an instruction that may differ between layers: a value, a run of a list, a task.
Slot = Value | Run | Task


@dataclass(frozen=True, slots=True)
class Line:
    """An instruction as its form, which is equal in all layers, and its slots."""

    kind: type
    form: Hashable
    slots: tuple[Slot, ...]


class Variable(NamedTuple):
    """A variable of a loop: its first value, and its step from each repetition to the next."""

    name: str
    first: int = 0
    step: int = 1

    def number(self, start: int, by: int, *more: tuple[int, str]) -> str:
        """Return the source of a number that starts at `start` and grows `by` so much, with more products to add."""
        step = 1 if by % self.step == 0 else self.step
        factor, turn = by * step // self.step, self.name if step == 1 else f"({self.name} // {step})"
        return sum_of([(factor, turn), *more], start - self.first // step * factor)


@dataclass(frozen=True, slots=True)
class Repeat:
    """A body of `length` instructions that starts at `start` and runs `count` times; then its first `tail` ones run.

    `layer`: its variable, whose step is 1 or -1. `moves`: the step of each slot between two repetitions, in layers for
    values and in places or segments for others.
    """

    start: int
    length: int
    count: int
    tail: int
    layer: Variable = field(default=Variable(LAYER))
    moves: dict[Slot, int] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.length * self.count + self.tail

    @property
    def last(self) -> int:
        """Return the number of the layer of the last repetition."""
        return self.layer.first + self.layer.step * (self.count - (not self.tail))

    @property
    def head(self) -> str:
        """Return the head of the loop."""
        low, high = sorted((self.layer.first, self.last))
        layers = f"range({f'{low}, ' * (low != 0)}{high + 1})"
        return f"for {LAYER} in {layers if self.layer.step > 0 else f'reversed({layers})'}:"

    def number(self, start: int, of: Slot) -> str:
        """Return the source of a number that is `start` in the first repetition and moves as a slot does."""
        return self.layer.number(start, self.moves.get(of, 0))

    def times(self, at: int) -> range:
        """Return the positions of the instructions in the place of instruction `at` of the body."""
        return range(self.start + at, self.end, self.length)


def line(i: Instruction, lists: Lists, place: Hashable) -> Line:
    """Return the form and the slots of an instruction at a place; the data of devices belong to neither."""
    form, slots = list[Hashable]([place]), list[Slot]()
    if isinstance(i, p.Tasked):
        form.append(i.task[1:])
        slots.append(i.task)
    for name, role in ({} if isinstance(i, Waits) else ROLES[type(i)]).items():
        if role is None and name != "function":
            form.append(getattr(i, name))
    form.append(i.shapes if isinstance(i, Waits) else None)
    for role in VALUES:
        for _, some in fields_of(i, role):
            for item in lists.items(some):
                of = item.of if isinstance(item, Run) else item
                sizes = (item.size, lists.size[family(item.of)]) if isinstance(item, Run) else ()
                form.append(of and (of[1:-1], of == ONE, sizes))
                slots += [] if item is None else [item]
    return Line(type(i), (type(i).__name__, *form), tuple(slots))


def repeats_of(
    lines: Sequence[Line], works: Sequence[int], is_cut: Callable[[int], bool], start: int = 0, stop: int | None = None
) -> list[Repeat]:
    """Return the repeats of lines in a range, in order. `works`: the positions of segments; a body has at least one.
    `is_cut`: whether a body may start or end at a position.
    """
    known: dict[Hashable, int] = {}
    form = np.array([known.setdefault(one.form, len(known)) for one in lines], dtype=np.int64)

    def found(low: int, high: int) -> Iterator[Repeat]:
        last, lags = dict[int, int](), set[int]()
        for at in works:
            if low <= at < high:
                lags.add(at - last.get(form[at], at))
                last[form[at]] = at
        runs = (run for lag in lags - {0} for run in _runs(form, lines, low, high, lag))
        cut = (_cut(start, end, lag, is_cut) for start, end, lag in runs)
        best = max(
            (r for r in cut if r is not None), key=lambda r: (r.end - r.start - r.length, -r.start), default=None
        )
        if best is not None:
            yield from found(low, best.start)
            yield best
            yield from found(best.end, high)

    return list(found(start, len(lines) if stop is None else stop))


def _runs(form: Ints, lines: Sequence[Line], low: int, high: int, lag: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranges of over two bodies in which each line moves to its repetition, `lag` later, by equal steps."""
    if high - low <= 2 * lag:
        return
    is_same = form[low : high - lag] == form[low + lag : high]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], is_same.astype(np.int8), [0]))))
    for start, end in (low + edges.reshape(-1, 2)).tolist():
        if end - start <= lag:
            continue
        first = start
        steps = [_step(lines[n], lines[n + lag]) for n in range(start, end)]
        for n in range(start + lag, end):
            if steps[n - start] != steps[n - lag - start]:
                yield first, n + lag, lag
                first = max(first, n - lag + 1)
        yield first, end + lag, lag


def _step(one: Line, other: Line) -> tuple[Hashable, ...]:
    """Return the moves of the slots from a line to another one of the same form."""
    return tuple([(_gap(a, b), _of(a) == _of(b)) for a, b in zip(one.slots, other.slots, strict=True)])


def _gap(one: Slot, other: Slot) -> int:
    """Return the places from a run to another one, or the segments from a task to another one."""
    if isinstance(one, Run) and isinstance(other, Run):
        return other.start - one.start
    return other.segment - one.segment if isinstance(one, Task) and isinstance(other, Task) else 0


def _of(slot: Slot) -> Value | Task:
    return slot.of if isinstance(slot, Run) else slot


def _cut(start: int, end: int, lag: int, is_cut: Callable[[int], bool]) -> Repeat | None:
    """Return the longest repeat in a range with allowed ends; None if it has less than two bodies."""
    start = next((n for n in range(start, end) if is_cut(n)), end)
    end = next((n for n in range(end, start, -1) if is_cut(start + (n - start) % lag)), start)
    count, tail = divmod(end - start, lag)
    return Repeat(start, lag, count, tail) if end - start > 2 * lag else None


@dataclass
class Layers:
    """Families of values and tasks at the same place in different layers.

    `index`: by value or task without its microbatch, its family and the number of its layer.
    """

    index: dict[Value | Task, tuple[int, int]] = field(default_factory=dict)
    _owner: dict[tuple[int, int], Value | Task] = field(default_factory=dict)
    _families: int = 0

    def add(self, repeat: Repeat, lines: Sequence[Line]) -> Repeat | None:
        """Return a repeat with the numbers of its layers; None if its values are in no order by layers."""
        columns = list(self._columns(repeat, lines))
        known = [[self.index[key] for key in keys[:2] if key in self.index] for _, keys in columns]
        starts = [(two[0][1], two[1][1] - two[0][1]) for two in known if len(two) == 2 and two[0][0] == two[1][0]]
        first, step = next((pair for pair in starts if abs(pair[1]) == 1), (0, 1))
        moves, found, index, owner = dict[Slot, int](), self._families, dict(self.index), dict(self._owner)
        for slot, keys in columns:
            if keys[0] == keys[1]:
                pace = 0
            else:
                there = [(n, index[key]) for n, key in enumerate(keys) if key in index]
                pace, (at, (number, layer)) = step, there[0] if there else (0, (found, first))
                found += not there
                if len(there) > 1:
                    pace = (there[1][1][1] - layer) // (there[1][0] - at)
                for n, key in enumerate(keys):
                    place = number, layer + pace * (n - at)
                    if index.setdefault(key, place) != place or owner.setdefault(place, key) != key:
                        return None
            own = _of(slot)
            if isinstance(own, Value) and moves.setdefault(own, pace) != pace:
                return None
        for at in range(repeat.length):
            one, other = (lines[repeat.start + at + n].slots for n in (0, repeat.length))
            for a, b in zip(one, other, strict=True):
                if not isinstance(a, Value) and moves.setdefault(a, _gap(a, b)) != _gap(a, b):
                    return None
        self.index, self._owner, self._families = index, owner, found
        return replace(repeat, layer=Variable(LAYER, first, step), moves=moves)

    def _columns(self, repeat: Repeat, lines: Sequence[Line]) -> Iterator[tuple[Slot, list[Value | Task]]]:
        """Yield each slot of a body with its contents in all repetitions; those of segments come first, then waits."""
        order = sorted(range(repeat.length), key=lambda at: _rank(lines[repeat.start + at]))
        for at in order:
            some = [lines[n].slots for n in repeat.times(at)]
            for column in zip(*some, strict=True):
                if column[0] != ONE:
                    yield column[0], [_first(_of(slot)) for slot in column]

    def names(self, taken: set[str]) -> dict[Value, tuple[Value, int]]:
        """Return the family of each value, as a value, and the number of its layer."""
        members = collect((number, v) for v, (number, _) in self.index.items() if isinstance(v, Value))
        # The names of values in families are not written.
        left = taken - {str(v._replace(microbatch=-1)) for own in members.values() for v in own}
        named = {number: _name(own, left) for number, own in members.items()}
        return {v: (named[n], at) for v, (n, at) in self.index.items() if isinstance(v, Value)}


def _first(key: Value | Task) -> Value | Task:
    """Return a value or a task in the first microbatch."""
    return family(key) if isinstance(key, Value) else key._replace(microbatch=0)


def _rank(one: Line) -> int:
    return 0 if any(isinstance(slot, Task) for slot in one.slots) else 1 if one.kind is Waits else 2


def _name(own: Sequence[Value], taken: set[str]) -> Value:
    """Return a name for a family: the common words of the names of its values."""
    columns = zip(*(v.name.split("_") for v in own), strict=False)
    shared = "_".join(words[0] for words in columns if len({*words}) == 1).strip("_")
    return free_name(
        own[0]._replace(name=shared if shared.isidentifier() else own[0].name, microbatch=-1, number=1), taken
    )


def sum_of(terms: Iterable[tuple[int, str]], number: int) -> str:
    """Return the source of a sum of products and a number."""
    text = ""
    for factor, name in terms:
        if factor:
            product = name if abs(factor) == 1 else f"{abs(factor)} * {name}"
            text += (f" {'-' if factor < 0 else '+'} " if text else "-" * (factor < 0)) + product
    if text.startswith("-") and number > 0:
        return f"{number} - {text[1:]}"
    return f"{text} {'-' if number < 0 else '+'} {abs(number)}" if text and number else text or str(number)


def span(first: str, last: str) -> str:
    """Return the first and the last of the modules of a loop, up to the word in which they differ; '' without one.

    >>> span("h.0.attn", "h.11.attn")
    'h.0 .. h.11'
    """
    words = first.split("."), last.split(".")
    cut = next((n for n, (a, b) in enumerate(zip(*words, strict=False)) if a != b), None)
    return "" if cut is None else " .. ".join(".".join(some[: cut + 1]) for some in words)
