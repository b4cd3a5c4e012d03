"""Mutants of a plan: one instruction, name, number or flag of one device, or of a function, is another; or several are,
that look right one by one: names, numbers and places that belong to others.

Every mutant has a class, the key of a row in the table of `benchmarks/certificate.py`. Equal plans give equal mutants.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod
from typing import Any

from superscaler.compiler import Compiled
from superscaler.ir import program as p
from superscaler.ir.fold import Folded
from superscaler.ir.mask import extents
from superscaler.ops.call import ranges
from tests.helpers.changes import (
    Change,
    Code,
    Path,
    again,
    code_of,
    device_of,
    exchanged,
    later,
    leaves,
    left_out,
    pairs,
    put,
    renamed,
    sets,
    shown,
    spliced,
    turns,
    with_change,
    without_frees,
)

# How many other names are tried for one that is read, and other places for an input of a function.
TRIED = 3
# The class of a changed number, by its field.
NUMBERS = {
    "box": "box", "boxes": "box", "ranges": "box", "at": "at", "view": "view", "shape": "shape", "local": "shape",
    "take": "take or give", "give": "take or give", "group": "group", "peer": "peer", "message": "message",
    "point": "point", "task": "task", "function": "function number", "bytes": "bytes",
}  # fmt: skip
# Fields whose entries belong together: one entry of all of them can be left out.
ENTRIES: Mapping[type, Sequence[tuple[str, ...]]] = {
    p.Combine: [("pieces", "boxes")],
    p.Collective: [("works", "sources", "ways"), ("group",)],
    p.Update: [("weights", "gradients"), ("buffers", "values")],
    p.Loss: [("parts", "counted")],
}
# What moves along a fold.
MOVING = ("box", "at", "flag", "weight box", "weight flag")
# Fields whose names may be left out.
GAPS = ("gradients", "sources", "sums")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

Found = Iterator[tuple[str, str, Change]]
Shapes = Mapping[p.Value, tuple[bool, tuple[int, ...], str]]


@dataclass(frozen=True)
class Mutant:
    kind: str
    what: str
    program: p.Program


def mutants(exact: Compiled, scope: str = "one device") -> Iterator[Mutant]:
    """Yield the mutants of a plan, of a device those without frees before those of the frees.

    One device of each distinct program is changed; of a folded one, all places that were compiled alike ("all places"),
    those at place 1 only, which tell how numbers move along the fold ("place 1"), or a device of the plan in full ("one
    device").
    """
    whole = exact.program if scope != "one device" else replace(exact.program, devices=tuple(exact.program.devices))
    bare = without_frees(whole)
    for ranks in _scopes(exact, bare, scope):
        found = [(bare, change) for change in changes(bare, ranks[0])]
        if scope == "place 1":
            found = [(bare, change) for _, change in found if change[0] in MOVING]
            found += [(bare, change) for change in _of_place(device_of(bare, ranks[0]))]
        else:
            found += [(whole, change) for change in _of_frees(device_of(whole, ranks[0]))]
        for program, (kind, what, change) in found:
            mutated = with_change(program, ranks, change)
            if mutated is not None:
                yield Mutant(kind, f"device {ranks[-1]}: {what}", mutated)
    yield from _of_functions(bare) if scope != "place 1" else ()
    yield from _of_numbers(bare) if not isinstance(bare.devices, Folded) else ()


def _scopes(exact: Compiled, program: p.Program, scope: str) -> list[list[int]]:
    """Return the groups of devices that are changed alike."""
    devices = program.devices
    if not isinstance(devices, Folded):
        # The last device of each program: at the first one boxes start at zero.
        return [[rank] for rank in sorted({name: rank for rank, name in enumerate(exact.emitted.programs)}.values())]
    samples = [devices.fold.samples(base) for base in range(len(devices.fold.devices))]
    return samples if scope == "all places" else [some[1:] for some in samples]


def changes(program: p.Program, rank: int) -> Found:
    """Yield the changes of a device without frees, each with its class and what it is."""
    device, known = device_of(program, rank), list[p.Value]()
    kinds = shapes(program, device)
    for n, i in enumerate(device.instructions):
        told = f"instruction {n}, {shown(i)}"
        yield "delete", f"{told} is left out", left_out(n)
        yield "duplicate", f"{told} runs twice", again(n)
        if n + 1 < len(device.instructions):
            yield "swap", f"{told} runs after the next one", later(n)
        for kind, what, change in _of_instruction(program, i, n):
            yield kind, f"{told}: {what}", change
        for what, change in _of_reads(rank, i, n, known, kinds):
            yield "read", f"{told}: {what}", change
        for kind, what, change in _of_several(device, i, n, known, kinds):
            yield kind, f"{told}: {what}", change
        known += [name for name in p.writes(i) if name not in known]
    yield from _of_weights(program, device)


def _of_instruction(program: p.Program, i: p.Instruction, n: int) -> Found:
    for inner, value in leaves(i):
        name = next(word for word in reversed(inner) if isinstance(word, str))
        where, path = ".".join(map(str, inner)), ("instructions", n, *inner)
        if isinstance(value, bool):
            yield "flag", f"{where} is {not value}", turns(path, lambda x: not x)
        elif isinstance(value, int) and name in NUMBERS:
            for by in (-1, 1):
                yield NUMBERS[name], f"{where} is {value + by}, not {value}", _added(path, by)
        elif name == "dtype":
            other = "float32" if value == "float64" else "float64"
            yield "dtype", f"{where} is {other}", sets(path, other)
        elif name == "tensor" and isinstance(i, p.Load):
            for other in _like(program, value):
                yield "tensor", f"{where} is {other}", sets(path, other)
        elif isinstance(value, p.Value) and isinstance(i, p.Backward | p.Collective) and inner[0] in GAPS:
            yield "gap", f"{where} is nothing", sets(path, None)
    if isinstance(i, p.Collective):
        for kind in KINDS:
            if kind != i.kind:
                yield "kind", f"it is {kind}", sets(("instructions", n, "kind"), kind)
        for a, b in pairs(len(i.group)):
            yield "group order", f"members {a} and {b} change places", _exchanged(n, "group", a, b)
    for group in ENTRIES.get(type(i), ()):
        for k in range(len(getattr(i, group[0]))):
            kind = "piece" if isinstance(i, p.Combine) else "entry"
            yield kind, f"entry {k} of {group[0]} is left out", _entries(n, group, [*range(k), *range(k + 1, 1000)])
            if isinstance(i, p.Combine):
                yield kind, f"entry {k} of {group[0]} is there twice", _entries(n, group, [*range(1000), k])
    for name in (*p.FIELDS[type(i), p.Role.WRITE], *p.FIELDS[type(i), p.Role.SUM]):
        value = getattr(i, name)
        for a, b in pairs(len(value)) if not isinstance(value, p.Value) else ():
            yield "write", f"{name} {a} and {b} change places", _exchanged(n, name, a, b)


def _added(path: Path, by: int) -> Change:
    return turns(path, lambda x: x + by)


def _exchanged(n: int, field: str, a: int, b: int) -> Change:
    return turns(("instructions", n, field), lambda items: exchanged(items, a, b))


def _entries(n: int, group: tuple[str, ...], kept: Sequence[int]) -> Change:
    def turn(i: p.Instruction) -> p.Instruction:
        sides = {name: getattr(i, name) for name in group}
        return replace(i, **{name: tuple(side[k] for k in kept if k < len(side)) for name, side in sides.items()})

    return turns(("instructions", n), turn)


def _of_reads(
    rank: int, i: p.Instruction, n: int, known: Sequence[p.Value], kinds: Shapes
) -> Iterator[tuple[str, Change]]:
    """Let each name that is read be another one of equal shape that was made before."""
    for name in (*p.FIELDS[type(i), p.Role.READ], *p.FIELDS[type(i), p.Role.SUM]):
        for path, old in leaves(getattr(i, name), (name,)):
            if old is None or old not in kinds:
                continue
            others = [v for v in known if v != old and kinds[v] == kinds[old]]
            draw = random.Random(f"{rank} {n} {path}")
            # What is most alike comes first: the same tensor in another microbatch, or from another device.
            others = sorted(draw.sample(others, len(others)), key=lambda v: v.name != old.name)[:TRIED]
            for other in others:
                yield f"{'.'.join(map(str, path))} is {other}, not {old}", sets(("instructions", n, *path), other)


def shapes(program: p.Program, device: p.Device) -> dict[p.Value, tuple[bool, tuple[int, ...], str]]:
    """Return for each name of a device whether it is a handle, its shape (of handles elements), and its dtype."""
    found: dict[p.Value, tuple[bool, tuple[int, ...], str]] = {}
    aliases: dict[Any, list[Any]] = {}
    for i in device.instructions:
        match i:
            case p.Load():
                tensor = program.model.tensors[i.tensor]
                kinds = [(False, tensor.local_shape(extents(i.box)), tensor.dtype)]
            case p.Forward():
                kinds = [(False, *_output(program, program.functions[i.function], o)) for o in range(len(i.outputs))]
                aliases[i.task] = [found[i.inputs[n]] for n in program.functions[i.function].grads]
            case p.Backward():
                kinds = aliases[i.task]
            case p.Collective():
                kinds = [(True, (prod(way.shape),), i.dtype) for way in i.ways]
            case p.Recv():
                kinds = [(True, (prod(i.shape),), i.dtype)]
            case _:
                dtype = next((found[v][2] for v in p.reads(i) if v in found), getattr(i, "dtype", "float64"))
                shape = getattr(i, "shape", None) or next((found[v][1] for v in p.reads(i) if v in found), ())
                kinds = [(False, shape, dtype)] * len(p.writes(i))
        # Of a collective with a root, other devices have no handle.
        rest = i.works if isinstance(i, p.Collective) else p.writes(i)
        outputs = gradients_of(i) if isinstance(i, p.Backward) else rest
        found |= {name: kind for name, kind in zip(outputs, kinds, strict=True) if name is not None}
    return found


def gradients_of(i: p.Backward) -> list[p.Value | None]:
    """Return the names of the gradients of all aliases, or of the sums to which they are added."""
    return [out or total for out, total in zip(i.outputs, i.sums or i.outputs, strict=True)]


def _output(program: p.Program, function: p.Function, number: int) -> tuple[tuple[int, ...], str]:
    name = function.outputs[number]
    at, operand = next((at, o) for at, op in enumerate(function.ops) for o in op.outputs if o.tensor == name)
    tensor = program.model.tensors[name]
    return tensor.local_shape(extents(ranges(operand, tensor, function.boxes[at]))), tensor.dtype


def _like(program: p.Program, name: str) -> list[str]:
    """Return other tensors that a device may hold or load, of equal extents and dtype."""
    tensors = program.model.tensors
    own = tensors[name]
    like = [t for t in tensors.values() if (t.extents, t.dtype) == (own.extents, own.dtype) and t.name != name]
    return [t.name for t in like if (t.kind == "input") == (own.kind == "input") and t.kind != "activation"][:TRIED]


def _of_weights(program: p.Program, device: p.Device) -> Found:
    for k, weight in enumerate(device.weights):
        told = f"weight {weight.name}"
        for inner, value in leaves(weight):
            where, path = ".".join(map(str, inner)), ("weights", k, *inner)
            if isinstance(value, bool):
                kind = "weight host" if inner[0] == "host" else "weight flag"
                yield kind, f"{told}: {where} is {not value}", turns(path, lambda x: not x)
            elif isinstance(value, int) and inner[0] != "name":
                for by in (-1, 1):
                    yield f"weight {inner[0]}", f"{told}: {where} is {value + by}, not {value}", _added(path, by)
        for other in _like(program, weight.tensor):
            yield "weight tensor", f"{told} is {other}", sets(("weights", k, "tensor"), other)
        yield "weight", f"{told} is left out", lambda d, k=k: replace(d, weights=d.weights[:k] + d.weights[k + 1 :])


def _of_frees(device: p.Device) -> Found:
    """Free each name before what reads it last, or before it is made where nothing reads it; and twice."""
    code = device.instructions
    for n, i in enumerate(code):
        for name in i.names if isinstance(i, p.Free) else ():
            last = max(m for m in range(n) if name in (*p.reads(code[m]), *p.writes(code[m])))
            yield "free", f"{name} is freed before instruction {last}, {shown(code[last])}", _freed(n, name, last)
        if isinstance(i, p.Free):
            yield "free", f"{shown(i)} twice", again(n)


def _freed(n: int, name: p.Value, last: int) -> Change:
    def moved(code: Code) -> Code:
        free = code[n]
        assert isinstance(free, p.Free)
        rest = tuple(v for v in free.names if v != name)
        return [*code[:last], p.Free((name,)), *code[last:n], *([p.Free(rest)] if rest else []), *code[n + 1 :]]

    return code_of(moved)


# Several fields.


def _of_place(device: p.Device) -> Found:
    """Let places of a fold run other instructions."""
    for n, i in enumerate(device.instructions):
        yield "other place", f"{shown(i)} is left out", left_out(n)
        yield "other place", f"{shown(i)} is a Free", spliced(n, n + 1, p.Free(p.writes(i)[:1]))


def _of_several(device: p.Device, i: p.Instruction, n: int, known: Sequence[p.Value], kinds: Shapes) -> Found:
    match i:
        case p.Update():
            loads = {load.out: load for load in device.instructions if isinstance(load, p.Load)}
            for name in (*i.weights, *i.buffers):
                yield "reload", f"{name} is loaded again", spliced(n + 1, n + 1, p.Free((name,)), loads[name])
            for a, b in combinations(i.weights, 2):
                if loads[a].tensor == loads[b].tensor and extents(loads[a].box) == extents(loads[b].box):
                    what = f"{a} and {b} have each other's names"
                    yield "other slice", what, _swapped(n, i, a, b, extents(loads[a].box))
        case p.Combine():
            for largest in (False, True):
                nothing = replace(i, pieces=(), boxes=(), largest=largest)
                yield "no pieces", f"the {'largest' if largest else 'sum'} of nothing", spliced(n, n + 1, nothing)
        case p.Accumulate() if not i.in_place:
            yield "in place", "in place", _renamed(n, replace(i, out=i.into, in_place=True), i.out, i.into)
        case p.Recv() | p.Collective() | p.Copy():
            for work in p.writes(i):
                for other in random.Random(f"{n} {work}").sample(known, min(TRIED, len(known))):
                    if not kinds[other][0]:
                        yield "handle", f"its handle is {other}", _renamed(n, _written(i, work, other), work, other)
        case p.Wait():
            twice = replace(i, out=i.out._replace(number=99))
            yield "waited twice", "waited for again", spliced(n + 1, n + 1, twice)


def _written(i: p.Instruction, old: p.Value, new: p.Value) -> p.Instruction:
    (name,) = p.FIELDS[type(i), p.Role.WRITE]
    for path in [path for path, value in leaves(getattr(i, name), (name,)) if value == old]:
        i = put(i, path, new)
    return i


def _renamed(n: int, new: p.Instruction, old: p.Value, name: p.Value) -> Change:
    """Return the change of instruction `n` and of the name in what reads it later."""
    return code_of(lambda code: [*code[:n], new, *renamed(code[n + 1 :], old, name)])


def _swapped(n: int, update: p.Update, a: p.Value, b: p.Value, view: tuple[int, ...]) -> Change:
    """Return the change of an update under the names of each other's slice, with the gradients of these."""
    whole, third = tuple((0, size) for size in view), a._replace(number=99)
    copies = [p.Combine(out, (of,), (whole,), view, view, "float64") for out, of in ((third, a), (a, b), (b, third))]
    new = replace(update, gradients=exchanged(update.gradients, update.weights.index(a), update.weights.index(b)))
    return spliced(n, n + 1, copies[0], p.Free((a,)), copies[1], p.Free((b,)), copies[2], new)


def _of_numbers(program: p.Program) -> Iterator[Mutant]:
    """Let two messages from one device to another have one number, at both ends."""
    for device in program.devices:
        sent: dict[int, list[int]] = {}
        for i in device.instructions:
            if isinstance(i, p.Send):
                sent.setdefault(i.peer, []).append(i.message)
        for peer, numbers in sent.items():
            for a, b in pairs(len(numbers)):
                what = f"device {device.rank}: message {numbers[b]} to device {peer} is {numbers[a]}, too"
                change = {device.rank: (p.Send, peer), peer: (p.Recv, device.rank)}
                ends = {rank: (*end, numbers[b], numbers[a]) for rank, end in change.items()}
                devices = (_numbered(d, *ends[d.rank]) if d.rank in ends else d for d in program.devices)
                yield Mutant("message twice", what, replace(program, devices=tuple(devices)))


def _numbered(device: p.Device, kind: type, peer: int, old: int, new: int) -> p.Device:
    def turn(i: p.Instruction) -> p.Instruction:
        is_it = isinstance(i, kind) and isinstance(i, p.Send | p.Recv) and (i.peer, i.message) == (peer, old)
        return replace(i, message=new) if is_it else i

    return code_of(lambda code: [*map(turn, code)])(device)


# Functions.


def _of_functions(program: p.Program) -> Iterator[Mutant]:
    used = {i.function for d, _ in program.distinct for i in d.instructions if isinstance(i, p.Forward)}
    for n in sorted(used):
        for kind, what, new in _of_function(program, program.functions[n]):
            functions = (*program.functions[:n], new, *program.functions[n + 1 :])
            yield Mutant(f"function {kind}", f"function {n}: {what}", replace(program, functions=functions))


def _of_function(program: p.Program, f: p.Function) -> Iterator[tuple[str, str, p.Function]]:
    for path, value in leaves(f.boxes):
        for by in (-1, 1):
            what = f"boxes.{'.'.join(map(str, path))} is {value + by}, not {value}"
            yield "box", what, put(f, ("boxes", *path), value + by)
    for (at, k), (lo, hi) in (((at, k), r) for at, box in enumerate(f.boxes) for k, r in enumerate(box)):
        for by in (-1, 1):
            what = f"boxes.{at}.{k} is {lo + by}:{hi + by}, not {lo}:{hi}"
            yield "start", what, put(f, ("boxes", at, k), (lo + by, hi + by))
    most = max((c for where in f.coordinates for c in where), default=0)
    for path, value in leaves(f.coordinates):
        for by in (-1, 1):
            if 0 <= value + by <= most:
                what = f"coordinates.{'.'.join(map(str, path))} is {value + by}, not {value}"
                yield "coordinate", what, put(f, ("coordinates", *path), value + by)
    sizes = {n: _input(program, f, n) for n in set(f.input_of.values())}
    for (op, k), n in f.input_of.items():
        others = [m for m in sizes if m != n and sizes[m] == sizes[n]]
        for other in random.Random(f"{op} {k}").sample(others, min(TRIED, len(others))):
            new = replace(f, input_of={**f.input_of, (op, k): other})
            yield "input", f"input {k} of {op} is alias {other}, not {n}", new
    for a, b in pairs(len(f.outputs)):
        yield "output", f"outputs {a} and {b} change places", replace(f, outputs=exchanged(f.outputs, a, b))
    for name, count in (("grads", len(f.inputs)), ("wide", len(f.inputs)), ("again", len(f.inputs)),
                        ("saved", len(f.outputs))):  # fmt: skip
        numbers = getattr(f, name)
        for n in range(count):
            other = tuple(k for k in numbers if k != n) if n in numbers else (*numbers, n)
            yield "gradients", f"{name} is {other}, not {numbers}", replace(f, **{name: other})
    yield from _of_ops(program, f)


def _input(program: p.Program, f: p.Function, number: int) -> Any:
    """Return the shape and dtype of an alias of a function."""
    (name, k) = next(use for use, n in f.input_of.items() if n == number)
    at = next(at for at, op in enumerate(f.ops) if op.name == name)
    tensor = program.model.tensors[f.ops[at].inputs[k].tensor]
    return tensor.local_shape(extents(ranges(f.ops[at].inputs[k], tensor, f.boxes[at]))), tensor.dtype


def _of_ops(program: p.Program, f: p.Function) -> Iterator[tuple[str, str, p.Function]]:
    tensors = program.model.tensors
    for k, op in enumerate(f.ops):
        sizes = [(tensors[o.tensor].extents, tensors[o.tensor].dtype) for o in (*op.inputs, *op.outputs)]
        kept = [m for m in range(len(f.ops)) if m != k]
        parts = {name: tuple(getattr(f, name)[m] for m in kept) for name in ("ops", "boxes", "coordinates")}
        yield "op", f"{op.name} is left out", replace(f, **parts)
        yield "op", f"{op.name} is of the next module", put(f, ("ops", k, "name"), f"{op.name}_1")
        if len(op.inputs) > 1 and sizes[0] == sizes[1]:
            yield "op", f"{op.name} reads its inputs in reverse", put(f, ("ops", k, "inputs"), op.inputs[::-1])
        if len(set(sizes)) == 1 and len(op.inputs) == 1 and len(op.args) == 1:
            other = "aten.neg.default" if op.target != "aten.neg.default" else "aten.tanh.default"
            yield "op", f"{op.name} is {other}", put(f, ("ops", k), replace(op, target=other, kwargs=()))
