"""A proof that code with loops is the code of all microbatches: each value is made once, before it is read and freed,
and no work is missing.

Code without this proof is compiled whole. The certificate proves more of the computation, but takes longer than a
compilation, and does not check that values are freed and that work is in the plan's order.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from superscaler.errors import ScheduleError
from superscaler.ir.communication import check_rendezvous
from superscaler.ir.grid import Ints
from superscaler.ir.loops import NONE, Loop, Rolled
from superscaler.ir.program import (
    ONE,
    ROLES,
    Accumulate,
    Backward,
    Collective,
    Device,
    Forward,
    Instruction,
    Loss,
    Program,
    Recv,
    Role,
    Send,
    Tasked,
    Value,
)  # fmt: skip
from superscaler.materialize.loops import Aperiodic, find_shape, roll
from superscaler.schedule.dependencies import Schedule
from superscaler.schedule.segments import Segment
from superscaler.schedule.steady_state import SteadyState

MADE, READ, FREED, ADDED = range(4)
# More than the microbatches of any plan.
_MOST = 1 << 24
# The first and the last time of each kind of work of a segment, by microbatch.
Ends = dict[tuple[str, int], tuple[Ints, Ints]]


@dataclass(frozen=True)
class Uses:
    """A table of all uses of values on a device [rows]: value family, role, microbatch, time. A sum is MADE and
    ADDED to by each instruction that adds to it; other values are MADE, READ and FREED.

    A family is a value without its microbatch. Each work of a task, and each copy of its tape, counts as a value that
    is made.
    """

    families: dict[Hashable, int]
    family: Ints
    role: Ints
    microbatch: Ints
    time: Ints

    def key(self, role: int) -> tuple[Ints, Ints]:
        """Return, for each use in a role, the value as one number, and the time."""
        own = self.role == role
        return self.family[own] * _MOST + self.microbatch[own] + 1, self.time[own]

    def microbatches(self, value: Value) -> list[int]:
        """Return the microbatches in which a value is made, in order of time."""
        own = (self.family == self.families[family(value)]) & (self.role == MADE)
        found: list[int] = self.microbatch[own][np.argsort(self.time[own])].tolist()
        return found

    def check(self) -> None:
        """Raise Aperiodic for a value that is made twice, read before it is made, or read after it is freed."""
        made, when = self.key(MADE)
        order = np.lexsort((when, made))
        made, when = made[order], when[order]
        first = np.append(True, made[1:] != made[:-1])
        again = made[~first]
        if (again[~np.isin(again, self.key(ADDED)[0])] % _MOST != 0).any():
            raise Aperiodic
        made, when = made[first], when[first]
        freed, end = self.key(FREED)
        if len(np.unique(freed)) < len(freed):
            raise Aperiodic
        for some, time in (self.key(READ), (freed, end)):
            at = np.searchsorted(made, some)
            if (at >= len(made)).any() or (made[at] != some).any() or (when[at] >= time).any():
                raise Aperiodic
        last = np.full(len(made), np.iinfo(np.int64).max)
        last[np.searchsorted(made, freed)] = end
        read, time = self.key(READ)
        if (last[np.searchsorted(made, read)] < time).any():
            raise Aperiodic

    def counts(self) -> Ints:
        """Return the number of microbatches in which each value is made, read and freed [values, roles]."""
        found = np.zeros((len(self.families), 3), dtype=np.int64)
        for role in (MADE, READ, FREED):
            distinct = np.unique(self.key(role)[0])
            found[:, role] = np.bincount(distinct // _MOST, minlength=len(self.families))
        return found


class UsesCache:
    """The uses of code whose values have the same families. Rolled and plain code share instructions: each is looked up
    once.
    """

    def __init__(self) -> None:
        self.families: dict[Hashable, int] = {}
        self._known: dict[int, tuple[Instruction, list[int]]] = {}
        self._tables: dict[int, tuple[Sequence[Instruction], Ints]] = {}

    def of(self, code: Rolled) -> Uses:
        return Uses(self.families, *np.concatenate(list(self._repeated(code))).T)

    def _repeated(self, code: Rolled) -> Iterator[Ints]:
        """Yield the uses of code [uses, 4], run by run: value family, role, microbatch, time."""
        time = 0
        for run in code.runs:
            found = self._rows(run.first if isinstance(run, Loop) else run)
            if isinstance(run, Loop):
                step = self._rows(run.second) - found
                step[:, -1] = len(run.first)
                found = (found + step * np.arange(run.count)[:, None, None]).reshape(-1, 4)
            yield found + np.array([0, 0, 0, time])
            time += len(run)

    def _rows(self, code: Sequence[Instruction]) -> Ints:
        """Return the uses of instructions [uses, 4]: value family, role, microbatch, position of the instruction."""
        if id(code) in self._tables:
            return self._tables[id(code)][1]
        found, counts, numbers = list[int](), list[int](), self.families
        for i in code:
            known = self._known.get(id(i))
            if known is None:
                of = [(numbers.setdefault(name, len(numbers)), role, at) for name, role, at in uses(i)]
                # As one number, since many are looked up.
                known = self._known[id(i)] = i, [(number * 4 + role) * _MOST + at + 1 for number, role, at in of]
            found += known[1]
            counts.append(len(known[1]))
        packed, where = np.array(found, dtype=np.int64), np.repeat(np.arange(len(counts)), counts)
        number, at = np.divmod(packed, _MOST)
        rows = np.column_stack([number // 4, number % 4, at - 1, where])
        self._tables[id(code)] = code, rows
        return rows


# The roles that the names of a field have in `Uses`.
_ROLES = {
    Role.READ: (READ,),
    Role.LAST: (READ, FREED),
    Role.WRITE: (MADE,),
    Role.SUM: (MADE, ADDED),
    Role.END: (FREED,),
}
_USED = {kind: [(name, _ROLES[role]) for name, role in ROLES[kind].items() if role in _ROLES] for kind in ROLES}


def uses(i: Instruction) -> Iterator[tuple[Hashable, int, int]]:
    """Yield (value family, role, microbatch) for all values of an instruction."""
    for field, roles in _USED[type(i)]:
        some = getattr(i, field)
        for v in (some,) if isinstance(some, Value) else some:
            if v is not None and v != ONE:
                for role in roles:
                    yield family(v), role, v.microbatch
    if isinstance(i, Accumulate) and i.in_place:
        yield family(i.out), ADDED, i.out.microbatch
    if isinstance(i, Tasked):
        yield Work(type(i), getattr(i, "half", ""), i.task.segment, i.task.part), MADE, i.task.microbatch


def family(value: Value) -> Hashable:
    """Return a value without its microbatch."""
    return value[:2] + value[3:]


class Work(NamedTuple):
    """A task without its microbatch."""

    kind: type
    half: str
    segment: int
    part: int


def check_whole(before: Uses, after: Uses, counts: tuple[int, int]) -> None:
    """Raise Aperiodic if code with loops misses a microbatch. `counts`: microbatches in the compiled code (`before`),
    and in all (`after`).
    """
    after.check()
    if (after.microbatch >= counts[1]).any():
        raise Aperiodic
    some, all_of = before.counts(), after.counts()
    # A value of all microbatches stays one, and so does a value that is read or freed whenever it is made.
    if (all_of[some == counts[0]] != counts[1]).any():
        raise Aperiodic
    for role in (READ, FREED):
        was = some[:, role] == some[:, MADE]
        if (all_of[was, role] != all_of[was, MADE]).any():
            raise Aperiodic


def _with_loss(code: Rolled, made: Uses) -> Rolled:
    """Return code whose loss counts the parts of all microbatches; equal parts stay in the order of their making."""
    *rest, (*last, loss) = code.runs
    assert isinstance(loss, Loss)
    if not loss.parts:
        return code
    own_of = dict[Value, tuple[bool, int]]()
    for v, counts, turn in zip(loss.parts, loss.counted, loss.of or loss.counted, strict=True):
        if v.microbatch == NONE or own_of.setdefault(v._replace(microbatch=NONE), (counts, turn)) != (counts, turn):
            raise Aperiodic
    found = [(v._replace(microbatch=at), *own) for v, own in own_of.items() for at in made.microbatches(v)]
    parts, counted, of = zip(*found, strict=True)
    loss = replace(loss, parts=parts, counted=counted, of=of if loss.of else ())
    return Rolled((*rest, (*last, loss)))


def rolled(program: Program, schedule: Schedule, steady: SteadyState) -> Program:
    """Return the program of all microbatches from the program of the first ones. Raises Aperiodic if these do not
    determine it.
    """
    found, works = dict[int, Rolled](), _works(steady, schedule)
    for _, samples in program.groups:
        first = samples[0]
        shape = find_shape(first.instructions, steady.period, steady.total - steady.few, steady.seen)
        for device in samples:
            repeated = roll(device.instructions, shape, steady.added, steady.period)
            # All devices of a group use the names of the first one.
            if device is first:
                cache = UsesCache()
                made = cache.of(repeated)
            code = _with_loss(repeated, made)
            if device is first:
                made = made if code is repeated else cache.of(code)
                check_whole(cache.of(Rolled((tuple(device.instructions),))), made, (steady.few, steady.total))
                _check_orders(steady, works, _ends(made, schedule.segments, steady.total))
            found[device.rank] = code
    whole = program.changed(lambda device: replace(device, instructions=found[device.rank]))
    _check_meetings(whole)
    return whole


def _check_meetings(program: Program) -> None:
    """Raise Aperiodic if the communication of all devices does not meet."""
    checked = {device.rank for device, _ in program.distinct}

    def only(device: Device) -> Device:
        assert isinstance(device.instructions, Rolled)
        is_checked = device.rank in checked
        return replace(device, instructions=device.instructions.changed(_meeting)) if is_checked else device

    try:
        check_rendezvous(program.changed(only))
    except ScheduleError:
        raise Aperiodic from None


def _meeting(i: Instruction) -> Instruction | None:
    """Return the communication of an instruction without its values, which move; None if it does not communicate."""
    if isinstance(i, Collective):
        return replace(i, works=(), sources=(), ways=(), notes=())
    return replace(i, source=ONE) if isinstance(i, Send) else replace(i, work=ONE) if isinstance(i, Recv) else None


def _works(steady: SteadyState, schedule: Schedule) -> list[list[tuple[str, int]]]:
    """Return, for each work of a plan's orders, the kinds of work of segments in it."""
    segment_of = {op.name: s for s in schedule.segments for op in s.ops}
    segment_of |= {m.name: segment_of[name] for name, m in schedule.flow.mirrors.items()}
    found = []
    for group in steady.works:
        some = {segment_of[name].number: segment_of[name] for name, _ in group.members if name in segment_of}
        kinds = ((s.backwards if group.kind == "B" else group.kind, s.number) for s in some.values())
        found.append([(kind, number) for own, number in kinds for kind in own])
    return found


