"""Equal blocks inside a segment: the lines that repeat with other weights and values, and the names of these values.

for l in range(12):
    weight, bias = weights[2 * l : 2 * l + 2]
    linear = F.linear(relu, weight, bias)
    del relu
    relu = torch.relu(linear)
"""

import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from superscaler.emit.lists import Run
from superscaler.emit.names import is_apart
from superscaler.emit.repeats import Layers, Line, Repeat, Slot, repeats_of
from superscaler.groups import collect, group_by
from superscaler.ir.model import Op
from superscaler.ir.program import Value

# What is at a place in all blocks, and the number of the block if they live at a time.
Place = tuple[Hashable, int]


class Row(NamedTuple):
    """A line of a segment: its op, its source with a name for each slot, and the slots; then the values it makes.

    `is_unread`: only its backward is needed.
    """

    op: Op
    text: str
    slots: tuple[Value | Run, ...]
    made: tuple[Value, ...]
    flags: Hashable
    is_unread: bool = False

    @property
    def line(self) -> Line:
        form = self.text, starred(self.op.module), len(self.made), self.flags, self.is_unread
        return Line(Op, form, (*self.slots, *self.made))

    @property
    def reads(self) -> list[Value]:
        return [slot for slot in self.slots if isinstance(slot, Value)]


def parameter(number: int) -> Value:
    """Return the value of an input of a segment."""
    return Value(f"#{number}", microbatch=0)


def starred(module: str) -> str:
    return re.sub(r"\b\d+\b", "*", module)


