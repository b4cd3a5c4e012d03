"""Loops over microbatches: the code of a few microbatches, extended to all of them.

Only the first microbatches of a plan are compiled. If the code of a device repeats and all its numbers move evenly, the
repetition is continued for the microbatches in between; the code behind the loop then belongs to the last ones. Values
are named by microbatch, so a name is never ambiguous. The certificate decides whether the result is right.
"""

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from superscaler.ir.instructions.fields import Move, evenly, mover
from superscaler.ir.loops import NONE, SEEN, Loop, Rolled, Run, Span, find_spans, steady_spans
from superscaler.ir.program import FIELDS, ROLES, VALUES, Instruction, Meets, Role, Task, Value, ended


class Aperiodic(Exception):
    """The code of a few microbatches does not determine the code of all."""


_NAMES = {kind: tuple(n for role in VALUES for n in FIELDS[kind, role]) for kind in ROLES}
_KEPT = {kind: tuple(n for role in (None, Role.GROUP, Role.PEER) for n in FIELDS[kind, role]) for kind in ROLES}
# The fields that a form leaves out, or that move along a fold.
_MOVING = {
    kind: tuple(n for role in (Role.EVEN, Role.MESSAGE, Role.GROUP, Role.PEER) for n in FIELDS[kind, role])
    for kind in ROLES
}
# The fields with microbatches.
_NUMBERED = {kind: _NAMES[kind] + FIELDS[kind, Role.TASK] for kind in ROLES}
_ONE = Value, Task
Moves = Mapping[str, Move]
# The kinds of instructions with numbers for each microbatch.
_PLACED = {kind for kind in ROLES if FIELDS[kind, Role.EVEN] or FIELDS[kind, Role.MESSAGE]}


def form(i: Instruction) -> tuple[Hashable, int]:
    """Return the form of an instruction, equal for all microbatches, and its microbatch (NONE if it has none).

    A value of all microbatches is freed once, behind the last of them, which makes no other form.
    """
    kind, given = type(i), list[Any]()
    for name in _NAMES[kind]:
        value = getattr(i, name)
        given += [value] if isinstance(value, Value) else [*value, None]
    if i.frees:
        given = [v for v in given if v is not None and v.microbatch != NONE]
    task = i.task
    numbers = [v.microbatch for v in (task, *given) if v is not None and v.microbatch != NONE]
    first = numbers[0] if numbers else NONE
    relative = tuple([v and (v if v.microbatch == NONE else (*v[:2], *v[3:], v.microbatch - first)) for v in given])
    own = task and (task.segment, task.part, task.microbatch - first)
    return (kind, own, relative, *[getattr(i, name) for name in _KEPT[kind]]), first


@dataclass(frozen=True)
class Shape:
    """Loops in the code of a device, and the place of every instruction outside of them.

    `outside`: for each instruction outside a loop, (body instruction that it equals or NONE, repetition, microbatch
    shift).
    """

    spans: tuple[Span, ...]
    outside: Mapping[int, tuple[int, int, int]]


def find_shape(code: Sequence[Instruction], period: int, missing: int, seen: float = SEEN) -> Shape:
    """Return the loops of code that lacks `missing` microbatches. Raises Aperiodic if the code does not determine
    them.
    """
    forms, at = zip(*map(form, code), strict=True)
    once = {n for n, i in enumerate(code) if i.frees and any(v.microbatch == NONE for v in ended(i))}
    kept = [n for n in range(len(code)) if at[n] != NONE or n not in once]
    repeated = find_spans([forms[n] for n in kept], [at[n] for n in kept], period, seen)
    is_work = [i.runs_segment for i in code]
    whole = (_before(once, span, kept) for span in repeated)
    spans = steady_spans([span for span in whole if span.count], forms, at, is_work)
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
        if at[n] == NONE or code[n].meets is Meets.ALL:
            outside[n] = NONE, 0, 0
        elif like == NONE:
            unknown.append(n)
        else:
            later = missing if n > like else 0
            outside[n] = like, (at[n] - at[like]) // period, later
    likes = {like for like, *_ in outside.values()}
    if not likes.issuperset(n for span in spans if span.count == 1 for n in span.body):
        # Only the code around a single repetition shows that it is no exception.
        raise Aperiodic
    shifts = _shifts(at, spans, outside)
    for n in unknown:
        gap = _gap(n, spans)
        found = shifts.get((gap, at[n])) or shifts.get((gap, None), {0})
        if len(found) > 1 or (found != {0} and type(code[n]) in _PLACED):
            raise Aperiodic
        outside[n] = NONE, 0, next(iter(found))
    return Shape(tuple(spans), outside)


