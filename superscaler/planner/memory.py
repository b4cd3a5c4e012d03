"""Bytes of devices: what small models hold beyond weights and what blocks keep, and the peaks of plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from superscaler.errors import InputError
from superscaler.ir.program import Program, Value, calls, reads
from superscaler.planner.space import SCHEDULES, Choice
from superscaler.plans.lib.schedules import RULES, table_of
from superscaler.simulate.memory import Overheads
from superscaler.simulate.predict import Simulation
from superscaler.simulate.storages import GATHERED, GRADIENTS, OPTIMIZER, VALUES, WEIGHTS
from superscaler.verbs import Action

# The activations of an interlaced pipeline in those of 1F1B.
_INTERLACED = 1.5
# What a block keeps between the halves of its backward, in what it keeps between forward and backward.
_BETWEEN = 0.4
# The microbatches of each device of a pipeline, after which its memory repeats.
_STEADY, _STEADY_BOTH_WAYS = 4, 2


class Beyond(NamedTuple):
    """The most bytes of a device beyond weights, gradients, the optimizer's state and what blocks keep. `outer`: of
    what is outside of the blocks; `inner`: in the backward of a block; `update`: in the update; `added`: 1 where the
    devices of a stage add their gradients, 0 where they do not.
    """

    outer: float
    inner: float
    update: float
    added: float

    def less(self, kept: float) -> Beyond:
        """Return the bytes without those that blocks keep."""
        return self._replace(outer=max(self.outer - kept, 0.0), inner=max(self.inner - kept, 0.0))

    def most(self, other: Beyond) -> Beyond:
        """Return the larger numbers of both."""
        return Beyond(*map(max, self, other))

    def towards(self, other: Beyond, share: float) -> Beyond:
        """Return the bytes at a share of the way to other ones."""
        return Beyond(*(max(a + share * (b - a), 0.0) for a, b in zip(self, other, strict=True)))

    def of_rows(self, times: float) -> Beyond:
        """Return the bytes of so many times the rows."""
        return Beyond(times * self.outer, times * self.inner, self.update, self.added)

    def plus(self, before: Beyond, after: Beyond) -> Beyond:
        """Return the bytes with the difference of others."""
        return Beyond(*(max(y + x - a, 0.0) for x, a, y in zip(self, before, after, strict=True)))

    def changed(self, before: Beyond, after: Beyond) -> Beyond:
        """Return the bytes, changed in the ratio of others."""
        return Beyond(*(y * x / a if a else y for x, a, y in zip(self, before, after, strict=True)))


NONE = Beyond(0.0, 0.0, 0.0, 0.0)


class Moment(NamedTuple):
    """A moment of a device of a pipeline: whether the last stage works, and whether gradients are there. `alive`: the
    microbatches whose activations the blocks of each of its stages keep until their backward. `between`: those between
    the halves of a backward: blocks keep a share of the activations, recomputed ones too.
    """

    is_last: bool
    has_gradients: bool
    alive: tuple[float, ...]
    between: tuple[float, ...]

    def below(self, other: Moment) -> bool:
        """Return whether another moment has as much of everything."""
        pairs = zip((*self.alive, *self.between), (*other.alive, *other.between), strict=True)
        return self.is_last <= other.is_last and self.has_gradients <= other.has_gradients and all(
            a <= b for a, b in pairs
        )  # fmt: skip


def beyond(found: Simulation, blocks: Set[str], is_gathered: bool) -> Beyond:
    """Return the bytes of a small model beyond its weights, what its blocks keep included, whose microbatches come one
    after the other. `blocks`: the names of their ops. `is_gathered`: what gathers of weights bring counts, too.
    """
    memory = max(found.memories, key=lambda m: m.total)
    code = found.program.devices[memory.rank].instructions[:]
    rest = [WEIGHTS, OPTIMIZER, *(() if is_gathered else (GATHERED, GRADIENTS))]
    before = np.concatenate([memory.curve[:1], memory.curve[:-1]])
    held = memory.during - before[:, rest].sum(axis=1)
    functions = {i.task: i.function for _, i in calls(code)}
    inside = [not blocks.isdisjoint(op.origin or op.name for op in f.ops) for f in found.program.functions]
    backward = [(n, t.microbatch) for n, i in enumerate(code) if i.is_mirror and (t := i.task) and inside[functions[t]]]
    first = next((n for n, _ in backward), len(code))
    updates, is_outer = np.array([i.updates for i in code]), np.arange(len(code)) < first
    for (last, earlier), (n, microbatch) in pairwise(backward):
        # The forward of the next microbatch, and the backward of its loss.
        is_outer[last + 1 : n] |= microbatch != earlier
    outer, inner = (float(max(held[own & ~updates], default=0)) for own in (is_outer, ~is_outer))
    # The first of the backwards has the gradient of what is outside, too.
    given = float(before[first, VALUES]) if first < len(code) else 0.0
    return Beyond(max(outer, inner), inner - given, float(max(held[updates], default=0)), _added(found.program))


def _added(program: Program) -> float:
    """Return 1 if devices of a small model add gradients of weights."""
    weights = {weight.name.name for weight in program.devices[0].weights}
    code = (i for i in program.devices[0].instructions[:] if len(i.group) > 1)
    return float(any(value.is_gradient and value.name in weights for i in code for value in reads(i)))


def kept_bytes(found: Simulation) -> int:
    """Return the bytes that the first device keeps of its first microbatch from its forward to its backward."""
    program, device = found.program, found.program.devices[0]
    tasks = found.segments.tasks(device)
    weights = {weight.name for weight in device.weights}
    code = [i for _, i in calls(device.instructions[:]) if i.task.microbatch <= 0]
    again = {i.function for i in code if any(op.origin for op in program.functions[i.function].ops)}
    # What is recomputed is kept for a moment only, but for what the forward made or read, too.
    known = {name for i in code if i.function not in again for name in (*i.inputs, *i.outputs)}
    named, others = dict[Value, int](), 0
    for i in code:
        segment = tasks[i.task]
        ends = (*enumerate(i.inputs), *zip(segment.results, i.outputs, strict=True))
        is_again = i.function in again
        held = {n for n, name in enumerate(i.inputs) if name in known} if is_again else segment.tapes[0].held
        named |= {name: segment.sizes[n] for n, name in ends if n in held and name not in weights}
        others += 0 if is_again else segment.tapes[0].bytes
    return others + sum(named.values())


def moments(c: Choice) -> Sequence[Sequence[Moment]]:
    """Return the moments of each device of a plan's pipeline in which it can need most."""
    if c.schedule == "interlaced":
        alive = (min(c.microbatches, _INTERLACED * (c.pp - device)) for device in range(c.pp))
        return [[Moment(True, True, (some,), (0.0,))] for some in alive]
    name, steady = SCHEDULES[c.schedule], _STEADY if c.directions == 1 else _STEADY_BOTH_WAYS
    count = min(c.microbatches, steady * c.pp)
    return _moments(name if name in RULES else SCHEDULES["1f1b"], c.pp, count, c.chunks)


