"""Loops over microbatches: found in the code of a few of them, and checked to be the code of all.

What is compiled has the first microbatches of a plan. Where the code of a device repeats, all numbers in it moving
evenly, it goes on to repeat for the others; what comes after belongs to the last ones. Names have the microbatch in
them, so which value is meant is never a guess; that each is made before it is read, read and freed as often as it
should be, and that the communication of all devices meets, is checked for all microbatches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from superscaler.ir.loops import NONE, Loop, Rolled, Run, Span, find_spans, steady_spans
from superscaler.ir.program import FIELDS, ROLES, Backward, Forward, Instruction, Loss, Role, Value


class Aperiodic(Exception):
    """The code of a few microbatches does not tell that of all."""


_NAMES = {kind: (*FIELDS[kind, Role.READ], *FIELDS[kind, Role.WRITE], *FIELDS[kind, Role.END]) for kind in ROLES}
_KEPT = {
    kind: tuple(n for role in (None, Role.GROUP, Role.PEER) for n in FIELDS[kind, role] if n != "task")
    for kind in ROLES
}
# What has numbers of its own for each microbatch.
_PLACED = {kind for kind in ROLES if FIELDS[kind, Role.EVEN] or FIELDS[kind, Role.MESSAGE]}


def form(i: Instruction) -> tuple[Hashable, int]:
    """Return what an instruction has in common with that of another microbatch, and its own, NONE if it has none."""
    kind, given = type(i), list[Any]()
    for name in _NAMES[kind]:
        value = getattr(i, name)
        given += [value] if isinstance(value, Value) else [*value, None]
    task = getattr(i, "task", None)
    numbers = (v.microbatch for v in (task, *given) if v is not None and v.microbatch != NONE)
    first = next(numbers, NONE)
    relative = tuple(v if v is None or v.microbatch == NONE else (*v[:2], *v[3:], v.microbatch - first) for v in given)
    own = None if task is None else (task.segment, task.part, task.microbatch - first)
    return (kind, own, relative, *(getattr(i, name) for name in _KEPT[kind])), first


@dataclass(frozen=True)
class Shape:
    """How the code of a device repeats: its spans, and for each place outside of them whom it stands for: the
    instruction `like` (of a body) in a repetition, or itself, `later` by some microbatches.
    """

    spans: tuple[Span, ...]
    outside: Mapping[int, tuple[int, int, int]]


def find_shape(code: Sequence[Instruction], period: int, missing: int) -> Shape:
    """Return how code repeats that lacks a number of microbatches. Raises Aperiodic where it does not tell."""
    forms, at = zip(*map(form, code), strict=True)
    is_work = [isinstance(i, Forward | Backward) for i in code]
    spans = steady_spans(find_spans(forms, at, period), forms, at, is_work)
    bodies: dict[Hashable, dict[int, int]] = {}
    for span in spans:
        for n in range(span.start, span.start + span.length):
            own = bodies.setdefault(forms[n], {})
            if at[n] != NONE and own.setdefault(at[n] % period, n) != n:
                raise Aperiodic
    outside: dict[int, tuple[int, int, int]] = {}
    unknown = list[int]()
    inside = {n for span in spans for n in range(span.start, span.end)}
    for n in (n for n in range(len(code)) if n not in inside):
        like = bodies.get(forms[n], {}).get(at[n] % period, NONE)
        if at[n] == NONE or isinstance(code[n], Loss):
            outside[n] = NONE, 0, 0
        elif like == NONE:
            unknown.append(n)
        else:
            later = missing if n > like else 0
            outside[n] = like, (at[n] - at[like]) // period, later
    for n in unknown:
        outside[n] = NONE, 0, _shift(n, at, spans, outside)
        if outside[n][2] and type(code[n]) in _PLACED:
            raise Aperiodic
    return Shape(tuple(spans), outside)


def _shift(n: int, at: Sequence[int], spans: Sequence[Span], outside: Mapping[int, tuple[int, int, int]]) -> int:
    """Return how much later the microbatch of an instruction is, by its neighbours between the same loops."""
    lo = max((span.end for span in spans if span.end <= n), default=0)
    hi = min((span.start for span in spans if span.start > n), default=len(at))
    known = {k: outside[k][2] for k in range(lo, hi) if k in outside and outside[k][0] != NONE}
    same = {later for k, later in known.items() if at[k] == at[n]} or set(known.values())
    if len(same) > 1:
        raise Aperiodic
    return same.pop() if same else 0


def roll(code: Sequence[Instruction], shape: Shape, added: int, period: int) -> Rolled:
    """Return code with `added` more repetitions in each loop. Raises Aperiodic where a number does not move evenly."""
    code = tuple(code)
    pairs = ((span.body, span.count) for span in shape.spans)
    loops = [Loop(code[b.start : b.stop], code[b.stop : b.stop + len(b)], count) for b, count in pairs]
    try:
        return _roll(code, shape, loops, added, period)
    except ValueError:
        # Numbers of other lengths.
        raise Aperiodic from None


def _roll(code: Sequence[Instruction], shape: Shape, loops: Sequence[Loop], added: int, period: int) -> Rolled:
    told: dict[int, Loop] = {}
    for span, loop in zip(shape.spans, loops, strict=True):
        # The first two are told.
        others = (i for at in range(2, loop.count) for i in loop.repetition(at))
        if any(a != b for a, b in zip(others, code[span.start + 2 * span.length : span.end], strict=True)):
            raise Aperiodic
        for n, pair in enumerate(zip(loop.first, loop.second, strict=True), span.start):
            told[n] = Loop((pair[0],), (pair[1],))
    runs: list[Run] = []
    here = 0
    for span, loop in zip((*shape.spans, Span(len(code), 0, 0)), (*loops, Loop((), ())), strict=True):
        once = []
        for n in range(here, span.start):
            like, repetition, later = shape.outside[n]
            once.append(_moved(code[n], told.get(like), repetition, later, period))
        runs += [tuple(once), replace(loop, count=loop.count + added)]
        here = span.end
    return Rolled(tuple(run for run in runs if len(run)))


def _moved(i: Instruction, like: Loop | None, repetition: int, later: int, period: int) -> Instruction:
    if like is None:
        return _shifted(i, later) if later else i
    (found,) = like.repetition(repetition)
    if found != i:
        raise Aperiodic
    return next(like.repetition(repetition + later // period))


def _shifted(i: Instruction, later: int) -> Instruction:
    """Return an instruction of a later microbatch."""
    changed: dict[str, Any] = {}
    for name in _NAMES[type(i)]:
        value = getattr(i, name)
        is_one = isinstance(value, Value)
        found = [None if v is None else _later(v, later) for v in ([value] if is_one else value)]
        changed[name] = found[0] if is_one else tuple(found)
    if isinstance(i, Forward | Backward):
        changed["task"] = _later(i.task, later)
    return replace(i, **changed)


def _later(value: Any, later: int) -> Any:
    return value if value.microbatch == NONE else value._replace(microbatch=value.microbatch + later)
