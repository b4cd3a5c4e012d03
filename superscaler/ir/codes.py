"""Code stored once for many devices or microbatches: cohorts of devices, and loops over microbatches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate, zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superscaler.errors import ScheduleError
from superscaler.ir.fold import Fold, Folded, evenly
from superscaler.ir.grid import Ints
from superscaler.ir.program import FIELDS, ROLES, Device, Instruction, Program, Recv, Role, Send, Value, Weight

_COMMUNICATION = (Role.GROUP, Role.PEER)


@dataclass(eq=False)
class Cohort:
    """A class of devices that run one program.

    `samples`: all of its devices, or, in a folded program, those at place 0 and at place 1 of each axis; `places`
    [devices, axes] then has the place of each device.
    """

    number: int
    devices: Ints
    samples: Sequence[Device]
    places: Ints | None = None
    fold: Fold | None = None

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def code(self) -> Sequence[Instruction]:
        return self.samples[0].instructions

    @property
    def weights(self) -> Sequence[Weight]:
        return self.samples[0].weights

    def data(self, at: int, field: str) -> NDArray[Any]:
        """Return a field of instruction `at` that may differ between devices, as an array with a row per device."""
        role = ROLES[type(self.code[at])][field]
        # Of a fold, the first sample has the groups, peers and messages of all.
        is_first = self.fold is not None and role in (Role.GROUP, Role.PEER, Role.MESSAGE)
        values = [getattr(d.instructions[at], field) for d in self.samples[: 1 if is_first else None]]
        if self.fold is None or role is Role.MESSAGE:
            return self._rows(values)
        if role is Role.GROUP:
            return self._moved(values[0])
        return self._moved((values[0],))[:, 0] if role is Role.PEER else self._even(values)

    @cached_property
    def at_rest(self) -> dict[Value, tuple[Weight, Ints]]:
        """Return the weights by name, each with its box on every device [devices, slots, 2]."""
        boxes = (box.reshape(len(self), -1, 2) for box in self.of_weights("box"))
        return {weight.name: (weight, box) for weight, box in zip(self.weights, boxes, strict=True)}

    def of_weights(self, field: str) -> list[NDArray[Any]]:
        """Return a field of each weight: arrays with a row per device."""
        sides = zip(*(device.weights for device in self.samples), strict=True)
        even = self._rows if self.places is None else self._even
        return [even([getattr(w, field) for w in side]) for side in sides]

    def _rows(self, values: Sequence[Any]) -> NDArray[Any]:
        if len(values) == 1 or all(value == values[0] for value in values[1:]):
            first = _array(values[0])
            return np.broadcast_to(first, (len(self), *first.shape))
        return _array(values)

    def _even(self, values: Sequence[Any]) -> NDArray[Any]:
        assert self.places is not None
        if all(value == values[0] for value in values[1:]):
            return self._rows(values[:1])
        first, *others = map(_array, values)
        if any(other.shape != first.shape for other in others):
            raise ValueError(f"at the places of a fold it has {', '.join(map(str, values))}")
        if first.dtype == bool:
            found = np.broadcast_to(first, (len(self), *first.shape)).copy()
            for axis, other in enumerate(others):
                found[self.places[:, axis] > 0] &= other
            return found
        found = np.broadcast_to(first, (len(self), *first.shape)).copy()
        for axis, other in enumerate(others):
            if not np.array_equal(other, first):
                found += self.places[:, axis].reshape(-1, *[1] * first.ndim) * (other - first)
        return found

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], Ints]:
        """The groups made so far: that of each device, by that of the first one."""
        return {}

    def _moved(self, group: tuple[int, ...]) -> Ints:
        if group in self._groups:
            return self._groups[group]
        assert self.fold is not None
        assert self.places is not None
        spanned = self.fold.spanned(group)
        found = np.empty((len(self), len(group)), dtype=np.int64)
        for k, device in enumerate(group):
            base, *own = self.fold.places[device]
            to = [own[axis] if axis in spanned else self.places[:, axis] for axis in range(len(own))]
            found[:, k] = self.fold.devices[(base, *to)]
        self._groups[group] = found
        return found

    @cached_property
    def row_of(self) -> dict[int, int]:
        return {device: row for row, device in enumerate(self.devices.tolist())}


def cohorts(program: Program) -> list[Cohort]:
    """Return the cohorts of a program, each device in one."""
    devices = program.devices
    if not isinstance(devices, Folded):
        return _refined(devices)
    fold, found = devices.fold, list[Cohort]()
    places = np.indices(fold.widths).reshape(len(fold.widths), -1).T
    for number, (ranks, samples) in enumerate(devices.groups):
        _check_alike(samples)
        is_idle = number == len(fold.devices)
        found.append(Cohort(number, np.array(ranks), samples, *(() if is_idle else (places, fold))))
    return found


def _check_alike(samples: Sequence[Device]) -> None:
    """Raise ScheduleError unless the compiled places of a fold have equal instructions, apart from their data."""
    first, *others = (([w.name for w in d.weights], list(kinds_of(d.instructions))) for d in samples)
    for device, other in zip(samples[1:], others, strict=True):
        if other != first:
            one, two = (f"{len(code)} instructions and {len(names)} weights" for names, code in (first, other))
            same = zip_longest(first[1], other[1])
            at = next((f", other ones from instruction {n} on" for n, (a, b) in enumerate(same) if a is not b), "")
            raise ScheduleError(
                f"device {device.rank} has {two}, and device {samples[0].rank}, with which it folds, {one}{at}."
            )


def kinds_of(code: Sequence[Instruction]) -> Iterator[type]:
    """Yield the kind of each instruction, without making those of loops."""
    for run in code.runs if isinstance(code, Rolled) else (code,):
        yield from [*map(type, run.first)] * run.count if isinstance(run, Loop) else map(type, run)


def _refined(devices: Sequence[Device]) -> list[Cohort]:
    """Refine the classes of devices with equal code until the members and peers of each are of equal classes."""
    number: dict[Hashable, int] = {}
    messages = [_messages(device) for device in devices]
    # The position of the other end of each message in the code of its device.
    other = {(peer, rank, message, not is_send): at for some in messages for rank, at, peer, message, is_send in some}
    meets = {
        device.rank: tuple(other.get((rank, peer, message, is_send), -1) for rank, _, peer, message, is_send in some)
        for device, some in zip(devices, messages, strict=True)
    }
    color = {d.rank: number.setdefault((form(d), meets[d.rank]), len(number)) for d in devices}
    links = {d.rank: list(_links(d)) for d in devices}
    while True:
        number = {}
        refined = {
            rank: number.setdefault(
                (color[rank], *(tuple(color.get(m, -1) for m in link) for link in some)), len(number)
            )
            for rank, some in links.items()
        }
        if len(number) == len(set(color.values())):
            break
        color = refined
    members: dict[int, list[Device]] = {}
    for device in devices:
        members.setdefault(color[device.rank], []).append(device)
    return [Cohort(n, np.array([d.rank for d in some]), some) for n, some in enumerate(members.values())]


def _messages(device: Device) -> list[tuple[int, int, int, int, bool]]:
    """Return the messages of a device: (rank, position in the code, peer, number, whether it sends)."""
    code = enumerate(device.instructions)
    return [(device.rank, at, i.peer, i.message, isinstance(i, Send)) for at, i in code if isinstance(i, Send | Recv)]


def _links(device: Device) -> Iterator[tuple[int, ...]]:
    for i in device.instructions:
        for role in _COMMUNICATION:
            for name in FIELDS[type(i), role]:
                value = getattr(i, name)
                yield value if isinstance(value, tuple) else (value,)


def runs_of(device: Device) -> Sequence[Run]:
    """Return the instructions of a device as its loops and the runs between them."""
    code = device.instructions
    return code.runs if isinstance(code, Rolled) else (tuple(code),)


def form(device: Device) -> Hashable:
    """Return a key of a device, equal for devices that run one program: its text, its loops, the shapes of its data,
    and the equalities between groups.
    """
    form: list[Hashable] = [tuple((w.name, w.tensor, w.trained, w.group, w.host, len(w.box)) for w in device.weights)]
    groups: dict[object, int] = {}
    runs = runs_of(device)
    form += [(len(run), run.count if isinstance(run, Loop) else 1) for run in runs]
    # Two repetitions determine all.
    for i in (i for run in runs for i in ((*run.first, *run.second) if isinstance(run, Loop) else run)):
        kind = type(i)
        form.append(kind.__name__)
        for name, role in ROLES[kind].items():
            value = getattr(i, name)
            if role is Role.EVEN:
                form.append(_shape(value))
            elif role is Role.GROUP:
                form += [len(value), groups.setdefault(value, len(groups))]
            elif role not in (Role.PEER, Role.MESSAGE, Role.NOTE):
                form.append(value)
    return tuple(form)


def _array(value: Any) -> NDArray[Any]:
    found = np.array(value)
    return found if found.size else found.astype(np.int64)


def _shape(value: Any) -> Hashable:
    return tuple(map(_shape, value)) if isinstance(value, tuple) else ()


# The least number of repetitions of a body that counts as a loop, unless fewer are asked for.
SEEN = 3
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
        for i, (values, moves) in zip(self.first, self._moved, strict=True):
            if moves and at:
                values = list(values)
                for n, move in moves:
                    values[n] = move(at)
                yield type(i)(*values)
            else:
                yield i

    @cached_property
    def _moved(self) -> list[tuple[list[Any], list[tuple[int, Callable[[int], Any]]]]]:
        """Return the fields of each instruction, and those that move, as functions of the repetition."""
        found, known = [], dict[Any, Callable[[int], Any]]()
        for a, b in zip(self.first, self.second, strict=True):
            names = [f.name for f in fields(a)]
            compared = ((n, f.name) for n, f in enumerate(fields(a)) if f.compare)
            moves = ((n, mover(getattr(a, name), getattr(b, name), known)) for n, name in compared)
            found.append(([getattr(a, name) for name in names], [(n, m) for n, m in moves if m is not None]))
        return found


def mover(first: Any, second: Any, known: dict[Any, Callable[[int], Any]] | None = None) -> Callable[[int], Any] | None:
    """Return the function `at -> evenly([first, second], (at,))`, None if both are equal. It looks up the moving
    numbers once. `known`: functions of names that were returned before; each keeps its last result.

    Raises ValueError for tuples of different lengths.
    """
    if first == second:
        return None
    if type(first) is int:
        return lambda at: first + at * (second - first)
    if not isinstance(first, tuple):
        return lambda at: evenly([first, second], (at,))
    known = {} if known is None else known
    if isinstance(first, Value) and (first, second) in known:
        return known[first, second]
    pairs = enumerate(zip(first, second, strict=True))
    moving = [(n, move) for n, (a, b) in pairs if (move := mover(a, b, known)) is not None]
    make: Callable[[list[Any]], Any] = getattr(first, "_make", tuple)

    @lru_cache(1)
    def moved(at: int) -> Any:
        found = list(first)
        for n, move in moving:
            found[n] = move(at)
        return make(found)

    if isinstance(first, Value):
        known[first, second] = moved
    return moved


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
        spot = number, place // len(run.first)
        if spot not in self._made:
            self._made[spot] = tuple(run.repetition(spot[1]))
        return self._made[spot][place % len(run.first)]

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


def find_spans(forms: Sequence[Hashable], microbatches: Sequence[int], period: int, seen: int = SEEN) -> list[Span]:
    """Return the spans in which a sequence repeats, `seen` times at least, with microbatches `period` later each time.
    NONE stays NONE.
    """
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
        if count >= seen:
            found.append(Span(here, lag, count))
        here += max(lag * count, 1) if count >= seen else 1
    return found


def _runs(form: Ints, at: Ints, period: int, lag: int) -> Ints:
    """Return, for each position, the number of elements from there on that repeat `lag` later."""
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