@cache
def _moments(schedule: str, devices: int, microbatches: int, chunks: int) -> Sequence[Sequence[Moment]]:
    options = {"chunks": chunks} if schedule == SCHEDULES["interleaved"] else {}
    try:
        table, _ = table_of(schedule, devices, {"microbatches": microbatches, **options})
    except InputError:
        # The plan is refused, too.
        return [[Moment(True, True, (0.0,) * chunks, (0.0,) * chunks)]] * devices
    last = max(work.stage for row in table for work in row)
    return [_largest(_walked(row, last)) for row in table]


def _walked(row: Sequence[Action], last: int) -> Iterator[Moment]:
    """Yield a moment for each work of a device."""
    alive = dict.fromkeys(sorted({work.stage for work in row}), 0.0)
    between, has_gradients = dict(alive), False
    for work in row:
        alive[work.stage] += work.kind == "F"
        yield Moment(work.stage == last, has_gradients, tuple(alive.values()), tuple(between.values()))
        alive[work.stage] -= work.kind in "BI"
        between[work.stage] += {"I": _BETWEEN, "W": -_BETWEEN}.get(work.kind, 0.0)
        has_gradients |= work.kind in "BW"


def _largest(every: Iterator[Moment]) -> Sequence[Moment]:
    """Return the moments, but for those that have less of everything than another one."""
    found = list[Moment]()
    for moment in dict.fromkeys(every):
        if not any(moment.below(other) for other in found):
            found = [other for other in found if not other.below(moment)] + [moment]
    return found


def overhead(c: Choice, added: bool, per: Overheads) -> float:
    """Return the bytes of a device beside its tensors, but for the share that its allocator cannot use: with a group
    of each kind of parallelism, and one of all devices of a stage that add gradients.
    """
    added = added or c.directions > 1
    groups = (c.tp > 1) + (c.copies > 1) + (added and c.tp > 1 and c.copies > 1)
    return per.context + per.workspace + groups * per.group