def _check_orders(steady: SteadyState, works: Sequence[Sequence[tuple[str, int]]], ends: Ends) -> None:
    """Raise Aperiodic if a device does its work in another order than the plan requires."""

    def ends_of(work: Sequence[tuple[str, int]]) -> tuple[Ints, Ints] | None:
        found = [ends[own] for own in work if own in ends]
        return (np.min([first for first, _ in found], 0), np.max([last for _, last in found], 0)) if found else None

    known = list(map(ends_of, works))
    for (before, after), (one, other) in steady.pairs.items():
        first, second = known[before], known[after]
        if first and second and (first[1][one] >= second[0][other]).any():
            raise Aperiodic


def _ends(made: Uses, segments: Sequence[Segment], total: int) -> Ends:
    """Return the first and the last time of each kind of work of a segment, by microbatch [total]."""
    never = np.iinfo(np.int64).max
    found: Ends = {}
    named = ((number, name) for name, number in made.families.items() if isinstance(name, Work))
    works = {number: work for number, work in named if work.kind in (Forward, Backward)}
    own = np.isin(made.family, list(works)) & (made.microbatch != NONE)
    rows = np.stack([made.family, made.microbatch, made.time])[:, own]
    for number, work in works.items():
        halves = {"input": "I", "weight": "W"}
        whole = "F" if work.kind is Forward else next(iter(segments[work.segment].gradient_kinds.values()), "B")
        kind = halves.get(work.half, whole), work.segment
        first, last = found.setdefault(kind, (np.full(total, never), np.full(total, -1)))
        _, at, time = rows[:, rows[0] == number]
        np.minimum.at(first, at, time)
        np.maximum.at(last, at, time)
    return found