def _before(once: Container[int], span: Span, kept: Sequence[int]) -> Span:
    """Return a span of the `kept` instructions as one of all, with the repetitions before the first that is done
    `once`.
    """
    start, size = kept[span.start], span.length * span.count
    before = next((n for n in range(size) if start + n in once), size)
    return Span(start, span.length, before // span.length)


def _shifts(
    at: Sequence[int], spans: Sequence[Span], outside: Mapping[int, tuple[int, int, int]]
) -> dict[tuple[int, int | None], set[int]]:
    """Return the microbatch shifts of instructions between the same loops: by (gap, microbatch), and by (gap, None) for
    all.
    """
    found: dict[tuple[int, int | None], set[int]] = {}
    for n, (like, _, later) in outside.items():
        for microbatch in (at[n], None) if like != NONE else ():
            found.setdefault((_gap(n, spans), microbatch), set()).add(later)
    return found


def _gap(n: int, spans: Sequence[Span]) -> int:
    """Return the number of loops that start at or before instruction `n`."""
    return sum(span.start <= n for span in spans)


def roll(code: Sequence[Instruction], shape: Shape, added: int, period: int) -> Rolled:
    """Return code with `added` more repetitions in each loop. Raises Aperiodic if a number does not move evenly.

    `shape` may come from another place of the fold: its code is equal but for the numbers that move along the fold.
    """
    code = tuple(code)
    try:
        moves_of = {n: _moves(own) for n, own in _repetitions(code, shape).items()}
        runs, here = list[Run](), 0
        for span in (*shape.spans, Span(len(code), 0, 0)):
            left = ((code[n], *shape.outside[n]) for n in range(here, span.start))
            runs.append(
                tuple(
                    _shifted(i, later, moves_of.get(like, {}), repetition + later // period) if later else i
                    for i, like, repetition, later in left
                )
            )
            first, second = (code[at : at + span.length] for at in (span.start, span.start + span.length))
            if span.count == 1:
                second = tuple(_shifted(code[n], period, moves_of.get(n, {}), 1) for n in span.body)
            runs.append(Loop(first, second, count=span.count + added))
            here = span.end
    except ValueError:
        # The lengths of numbers differ.
        raise Aperiodic from None
    return Rolled(tuple(run for run in runs if len(run)))


def _repetitions(code: Sequence[Instruction], shape: Shape) -> dict[int, list[tuple[int, Instruction]]]:
    """Return, for each instruction of a body with numbers that move, those that are equal but for their microbatch,
    inside of the loop and outside, each with its repetition.
    """
    found = dict[int, list[tuple[int, Instruction]]]()
    for span in shape.spans:
        for n in (n for n in span.body if _MOVING[type(code[n])]):
            found[n] = list(enumerate(code[n : span.end : span.length]))
    for n, (like, repetition, _) in shape.outside.items():
        if like in found:
            found[like].append((repetition, code[n]))
    return found


def _moves(repetitions: Sequence[tuple[int, Instruction]]) -> Moves:
    """Return the values of each field of an instruction that moves, as a function of the repetition."""
    found = dict[str, Move]()
    for name in _MOVING[type(repetitions[0][1])]:
        values = [(at, getattr(i, name)) for at, i in repetitions]
        first, known = values[0][1], dict(values)
        if all(value == first for _, value in values):
            continue
        move = mover([first, known[1] if 1 in known else evenly([known.get(-1, first), first], (2,))])
        if move is None or any(move(at) != value for at, value in values):
            raise Aperiodic
        found[name] = move
    return found


def _shifted(i: Instruction, later: int, moves: Moves, repetition: int) -> Instruction:
    """Return an instruction `later` microbatches on, where it is in that repetition of a loop."""
    kind = type(i)
    changed = {name: move(repetition) for name, move in moves.items()}
    for name in _NUMBERED[kind]:
        value = getattr(i, name)
        is_one = isinstance(value, _ONE)
        changed[name] = _later(value, later) if is_one else tuple([v and _later(v, later) for v in value])
    return kind(*[changed[name] if name in changed else getattr(i, name) for name in ROLES[kind]])


@lru_cache(1 << 16)
def _later(value: Any, later: int) -> Any:
    return value if value.microbatch == NONE else value._replace(microbatch=value.microbatch + later)
