"""The program of all microbatches from that of the first ones: its loops go on, and its loss counts all parts.

The certificate decides whether it computes what the model computes (compiler.py); if not, the plan is compiled whole.
It checks neither that values are freed nor that work is in the plan's order. These are checked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, cast

import numpy as np

from superscaler.ir.grid import Ints
from superscaler.ir.loops import NONE, Loop, Rolled
from superscaler.ir.program import (
    Instruction,
    Loss,
    Program,
    Role,
    Value,
    ended,
    names,
    writes,
)  # fmt: skip
from superscaler.materialize.loops import Aperiodic, find_shape, roll
from superscaler.schedule.dependencies import Schedule
from superscaler.schedule.segments import Segment
from superscaler.schedule.steady_state import SteadyState

# The first and the last time of each kind of work of a segment, by microbatch.
Ends = dict[tuple[str, int], tuple[Ints, Ints]]


def rolled(program: Program, schedule: Schedule, steady: SteadyState) -> Program:
    """Return the program of all microbatches from the program of the first ones. Raises Aperiodic if these do not
    determine it.
    """
    found, works = dict[int, Rolled](), _works(steady, schedule)
    for _, samples in program.groups:
        first = samples[0]
        shape = find_shape(first.instructions, steady.period, steady.total - steady.few, steady.seen)
        for device in samples:
            code = _with_loss(roll(device.instructions, shape, steady.added, steady.period))
            # All devices of a group use the names of the first one.
            if device is first:
                _check_frees(Rolled((tuple(device.instructions),)), code, steady)
                _check_orders(steady, works, _ends(code, schedule.segments, steady.total))
            found[device.rank] = code
    return program.changed(lambda device: replace(device, instructions=found[device.rank]))


class _Place(NamedTuple):
    """An instruction in the first two repetitions of a loop, or twice the same one. `time`: its number in code;
    `length`: of a repetition; `turns`: the number of them.
    """

    first: Instruction
    second: Instruction
    time: int
    length: int
    turns: int

    @property
    def times(self) -> Ints:
        return self.time + self.length * np.arange(self.turns)

    def microbatches(self, first: int, second: int) -> Ints:
        """Return a number in all repetitions from that in the first two of them."""
        return first + (second - first) * np.arange(self.turns)


def _places(code: Rolled) -> Iterator[_Place]:
    for start, run in zip(code.starts, code.runs, strict=True):
        loop = run if isinstance(run, Loop) else Loop(run, run)
        for at, (one, two) in enumerate(zip(loop.first, loop.second, strict=True), start):
            yield _Place(one, two, at, len(loop.first), loop.count)


def _family(value: Value) -> Value:
    """Return a value as that of all microbatches."""
    return value._replace(microbatch=NONE)


def _with_loss(code: Rolled) -> Rolled:
    """Return code whose loss counts the parts of all microbatches; equal parts stay in the order of their making."""
    *rest, (*last, end) = code.runs
    loss = cast("Loss", end)
    if not loss.parts:
        return code
    own_of = dict[Value, tuple[bool, int]]()
    for v, counts, turn in zip(loss.parts, loss.counted, loss.of or loss.counted, strict=True):
        if v.microbatch == NONE or own_of.setdefault(_family(v), (counts, turn)) != (counts, turn):
            raise Aperiodic
    made: dict[Value, list[tuple[int, int]]] = {v: [] for v in own_of}
    for place in _places(code):
        for v, later in zip(writes(place.first), writes(place.second), strict=True):
            if (own := made.get(_family(v))) is not None:
                microbatches = place.microbatches(v.microbatch, later.microbatch)
                own += zip(place.times.tolist(), microbatches.tolist(), strict=True)
    found = [(v._replace(microbatch=at), *own) for v, own in own_of.items() for _, at in sorted(made[v])]
    parts, counted, of = zip(*found, strict=True)
    loss = replace(loss, parts=parts, counted=counted, of=of if loss.of else ())
    return Rolled((*rest, (*last, loss)))


def _check_frees(few: Rolled, code: Rolled, steady: SteadyState) -> None:
    """Raise Aperiodic if values that have all ended in the code of a `few` microbatches are left in that of all."""
    before, after = _left(few), _left(code)
    for name, was in before.items():
        # A sum, whose making is not counted, ends once in a step or in each microbatch.
        if was <= 0 and after[name] not in (was, was * steady.total // steady.few):
            raise Aperiodic


def _left(code: Rolled) -> Counter[Value]:
    """Return the number of values of each family that are made and do not end. Sums count where they end only."""
    found = Counter[Value]()
    for i, *_, turns in _places(code):
        for v in () if i.grows else names(i, Role.WRITE):
            found[_family(v)] += turns
        for v in ended(i):
            found[_family(v)] -= turns
    return found


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


def _ends(code: Rolled, segments: Sequence[Segment], total: int) -> Ends:
    """Return the first and the last time of each kind of work of a segment, by microbatch [total]."""
    never = np.iinfo(np.int64).max
    found: Ends = {}
    halves = {"input": "I", "weight": "W"}
    for place in _places(code):
        i, one, two = place.first, place.first.task, place.second.task
        if not i.runs_segment or one is None or two is None or one.microbatch == NONE:
            continue
        whole = next(iter(segments[one.segment].gradient_kinds.values()), "B") if i.is_mirror else "F"
        kind = halves.get(i.half, whole), one.segment
        first, last = found.setdefault(kind, (np.full(total, never), np.full(total, -1)))
        at = place.microbatches(one.microbatch, two.microbatch)
        if at.min() < 0 or at.max() >= total:
            raise Aperiodic
        np.minimum.at(first, at, place.times)
        np.maximum.at(last, at, place.times)
    return found
