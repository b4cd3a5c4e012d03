"""Loops over microbatches in emitted Python: where a body starts, and which values have an index."""

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, starmap

from superscaler.emit.lists import family, lists_of
from superscaler.ir.codes import NONE, Loop, Rolled, Run
from superscaler.ir.program import ONE, VALUES, Free, Instruction, Recv, Role, Send, Slice, Task, Value, ended, names

# The variable of a loop: the first microbatch of its body.
TURN = "m"
# An instruction on each of the sampled devices of a program.
Row = tuple[Instruction, ...]


@dataclass(frozen=True)
class Section:
    """Instructions that run once, or `count` times: then `later` has them in the second repetition."""

    rows: Sequence[Row]
    later: Sequence[Row] = ()
    count: int = 1

    @cached_property
    def _moves(self) -> set[tuple[Value, Value]]:
        """Return the values of a body, each with its value in the second repetition."""
        pairs = zip(self.rows, self.later, strict=False)
        return {pair for (one, *_), (other, *_) in pairs for pair in zip(_values(one), _values(other), strict=True)}

    @cached_property
    def moving(self) -> set[Value]:
        """Return the values of a body that differ between repetitions."""
        return {a for a, b in self._moves if a != b}

    @cached_property
    def period(self) -> int:
        """Return the microbatches from one repetition to the next, 0 if something else moves in its values."""
        steps = {b.microbatch - a.microbatch for a, b in self._moves if a != b}
        is_plain = all(a._replace(microbatch=b.microbatch) == b for a, b in self._moves)
        fixed = {a for a, b in self._moves if a == b}
        return steps.pop() if len(steps) == 1 and is_plain and not self.moving & fixed else 0

    def made(self) -> Iterator[Value]:
        """Yield the moving values that the body makes, in order."""
        return (v for i, *_ in self.rows for v in names(i, Role.WRITE) if v in self.moving)

    def own(self) -> set[Value]:
        """Return the moving values that are made and freed in one repetition, for its own microbatch."""
        freed = {v for i, *_ in self.rows for v in ended(i)}
        times = Counter(map(family, self.moving))
        return {family(v) for v in self.made() if v in freed and times[family(v)] == 1}


def runs_of(codes: Sequence[Sequence[Instruction]]) -> list[Section]:
    """Return the code of devices that run one program, as sections. Messages that start together stay in one
    repetition.
    """
    runs = [_unparted(code) if isinstance(code, Rolled) else [tuple(code)] for code in codes]
    found = []
    for run, *others in zip(*runs, strict=True):
        some = (run, *others)
        if not isinstance(run, Loop):
            found.append(Section(list(zip(*some, strict=True))))
            continue
        first, second = ([getattr(r, name) for r in some] for name in ("first", "second"))
        loop = Section(list(zip(*first, strict=True)), list(zip(*second, strict=True)), run.count)
        # A loop in which other numbers move than microbatches is written out.
        found.append(loop if loop.period else Section(list(zip(*some, strict=True))))
    return found


def _unparted(code: Rolled) -> list[Run]:
    """Return code whose loops separate no messages that start together; other loops are written out."""
    found: list[Run] = [()]
    for run, after in zip(code.runs, [*code.runs[1:], ()], strict=True):
        before = found[-1]
        if isinstance(run, Loop):
            last, behind = tuple(run.repetition(run.count - 1)), after.first if isinstance(after, Loop) else after
            if not any(starmap(_is_one, ((before, run.first), (run.first, run.second), (last, behind)))):
                found += [run, ()]
                continue
        found[-1] = (*before, *run)
    return found


def _is_one(left: Row, right: Row) -> bool:
    a, b = (next((i for i in some if not isinstance(i, Slice | Free)), None) for some in (left[::-1], right))
    return isinstance(a, Send | Recv) and isinstance(b, Send | Recv) and a.point == b.point


