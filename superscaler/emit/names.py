"""Names of values in the source of a program.

A value that lives alone in its family has a plain name, which later values take over; the others are in a dict, by
microbatch, by layer, or by both. A value in a list is named by its place there.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from math import inf

from superscaler.emit.lists import Instruction, Item, Lists, Run, names
from superscaler.emit.loops import Section
from superscaler.emit.repeats import Repeat, Variable
from superscaler.groups import collect
from superscaler.ir.loops import NONE
from superscaler.ir.names import family
from superscaler.ir.program import ONE, Role, Task, Value

# The variable of loops over microbatches: the first one of a body.
TURN = "m"
_NO_LOOP = Repeat(0, 0, 0, 0)
# The row that makes a value, and the last row before it ends.
Life = tuple[float, float]


class Spelling:
    """The names of the values of a program, in the current loops. `declared`: by section and row, the lists that the
    row is the first to write to.
    """

    def __init__(
        self,
        runs: Sequence[Section],
        lists: Lists,
        layers: Mapping[Value, tuple[Value, int]],
        declared: Sequence[Mapping[int, Sequence[Value]]],
    ) -> None:
        self.lists, self.layers = lists, layers
        self._first_lists = set(self._find_first(runs, declared))
        # The dicts that are used.
        self.dicts = set[str]()
        self._moving, self._turn, self._repeat = set[Value](), Variable(TURN), _NO_LOOP
        # The names and keys of values in the current loops.
        self._known = dict[Value, tuple[str, list[str]]]()
        self._kept = {self._base(lists.owner(v)) for run in runs for v in run.kept()}
        freed = {family(v) for run in runs if run.count > 1 for i, *_ in run.rows for v in names(i, Role.END)}
        # By family, the live values of families that only loops make, in the order in which they were made.
        self._there: dict[Value, list[int]] = {
            v: [] for v in self._kept - freed - {family(lists.owner(v)) for v in lists.places} - {*layers}
        }
        self._lives = self._find_lives(runs)
        self._keyed = self._crowded()
        self._shared = self._find_shared(runs)

    def _base(self, value: Value) -> Value:
        """Return a value without its microbatch and layer."""
        return family(self.layers.get(family(value), (value, 0))[0])

    # Lives.

    def is_first(self, value: Value) -> bool:
        """Return whether a value is a list that is made at the start of the program."""
        return value in self._first_lists

    def _find_first(
        self, runs: Sequence[Section], declared: Sequence[Mapping[int, Sequence[Value]]]
    ) -> Iterator[Value]:
        """Yield the lists that are made at the start of the program: those of no layer, and those that a loop over
        microbatches would make again in each repetition.
        """
        for run, by_row in zip(runs, declared, strict=True):
            for value in (v for some in by_row.values() for v in some if v.microbatch == NONE):
                if family(value) not in self.layers or run.count > 1:
                    yield value

    def dict_by_layer(self, value: Value) -> str:
        """Return the dict by layer of a list that is made at the start; "" if it is in none."""
        is_keyed = family(value) in self.layers and self._base(value) in self._keyed
        return self._dict(value)[0] if is_keyed else ""

    def _find_lives(self, runs: Sequence[Section]) -> dict[Value, Life]:
        """Return when each value is made and ends, in rows of the code with one repetition of each loop over
        microbatches.
        """
        born, ends = dict[Value, float](), dict[Value, float]()
        for at, (i, *_) in enumerate(row for run in runs for row in run.rows):
            # Weights at rest are read, and made by no row.
            for v in map(self.lists.owner, names(i, Role.READ)):
                if v.microbatch == NONE and not (v.is_gradient or v.is_handle):
                    born.setdefault(v, -1)
            for v in map(self.lists.owner, (*names(i, Role.WRITE), *names(i, Role.SUM))):
                # A list that is filled in places is made before the row, which still reads what ends in it.
                born.setdefault(v, -1 if self.is_first(v) else at - 0.5 * (v in self.lists.filled))
            for v in map(self.lists.owner, names(i, Role.END)):
                # What a Free ends was alive until the row before, or after that if that row made it.
                ends[v] = at if names(i, Role.READ) else max(at - 1, born.get(v, 0) + 0.5)
        return {v: (start, ends.get(v, inf)) for v, start in born.items()}

    def _crowded(self) -> set[Value]:
        """Return the families of layers with several live values at a time, and those that are kept by microbatch."""
        layered = ((value, life) for value, life in self._lives.items() if family(value) in self.layers)
        lives = collect(((self._base(value), value.microbatch), life) for value, life in layered)
        return self._kept | {of for (of, _), some in lives.items() if not is_apart(some)}

    def _find_shared(self, runs: Sequence[Section]) -> dict[str, str]:
        """Return the names to replace, each with the name that it takes over: that of a value which ends as the new one
        is made. Both are of the same tensor, or of one loop over layers.
        """
        made: dict[float, list[tuple[str, Value]]] = {}
        over: dict[float, list[tuple[str, Value]]] = {}
        lives: dict[str, list[Life]] = {}
        plain: dict[str, Value] = {}
        moving = {v for run in runs if run.count > 1 for v in map(self.lists.owner, run.moving)}
        for value, (start, end) in self._lives.items():
            self._moving = {value} & moving
            name, keys = self._dict(value)
            if not keys:
                made.setdefault(start, []).append((name, value))
                over.setdefault(end, []).append((name, value))
                lives.setdefault(name, []).append((start, end))
                plain.setdefault(name, value)
        self._moving = set()
        groups = {name: [name] for name in lives}
        for is_close in (True, False):
            for at in sorted(made.keys() & over.keys()):
                for name, value in made[at]:
                    for other, ended in over[at]:
                        a, b = groups[name], groups[other]
                        if a is b or not (_is_alike(value, ended) if is_close else self._is_layered(value, ended)):
                            continue
                        if is_apart([life for n in (*a, *b) for life in lives[n]]):
                            both = [*b, *a]
                            groups |= dict.fromkeys(both, both)
        order = {n: (plain[n].is_handle, plain[n].number, n[-1] == "_", some[0], n) for n, some in lives.items()}
        return {name: min(group, key=order.__getitem__) for name, group in groups.items() if len(group) > 1}

    def _is_layered(self, *values: Value) -> bool:
        """Return whether values are plain tensors of layers."""
        plain = (family(v) in self.layers and not v.is_handle and family(v) not in self.lists.size for v in values)
        return all(plain) and len({v.microbatch for v in values}) == 1

    # Loops.

    def enter(self, loop: Section) -> str:
        """Enter the body of a loop over microbatches; return its head."""
        self._known.clear()
        self._moving, period = {*map(self.lists.owner, loop.moving)}, loop.period
        self._turn = Variable(TURN, first := min(value.microbatch for value in self._moving), period)
        made = [(there, v.microbatch) for v in loop.made() if (there := self._there.get(family(v))) is not None]
        for turn in range(loop.count):
            for there, microbatch in made:
                there.append(microbatch + turn * period)
        step = f", {period}" * (period > 1)
        return f"for {TURN} in range({first}, {first + period * loop.count}{step}):"

    def leave(self) -> None:
        self._known.clear()
        self._moving, self._turn = set(), Variable(TURN)

    def enter_layers(self, repeat: Repeat) -> str:
        """Enter the body of a loop over layers; return its head."""
        self._repeat = repeat
        self._known.clear()
        return repeat.head

    @property
    def direction(self) -> int:
        """Return 1 if the current loop goes up through the layers, -1 if it goes down."""
        return self._repeat.layer.step

    def leave_layers(self) -> None:
        self._repeat = _NO_LOOP
        self._known.clear()

    @property
    def is_keeping(self) -> bool:
        """Return whether the order of any values is recorded."""
        return bool(self._there)

    def note_effects(self, i: Instruction) -> None:
        """Record the values that an instruction outside of loops over microbatches makes and frees."""
        for value in names(i, Role.WRITE):
            if value.microbatch != NONE and family(value) in self._there:
                self._there[family(value)].append(value.microbatch)
        for value in names(i, Role.END):
            if value.microbatch != NONE and family(value) in self._there:
                self._there[family(value)].remove(value.microbatch)

    # Numbers.

    def entry(self, start: int, layers: int, is_turning: bool) -> str:
        """Return the source of the number of a table entry. From `start` on there is one for each of `layers`, by their
        numbers, and again for each repetition by microbatches.
        """
        of = self._repeat.layer
        if layers > 1:
            start -= min(of.first, of.first + of.step * (layers - 1))
        return self._turn.number(start, layers * is_turning, (int(layers > 1), of.name))

    def task(self, task: Task, later: Task) -> str:
        by_layer = self._repeat.moves.get(task, 0)
        segment = f"{{{self._repeat.number(task.segment, task)}}}" if by_layer else str(task.segment)
        turn = f"{{{self._turn.number(task.microbatch, self._turn.step)}}}" if later != task else str(task.microbatch)
        is_moving = by_layer or later != task
        return f'{"f" * bool(is_moving)}"s{segment}{task.spelled(turn).removeprefix(f"s{task.segment}")}"'

    # Names.

    def _dict(self, value: Value) -> tuple[str, list[str]]:
        """Return the name of a value or a list without a key; or that of its dict, with its key."""
        base = self._base(value)
        is_moving, is_kept = value in self._moving, base in self._kept
        keys = list[str]()
        if value.microbatch != NONE and is_kept:
            keys.append(self._turn.number(value.microbatch, self._turn.step) if is_moving else str(value.microbatch))
        of = value
        if family(value) in self.layers:
            of, layer = self.layers[family(value)]
            of = of._replace(microbatch=value.microbatch)
            if base in self._keyed:
                keys.append(self._repeat.number(layer, value))
        return of.spelled("") if value.microbatch != NONE and (is_moving or is_kept) else str(of), keys

    def variable(self, value: Value, is_popped: bool = False) -> str:
        """Return the source of a list, or of a value in no list. `is_popped`: it is removed from its dict."""
        if value not in self._known:
            self._known[value] = self._dict(value)
        name, keys = self._known[value]
        if not keys:
            return self._shared.get(name, name)
        self.dicts.add(name)
        key = ", ".join(keys)
        return f"{name}.pop({f'({key})' if len(keys) > 1 else key})" if is_popped else f"{name}[{key}]"

    def place(self, run: Run, after: int = 0) -> str:
        """Return the source of the place of a run in its list, or of a place behind that."""
        return self._repeat.number(run.start + after, run)

    def is_whole(self, run: Run) -> bool:
        return run.size == self.lists.size[family(run.of)]

    def item(self, item: Value | Run, is_popped: bool = False) -> str:
        if item == ONE:
            return f"rt.{item}"
        if isinstance(item, Value):
            return self.variable(item, is_popped)
        name = self.variable(item.of, is_popped)
        if item.size == 1:
            return f"{name}[{self.place(item)}]"
        if self.is_whole(item):
            return f"*{name}"
        start, stop = self.place(item), self.place(item, item.size)
        return f"*{name}[{start}{':' if start.isdigit() else ' : '}{stop}]"

    def value(self, value: Value) -> str:
        return self.item(self.lists.items([value])[0] or value)

    def read(self, values: Iterable[Value | None], is_popped: bool = False) -> list[str]:
        """Return the expressions that read values, in order. All values of a dict, in its order, are `*d.values()`."""
        found = []
        for of, some in groupby(self.lists.items(values), self._group):
            own = list(some)
            if (
                of is not None
                and len(own) > 1
                and [v.microbatch for v in own if isinstance(v, Value)] == self._there[of]
            ):
                found.append(f"*{of.spelled('')}.values()")
            else:
                found += ["None" if item is None else self.item(item, is_popped) for item in own]
        return found

    def _group(self, item: Item) -> Value | None:
        of = family(item) if isinstance(item, Value) else None
        return of if of in self._there and isinstance(item, Value) and item.microbatch != NONE else None

    def made(self, items: Iterable[Item]) -> list[str]:
        """Return the targets of new values, in order; only one target can be several values."""
        found = list[str]()
        for item in items:
            if isinstance(item, Run) and item.size > 1 and any(name[0] == "*" for name in found):
                found += [f"{self.variable(item.of)}[{self.place(item, n)}]" for n in range(item.size)]
            else:
                found.append("_" if item is None else self.item(item))
        return found

    def ended(self, owners: Sequence[Value]) -> list[str]:
        """Return the sources of lists and other values that end together."""
        lists = [v for v in owners if family(v) in self.lists.size]
        return [*self.read(v for v in owners if v not in lists), *map(self.variable, lists)]


def _is_alike(one: Value, other: Value) -> bool:
    """Return whether values are of one tensor, or of tensors that differ in numbers only."""
    return one.is_gradient == other.is_gradient and one.microbatch == other.microbatch and _stem(one) == _stem(other)


def _stem(value: Value) -> str:
    return re.sub(r"[_\d]+$", "", value.name)


def is_apart(lives: Iterable[Life]) -> bool:
    """Return whether no two lives overlap; one may start in the row in which another ends."""
    return all(end <= start for (_, end), (start, _) in pairwise(sorted(lives)))
