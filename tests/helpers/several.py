"""Mutations of several fields at once, that look right one by one: names, numbers and places that belong to others.

Each has a class of its own beside those of `single.py`; `mutants` has all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from superscaler.compiler import Compiled
from superscaler.ir import program as p
from superscaler.ir.fold import Folded
from superscaler.ir.mask import extents
from tests.helpers import single

Code = Sequence[p.Instruction]


def mutants(exact: Compiled, scope: str = "one device") -> Iterator[single.Mutant]:
    """Yield the mutants of a plan: those of `single`, then those of several fields."""
    yield from single.mutants(exact, scope)
    whole = exact.program if scope != "one device" else replace(exact.program, devices=tuple(exact.program.devices))
    program = single.without_frees(whole)
    for ranks in single.scopes(exact, program, scope):
        device = single.device_of(program, ranks[0])
        for kind, what, change in _of_place(device) if scope == "place 1" else _of_device(program, device):
            mutated = single.with_change(program, ranks, change)
            if mutated is not None:
                yield single.Mutant(kind, f"device {ranks[-1]}: {what}", mutated)
    if scope != "place 1":
        yield from _of_starts(program)
    if not isinstance(program.devices, Folded):
        yield from _of_numbers(program)


def _of_place(device: p.Device) -> single.Found:
    """Let places of a fold run other instructions."""
    for n, i in enumerate(device.instructions):
        yield (
            "other place",
            f"{single.shown(i)} is left out",
            single.code_of(lambda code, n=n: [*code[:n], *code[n + 1 :]]),
        )
        freed = p.Free(p.writes(i)[:1])
        yield (
            "other place",
            f"{single.shown(i)} is a Free",
            single.code_of(lambda c, n=n, f=freed: [*c[:n], f, *c[n + 1 :]]),
        )


def _of_device(program: p.Program, device: p.Device) -> single.Found:
    kinds, known = single.shapes(program, device), list[p.Value]()
    loads = {i.out: i for i in device.instructions if isinstance(i, p.Load)}
    for n, i in enumerate(device.instructions):
        told = f"instruction {n}, {single.shown(i)}"
        match i:
            case p.Update():
                for name in (*i.weights, *i.buffers):
                    yield "reload", f"{told}: {name} is loaded again", _inserted(n + 1, [p.Free((name,)), loads[name]])
                for a, b in combinations(i.weights, 2):
                    if loads[a].tensor == loads[b].tensor and extents(loads[a].box) == extents(loads[b].box):
                        what = f"{told}: {a} and {b} have each other's names"
                        yield "other slice", what, _swapped(n, i, a, b, extents(loads[a].box))
            case p.Combine():
                for largest in (False, True):
                    nothing = replace(i, pieces=(), boxes=(), largest=largest)
                    yield "no pieces", f"{told}: the {'largest' if largest else 'sum'} of nothing", _set(n, nothing)
            case p.Accumulate() if not i.in_place:
                new = replace(i, out=i.into, in_place=True)
                yield "in place", f"{told}: in place", _renamed(n, new, i.out, i.into)
            case p.Recv() | p.Collective() | p.Copy():
                for work in p.writes(i):
                    for other in random.Random(f"{n} {work}").sample(known, min(single.TRIED, len(known))):
                        if not kinds[other][0]:
                            what = f"{told}: its handle is {other}"
                            yield "handle", what, _renamed(n, _written(i, work, other), work, other)
            case p.Wait():
                out = i.out._replace(number=99)
                yield "waited twice", f"{told}: waited for again", _inserted(n + 1, [replace(i, out=out)])
        known += [name for name in p.writes(i) if name not in known]


def _set(n: int, new: p.Instruction) -> single.Change:
    return single.code_of(lambda code: [*code[:n], new, *code[n + 1 :]])


def _inserted(n: int, new: Code) -> single.Change:
    return single.code_of(lambda code: [*code[:n], *new, *code[n:]])


def _written(i: Any, old: p.Value, new: p.Value) -> p.Instruction:
    (name,) = p.FIELDS[type(i), p.Role.WRITE]
    made = getattr(i, name)
    is_one = isinstance(made, p.Value)
    return replace(i, **{name: new if is_one else tuple(new if v == old else v for v in made)})


def _renamed(n: int, new: p.Instruction, old: p.Value, name: p.Value) -> single.Change:
    """Return the change of instruction `n` and of the name in what reads it later."""

    def turn(i: p.Instruction) -> p.Instruction:
        for field in p.FIELDS[type(i), p.Role.READ]:
            for path, value in single.leaves(getattr(i, field), (field,)):
                if value == old:
                    i = single.put(i, path, lambda _: name)
        return i

    return single.code_of(lambda code: [*code[:n], new, *map(turn, code[n + 1 :])])


def _swapped(n: int, update: p.Update, a: p.Value, b: p.Value, view: tuple[int, ...]) -> single.Change:
    """Return the change of an update under the names of each other's slice, with the gradients of these."""
    whole, third = tuple((0, size) for size in view), a._replace(number=99)
    copies = [p.Combine(out, (of,), (whole,), view, view, "float64") for out, of in ((third, a), (a, b), (b, third))]
    gradients = list(update.gradients)
    k, m = update.weights.index(a), update.weights.index(b)
    gradients[k], gradients[m] = gradients[m], gradients[k]
    new = [copies[0], p.Free((a,)), copies[1], p.Free((b,)), copies[2], replace(update, gradients=tuple(gradients))]
    return single.code_of(lambda code: [*code[:n], *new, *code[n + 1 :]])


def _of_starts(program: p.Program) -> Iterator[single.Mutant]:
    """Move where the box of a function starts, its size kept."""
    for n, f in enumerate(program.functions):
        for (at, k), (lo, hi) in (((at, k), r) for at, box in enumerate(f.boxes) for k, r in enumerate(box)):
            for by in (-1, 1):
                box = (*f.boxes[at][:k], (lo + by, hi + by), *f.boxes[at][k + 1 :])
                new = replace(f, boxes=(*f.boxes[:at], box, *f.boxes[at + 1 :]))
                functions = (*program.functions[:n], new, *program.functions[n + 1 :])
                what = f"function {n}: boxes.{at}.{k} is {lo + by}:{hi + by}, not {lo}:{hi}"
                yield single.Mutant("function start", what, replace(program, functions=functions))


def _of_numbers(program: p.Program) -> Iterator[single.Mutant]:
    """Let two messages from one device to another have one number, at both ends."""
    for device in program.devices:
        sent: dict[int, list[int]] = {}
        for i in device.instructions:
            if isinstance(i, p.Send):
                sent.setdefault(i.peer, []).append(i.message)
        for peer, numbers in sent.items():
            for a, b in single.pairs(len(numbers)):
                ends = {device.rank: (p.Send, peer), peer: (p.Recv, device.rank)}
                devices = [
                    _numbered(d, *ends.get(d.rank, (p.Free, -1)), numbers[b], numbers[a]) for d in program.devices
                ]
                what = f"device {device.rank}: message {numbers[b]} to device {peer} is {numbers[a]}, too"
                yield single.Mutant("message twice", what, replace(program, devices=tuple(devices)))


def _numbered(device: p.Device, kind: type, peer: int, old: int, new: int) -> p.Device:
    def turn(i: p.Instruction) -> p.Instruction:
        is_it = isinstance(i, kind) and isinstance(i, p.Send | p.Recv) and (i.peer, i.message) == (peer, old)
        return replace(i, message=new) if is_it else i

    return replace(device, instructions=tuple(map(turn, device.instructions)))