class Spelling:
    """The names of the values of a program in its source.

    A value that moves in a loop has a plain name if it is made and freed in one repetition; otherwise it is in a dict
    by microbatch.
    """

    def __init__(self, runs: Sequence[Section], weights: Container[Value]) -> None:
        self.kept = set[Value]()
        for run in runs:
            self.kept |= set(map(family, run.moving)) - run.own()
        freed = {family(v) for run in runs if run.count > 1 for i, *_ in run.rows for v in ended(i)}
        # By family, the live values of families that only loops make, in the order in which they were made.
        summed = {family(v) for run in runs for i, *_ in run.rows for v in names(i, Role.SUM)}
        self._there: dict[Value, list[int]] = {family: [] for family in self.kept - freed - summed}
        self._moving: set[Value] = set()
        self._first, self._period = 0, 1
        self._lists = lists_of([i for run in runs for i, *_ in run.rows], weights)
        self._size = Counter(of for of, _ in self._lists.values())
        self._known = set[str]()

    @property
    def dicts(self) -> list[str]:
        return sorted(value.spelled("") for value in self.kept)

    def enter(self, loop: Section) -> str:
        """Enter the body of a loop; return its head."""
        self._moving, self._period = loop.moving, loop.period
        self._first = min(value.microbatch for value in self._moving)
        self._known = set()
        made = [(there, v.microbatch) for v in loop.made() if (there := self._there.get(family(v))) is not None]
        for turn in range(loop.count):
            for there, microbatch in made:
                there.append(microbatch + turn * self._period)
        step = f", {self._period}" * (self._period > 1)
        return f"for {TURN} in range({self._first}, {self._first + self._period * loop.count}{step}):"

    def leave(self) -> None:
        self._moving = set()

    def value(self, value: Value) -> str:
        if value == ONE:
            return f"rt.{value}"
        if self.in_list(value):
            name, place = self.list_of(value)
            return f"{name}[{place}]"
        return self._plain(value)

    def in_list(self, value: Value) -> bool:
        return family(value) in self._lists

    def list_of(self, value: Value) -> tuple[str, int]:
        """Return the list of a sum or a weight, and its place there."""
        of, place = self._lists[family(value)]
        return self._plain(of._replace(microbatch=value.microbatch)), place

    def members(self, value: Value) -> list[Value]:
        """Return the values without microbatch in the list of a value, in order."""
        of, _ = self._lists[family(value)]
        places = {place: member for member, (other, place) in self._lists.items() if other == of}
        return [places[n]._replace(microbatch=NONE) for n in range(len(places))]

    @property
    def lists(self) -> list[str]:
        """Return the lines that make the lists of sums of no microbatch."""
        return [
            f"{of} = rt.sums({size})" for of, size in self._size.items() if of.is_gradient and of.microbatch == NONE
        ]

    def declared(self, i: Instruction) -> Iterator[str]:
        """Yield the lines that make the lists of sums of a microbatch, before the first instruction that adds to
        them.
        """
        for value in names(i, Role.SUM):
            name, _ = self.list_of(value)
            if value.microbatch != NONE and name not in self._known:
                self._known.add(name)
                yield f"{name} = rt.sums(1)"

    def _size_of(self, value: Value | None) -> int:
        return 0 if value is None else self._size[self._lists[family(value)][0]]

    def into(self, values: Sequence[Value | None]) -> str:
        """Return the source of the lists of sums, by the number of the first value that is added there."""
        found = dict[str, int]()
        for n, value in enumerate(values):
            if value is not None:
                name, place = self.list_of(value)
                found.setdefault(name, n - place)
        return ", ".join(f"{n}: {name}" for name, n in found.items())

    def _plain(self, value: Value) -> str:
        is_moving = value in self._moving
        if value.microbatch == NONE or not (is_moving or family(value) in self.kept):
            return str(value)
        name = value.spelled("")
        if family(value) not in self.kept:
            return name
        return f"{name}[{self.number(value.microbatch, self._period) if is_moving else value.microbatch}]"

    def task(self, task: Task, later: Task) -> str:
        if later == task:
            return f'"{task}"'
        return f'f"{task.spelled(f"{{{self.number(task.microbatch, self._period)}}}")}"'

    def number(self, start: int, step: int) -> str:
        """Return the source of a number that is `start` in the first repetition and grows by `step`."""
        period = 1 if step % self._period == 0 else self._period
        factor = step * period // self._period
        start -= self._first // period * factor
        turn = (f"{factor} * " if factor > 1 else "") + (f"({TURN} // {period})" if period > 1 else TURN)
        return turn + (f" {'-' if start < 0 else '+'} {abs(start)}" if start else "")

    def note_effects(self, i: Instruction) -> None:
        """Record the values that an instruction outside of loops makes and frees."""
        for value in names(i, Role.WRITE):
            if value.microbatch != NONE and family(value) in self._there:
                self._there[family(value)].append(value.microbatch)
        for value in ended(i):
            if value.microbatch != NONE and family(value) in self._there:
                self._there[family(value)].remove(value.microbatch)

    def tuple_items(self, values: Sequence[Value | None], gap: str = "None") -> list[str]:
        """Return the sources of values in order. All values of a dict, in its order, are written as one."""
        found = []
        for key, some in groupby(values, self._group):
            own = list(some)
            if isinstance(key, str) and [self.list_of(v)[1] for v in own if v] == [*range(self._size_of(own[0]))]:
                found.append(f"*{key}")
                continue
            numbers = [NONE if v is None else v.microbatch for v in own]
            if own[0] is not None and NONE not in numbers and numbers == self._there.get(family(own[0])):
                found.append(f"*{own[0].spelled('')}.values()")
            else:
                found += [gap if v is None else self.value(v) for v in own]
        return found

    def ended(self, values: Sequence[Value]) -> list[str]:
        """Return the sources of values that end together; lists as such."""
        others = [v for v in values if not self.in_list(v)]
        lists = (self.list_of(v)[0] for v in values if self.in_list(v))
        return [*self.tuple_items(others), *dict.fromkeys(lists)]

    def _group(self, value: Value | None) -> Value | str | None:
        if value is None or not self.in_list(value):
            return None if value is None else family(value)
        return self.list_of(value)[0]


def _values(i: Instruction) -> tuple[Value, ...]:
    return tuple(value for role in VALUES for value in names(i, role))