class Blocks:
    """The loops of a segment, and the places of its values. `ends`: the row after which a value is not needed."""

    def __init__(
        self, rows: Sequence[Row], parameters: Sequence[Value], results: Sequence[Value], ends: Mapping[Value, int]
    ) -> None:
        self.rows, self.results, self._ends = rows, results, ends
        self.lines = [row.line for row in rows]
        self._made = {**dict.fromkeys(parameters, -1), **{v: n for n, row in enumerate(rows) for v in row.made}}
        self._read = {v: n for n, row in enumerate(rows) for v in row.reads} | dict.fromkeys(results, len(rows))
        candidates = list(_candidates(self.lines, [row.op.module for row in rows], 1, 0, len(rows)))
        while True:
            self._enter(candidates)
            wrong = self._wrong() if candidates else None
            if wrong is None:
                break
            candidates = [one for one in candidates if one.start != wrong]

    def _enter(self, candidates: Iterable[Repeat]) -> None:
        """Accept candidates as loops."""
        layers = Layers()
        found = [layers.add(one, self.lines) for one in candidates]
        self.repeats = {one.start: one for one in found if one is not None}
        self._index = layers.index
        self._loops = {n: one for one in self.repeats.values() for n in range(one.start, one.end)}
        members = collect((family, v) for v, (family, _) in self._index.items() if isinstance(v, Value))
        # The inputs that differ by block.
        self.own = {v for some in members.values() if all(self._made.get(v) == -1 for v in some) for v in some}
        kept = {n: some for n, some in members.items() if not self.own.issuperset(some)}
        lives = {n: [(self._made[v], self._read.get(v, self._made[v])) for v in some] for n, some in kept.items()}
        self._crowded = {n for n, some in lives.items() if not is_apart(some)}
        self._places = group_by(self._made, self.place)
        # By loop: where each value of the second repetition is there.
        self._second: dict[int, dict[Value, tuple[int, int]]] = {
            one.start: {
                v: (at, k)
                for at in range(one.length)
                for k, v in enumerate(self.lines[one.start + one.length + at].slots)
                if isinstance(v, Value)
            }
            for one in self.repeats.values()
        }
        self._moving = {
            one.start: {self._index[v][0] for v, pace in one.moves.items() if isinstance(v, Value) and pace}
            for one in self.repeats.values()
        }
        self._find_deleted()

    def place(self, value: Value) -> Place:
        family, layer = self._index.get(value, (value, 0))
        return family, layer if family in self._crowded else 0

    def is_kept(self, value: Value) -> bool:
        """Return whether several values at the place of this one live at a time, with the block's number as key."""
        return value in self._index and self._index[value][0] in self._crowded

    def number(self, value: Value, repeat: Repeat | None) -> str:
        """Return the source of the number of the block of a value, in the first repetition of a loop or outside."""
        layer = self._index[value][1]
        return repeat.number(layer, value) if repeat else str(layer)

    def at(self, repeat: Repeat, value: Value, turn: int) -> Value:
        """Return the value of a repetition at the place of a value of the second one."""
        at, k = self._second[repeat.start][value]
        found = self.lines[repeat.start + turn * repeat.length + at].slots[k]
        assert isinstance(found, Value)
        return found

    def inputs(self, repeat: Repeat) -> list[tuple[int, int]]:
        """Return the numbers of the inputs that differ by block, in the first block, each with its step."""
        pairs = dict[Slot, Slot]()
        for at in range(repeat.length):
            a, b = (self.lines[repeat.start + at + n].slots for n in (0, repeat.length))
            pairs |= {v: w for v, w in zip(a, b, strict=True) if v in self.own and v != w}
        return sorted((_number(v), _number(w) - _number(v)) for v, w in pairs.items())

    # The ends of values.

    def _find_deleted(self) -> None:
        """Find the values that end after each row: in loops those of the second repetition, and those of the last one
        alone; and after each loop.
        """
        self.deleted: dict[int, list[Value]] = {}
        self.last: dict[int, list[Value]] = {}
        self.after: dict[int, list[Value]] = {}
        ends = {value: self._end(value) for value in self._ends}
        for value, end in ends.items():
            there = self._loops.get(end)
            if any(self._made[value] < self._made[v] <= end for v in self._places[self.place(value)] if v != value):
                continue
            if there is None:
                self.deleted.setdefault(end, []).append(value)
            elif (own := self._index.get(value, (None,))[0]) in self._moving[there.start]:
                turn = (end - there.start) // there.length
                if turn == 1 and value in self._second[there.start]:
                    self.deleted.setdefault(end, []).append(value)
                elif turn == there.count - 1 and own not in self._ended_by_turn(there, ends):
                    # All of the family share the memory of the last one.
                    self._end_in(there, end).append(value)
            else:
                self._end_in(there, end).append(value)

    def _end(self, value: Value) -> int:
        """Return the row after which a value is not needed. Of values that are kept by others of their memory alone, it
        is in their own repetition: where it is in the last one.
        """
        end, here = self._ends[value], self._loops.get(self._made[value])
        if here is None or not self._read.get(value, 0) < (last := self._last(here, self._made[value])) + 1 <= end:
            return end
        moved = last - (here.end - 1 - end)
        return moved if self._loops.get(end) is here and self._read.get(value, 0) <= moved else last

    def _end_in(self, repeat: Repeat, end: int) -> list[Value]:
        """Return the values that end after a row of the last repetition of a loop."""
        return self.after.setdefault(repeat.start, []) if end == repeat.end - 1 else self.last.setdefault(end, [])

    def _ended_by_turn(self, repeat: Repeat, ends: Mapping[Value, int]) -> set[int]:
        """Return the families whose value of a repetition ends in that repetition."""
        found = ((v, ends[v] - repeat.start) for v in self._second[repeat.start] if v in ends)
        return {self._index[v][0] for v, row in found if row // repeat.length == 1 and v in self._index}

    def _last(self, repeat: Repeat, row: int) -> int:
        """Return the last row of the repetition that has this row."""
        return row + repeat.length - 1 - (row - repeat.start) % repeat.length

    # What is written does the same.

    def _wrong(self) -> int | None:
        """Return the start of a loop that differs from its blocks, None if there is none."""
        for one in self.repeats.values():
            if self._is_uneven(one):
                return one.start
        for v, n in self._made.items():
            if n == -1 and v not in self.own and self.is_kept(v):
                return self._blamed(v, None)
        holds = {self.place(v): v for v, n in self._made.items() if n == -1 and v not in self.own}
        ended = group_by(self._ends, self._ends.__getitem__)
        for n, row in enumerate(self.rows):
            repeat, gone = self._loops.get(n), self.deleted.get(n, [])
            if repeat is not None:
                turn, at = divmod(n - repeat.start, repeat.length)
                gone = [self.at(repeat, v, turn) for v in self.deleted.get(repeat.start + repeat.length + at, [])]
                gone += self.last.get(n, [])
            for v in row.reads:
                if repeat is None if v in self.own else holds.get(self.place(v)) != v:
                    return self._blamed(v, repeat)
            holds |= {self.place(v): v for v in row.made}
            if repeat is not None and n == repeat.end - 1:
                gone = [*gone, *self.after.get(repeat.start, [])]
            for v in gone:
                if holds.pop(self.place(v), None) != v:
                    return self._blamed(v, repeat)
            for v in ended.get(n, ()):
                if holds.get(self.place(v)) == v:
                    return self._blamed(v, repeat)
        return next((self._blamed(v, None) for v in self.results if holds.get(self.place(v)) != v), None)

    def _is_uneven(self, repeat: Repeat) -> bool:
        """Return whether the numbers of an input grow unevenly from block to block; a loop needs equal steps."""
        for at in range(repeat.length):
            for some in zip(*(self.lines[n].slots for n in repeat.times(at)), strict=True):
                numbers = [_number(v) for v in some if v in self.own]
                if numbers and len({b - a for a, b in pairwise(numbers)} | {0}) != 2:
                    return True
        return False

    def _blamed(self, value: Value, repeat: Repeat | None) -> int:
        """Return the start of the loop of a row, or of one that makes or reads a value."""
        near = (one for one in self.repeats.values() if value in self._second[one.start] or value in one.moves)
        return (repeat or self._loops.get(self._made[value]) or next(near, [*self.repeats.values()][-1])).start


def _number(value: Slot) -> int:
    assert isinstance(value, Value)
    return int(value.name[1:])


def _candidates(lines: Sequence[Line], modules: Sequence[str], depth: int, start: int, stop: int) -> Iterator[Repeat]:
    """Yield where a range of lines repeats at least three times: blocks of modules with so many numbers, or more."""
    blocks = [_block(modules[n], depth) for n in range(start, stop)]
    cuts = {start + n for n in range(len(blocks)) if n == 0 or blocks[n] != blocks[n - 1]} | {stop}
    if not any(blocks):
        if depth > 1:
            return
        cuts = set(range(start, stop + 1))
    works = sorted(cuts - {stop})
    found = [replace(one, tail=0) for one in repeats_of(lines, works, cuts.__contains__, start, stop) if one.count > 2]
    for one in found:
        yield from _candidates(lines, modules, depth + 1, start, one.start)
        yield one
        start = one.end
    yield from _candidates(lines, modules, depth + 1, start, stop)


def _block(module: str, depth: int) -> str:
    """Return a module up to its `depth`-th number, '' if it has less.

    >>> _block("layers.0.blocks.1.attn", 2)
    'layers.0.blocks.1'
    """
    words = module.split(".")
    numbers = [n for n, word in enumerate(words) if word.isdigit()]
    return ".".join(words[: numbers[depth - 1] + 1]) if len(numbers) >= depth else ""
