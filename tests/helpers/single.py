"""Single mutations of a program: one instruction, name, number or flag of one device, or of a function, is another.

Every mutant has a class, the key of a row in the table of `benchmarks/certificate.py`. Equal plans give equal mutants.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

from superscaler.compiler import Compiled
from superscaler.ir import program as p
from superscaler.ir.fold import Folded
from superscaler.ir.mask import extents
from superscaler.ops.call import ranges

Change = Callable[[p.Device], p.Device]
Path = tuple[str | int, ...]
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


@dataclass(frozen=True)
class Mutant:
    kind: str
    what: str
    program: p.Program


def mutants(exact: Compiled, scope: str = "one device") -> Iterator[Mutant]:
    """Yield the mutants of a plan: first those without frees, then those of the frees.

    One device of each distinct program is changed; of a folded one, all places that were compiled alike ("all places"),
    those at place 1 only, which tell how numbers move along the fold ("place 1"), or a device of the plan in full ("one
    device").
    """
    whole = exact.program if scope != "one device" else replace(exact.program, devices=tuple(exact.program.devices))
    program = without_frees(whole)
    for ranks in scopes(exact, program, scope):
        for kind, what, change in _of_device(program, device_of(program, ranks[0])):
            mutated = with_change(program, ranks, change) if scope != "place 1" or kind in MOVING else None
            if mutated is not None:
                yield Mutant(kind, f"device {ranks[-1]}: {what}", mutated)
        for what, change in _of_frees(device_of(whole, ranks[0])) if scope != "place 1" else ():
            mutated = with_change(whole, ranks, change)
            if mutated is not None:
                yield Mutant("free", f"device {ranks[-1]}: {what}", mutated)
    for kind, what, functions in _of_functions(program) if scope != "place 1" else ():
        yield Mutant(kind, what, replace(program, functions=functions))


def scopes(exact: Compiled, program: p.Program, scope: str) -> list[list[int]]:
    """Return the groups of devices that are changed alike."""
    devices = program.devices
    if not isinstance(devices, Folded):
        # The last device of each program: at the first one boxes start at zero.
        return [[rank] for rank in sorted({name: rank for rank, name in enumerate(exact.emitted.programs)}.values())]
    samples = [devices.fold.samples(base) for base in range(len(devices.fold.devices))]
    return samples if scope == "all places" else [some[1:] for some in samples]


def device_of(program: p.Program, rank: int) -> p.Device:
    devices = program.devices
    return devices.compiled[rank] if isinstance(devices, Folded) else devices[rank]


def with_change(program: p.Program, ranks: Sequence[int], change: Change) -> p.Program | None:
    """Return the program with some devices changed, None where nothing is."""
    new = {rank: change(device_of(program, rank)) for rank in ranks}
    if all(new[rank] == device_of(program, rank) for rank in ranks):
        return None
    devices = program.devices
    if not isinstance(devices, Folded):
        return replace(program, devices=tuple(new.get(d.rank, d) for d in devices))
    if any(not 0 <= d < devices.world for device in new.values() for d in _peers(device)):
        return None
    folded = replace(devices, compiled={**devices.compiled, **new})
    alike = (list(map(type, d.instructions)) for d in folded.compiled.values())
    if any(kinds != list(map(type, new[ranks[0]].instructions)) for kinds in alike) and len(new) < len(folded.compiled):
        return replace(program, devices=folded)
    # What does not move along a fold is read at place 0 only.
    is_new = any(a != b for a, b in zip(folded, devices, strict=True))
    return replace(program, devices=folded) if is_new else None


def _peers(device: p.Device) -> Iterator[int]:
    for i in device.instructions:
        yield from getattr(i, "group", ())
        yield getattr(i, "peer", 0)


def without_frees(program: p.Program) -> p.Program:
    def bare(device: p.Device) -> p.Device:
        return replace(device, instructions=tuple(i for i in device.instructions if not isinstance(i, p.Free)))

    return program.changed(bare)


# Paths to what an instruction holds.


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield names, numbers, flags and texts in tuples and dataclasses, each with how to get there."""
    if isinstance(value, p.Value) or not (isinstance(value, tuple) or is_dataclass(value)):
        yield path, value
    elif isinstance(value, tuple):
        for k, item in enumerate(value):
            yield from leaves(item, (*path, k))
    else:
        for f in fields(value):
            yield from leaves(getattr(value, f.name), (*path, f.name))


def put(value: Any, path: Path, turn: Callable[[Any], Any]) -> Any:
    """Return the value with what is at a path turned into something else."""
    if not path:
        return turn(value)
    at, rest = path[0], path[1:]
    if isinstance(at, str):
        return replace(value, **{at: put(getattr(value, at), rest, turn)})
    items = [put(v, rest, turn) if k == at else v for k, v in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def _at(n: int, turn: Callable[[p.Instruction], p.Instruction]) -> Change:
    """Return the change of instruction `n`."""
    return code_of(lambda code: [*code[:n], turn(code[n]), *code[n + 1 :]])


def code_of(turn: Callable[[Sequence[p.Instruction]], Sequence[p.Instruction]]) -> Change:
    return lambda device: replace(device, instructions=tuple(turn(device.instructions)))


def _set(n: int, path: Path, new: Any) -> Change:
    return _at(n, lambda i: put(i, path, lambda _: new))


def _add(n: int, path: Path, by: int) -> Change:
    return _at(n, lambda i: put(i, path, lambda x: x + by))


Found = Iterator[tuple[str, str, Change]]


def _of_device(program: p.Program, device: p.Device) -> Found:
    kinds = shapes(program, device)
    known: list[p.Value] = []
    for n, i in enumerate(device.instructions):
        told = f"instruction {n}, {shown(i)}"
        yield "delete", f"{told} is left out", code_of(lambda code, n=n: [*code[:n], *code[n + 1 :]])
        yield "duplicate", f"{told} runs twice", code_of(lambda code, n=n: [*code[: n + 1], *code[n:]])
        if n + 1 < len(device.instructions):
            yield (
                "swap",
                f"{told} runs after the next one",
                code_of(lambda code, n=n: [*code[:n], code[n + 1], code[n], *code[n + 2 :]]),
            )
        for kind, what, change in _of_instruction(program, i, n):
            yield kind, f"{told}: {what}", change
        for what, change in _of_reads(device.rank, i, n, known, kinds):
            yield "read", f"{told}: {what}", change
        known += [name for name in p.writes(i) if name not in known]
    yield from _of_weights(program, device)


def _of_instruction(program: p.Program, i: p.Instruction, n: int) -> Found:
    for path, value in leaves(i):
        name = next(word for word in reversed(path) if isinstance(word, str))
        where = ".".join(map(str, path))
        if isinstance(value, bool):
            yield "flag", f"{where} is {not value}", _at(n, lambda i, to=path: put(i, to, lambda x: not x))
        elif isinstance(value, int) and name in NUMBERS:
            for by in (-1, 1):
                yield NUMBERS[name], f"{where} is {value + by}, not {value}", _add(n, path, by)
        elif name == "dtype":
            other = "float32" if value == "float64" else "float64"
            yield "dtype", f"{where} is {other}", _set(n, path, other)
        elif name == "tensor" and isinstance(i, p.Load):
            for other in _like(program, value):
                yield "tensor", f"{where} is {other}", _set(n, path, other)
        elif isinstance(value, p.Value) and isinstance(i, p.Backward | p.Collective) and path[0] in GAPS:
            yield "gap", f"{where} is nothing", _set(n, path, None)
    if isinstance(i, p.Collective):
        for kind in KINDS:
            if kind != i.kind:
                yield "kind", f"it is {kind}", _set(n, ("kind",), kind)
        for a, b in pairs(len(i.group)):
            yield (
                "group order",
                f"members {a} and {b} change places",
                _at(n, lambda i, a=a, b=b: replace(i, group=_exchanged(i.group, a, b))),
            )
    for group in ENTRIES.get(type(i), ()):
        for k in range(len(getattr(i, group[0]))):
            kind = "piece" if isinstance(i, p.Combine) else "entry"
            yield kind, f"entry {k} of {group[0]} is left out", _entries(n, group, [*range(k), *range(k + 1, 1000)])
            if isinstance(i, p.Combine):
                yield kind, f"entry {k} of {group[0]} is there twice", _entries(n, group, [*range(1000), k])
    for name in (*p.FIELDS[type(i), p.Role.WRITE], *p.FIELDS[type(i), p.Role.SUM]):
        value = getattr(i, name)
        if not isinstance(value, p.Value):
            for a, b in pairs(len(value)):
                change = _at(n, lambda i, f=name, a=a, b=b: replace(i, **{f: _exchanged(getattr(i, f), a, b)}))
                yield "write", f"{name} {a} and {b} change places", change


def _entries(n: int, group: tuple[str, ...], kept: Sequence[int]) -> Change:
    def turn(i: p.Instruction) -> p.Instruction:
        sides = {name: getattr(i, name) for name in group}
        return replace(i, **{name: tuple(side[k] for k in kept if k < len(side)) for name, side in sides.items()})

    return _at(n, turn)


def pairs(count: int) -> list[tuple[int, int]]:
    """Return neighbours, and the ends."""
    return [*pairwise(range(count)), *([(0, count - 1)] if count > 2 else [])]


def _exchanged(items: tuple[Any, ...], a: int, b: int) -> tuple[Any, ...]:
    order = list(range(len(items)))
    order[a], order[b] = b, a
    return tuple(items[k] for k in order)


def _of_reads(
    rank: int, i: p.Instruction, n: int, known: Sequence[p.Value], kinds: Mapping[p.Value, Any]
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
                yield f"{'.'.join(map(str, path))} is {other}, not {old}", _set(n, path, other)


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

        def turned(turn: Callable[[Any], Any], k: int = k) -> Change:
            return lambda d: replace(d, weights=(*d.weights[:k], turn(d.weights[k]), *d.weights[k + 1 :]))

        for path, value in leaves(weight):
            where = ".".join(map(str, path))
            if isinstance(value, bool):
                change = turned(lambda w, to=path: put(w, to, lambda x: not x))
                yield "weight host" if path[0] == "host" else "weight flag", f"{told}: {where} is {not value}", change
            elif isinstance(value, int) and path[0] != "name":
                for by in (-1, 1):
                    change = turned(lambda w, to=path, by=by: put(w, to, lambda x: x + by))
                    yield f"weight {path[0]}", f"{told}: {where} is {value + by}, not {value}", change
        for other in _like(program, weight.tensor):
            yield "weight tensor", f"{told} is {other}", turned(lambda w, t=other: replace(w, tensor=t))
        yield "weight", f"{told} is left out", lambda d, k=k: replace(d, weights=d.weights[:k] + d.weights[k + 1 :])


def _of_frees(device: p.Device) -> Iterator[tuple[str, Change]]:
    """Free each name before what reads it last, or before it is made where nothing reads it; and twice."""
    code = device.instructions
    for n, i in enumerate(code):
        for name in i.names if isinstance(i, p.Free) else ():
            last = max(m for m in range(n) if name in (*p.reads(code[m]), *p.writes(code[m])))

            def moved(code: Sequence[p.Instruction], n: int = n, name: p.Value = name, last: int = last) -> Any:
                kept = replace(code[n], names=tuple(v for v in code[n].names if v != name))
                return [*code[:last], p.Free((name,)), *code[last:n], *([kept] if kept.names else []), *code[n + 1 :]]

            yield f"{name} is freed before instruction {last}, {shown(code[last])}", code_of(moved)
        if isinstance(i, p.Free):
            yield f"{shown(i)} twice", code_of(lambda code, n=n: [*code[: n + 1], *code[n:]])


def shown(i: p.Instruction) -> str:
    """Return an instruction by its kind and the names that it makes, or else reads."""
    names = p.writes(i) or (i.names if isinstance(i, p.Free) else p.reads(i))
    return f"{type(i).__name__} of {', '.join(map(str, names[:3]))}{' ...' if len(names) > 3 else ''}"


# Functions.


def _of_functions(program: p.Program) -> Iterator[tuple[str, str, tuple[p.Function, ...]]]:
    used = {i.function for d, _ in program.distinct for i in d.instructions if isinstance(i, p.Forward)}
    for n, function in enumerate(program.functions):
        for kind, what, new in _of_function(program, function) if n in used else ():
            yield (
                f"function {kind}",
                f"function {n}: {what}",
                (*program.functions[:n], new, *program.functions[n + 1 :]),
            )


def _of_function(program: p.Program, f: p.Function) -> Iterator[tuple[str, str, p.Function]]:
    for path, value in leaves(f.boxes):
        for by in (-1, 1):
            new = put(f.boxes, path, lambda x, by=by: x + by)
            yield "box", f"boxes.{'.'.join(map(str, path))} is {value + by}, not {value}", replace(f, boxes=new)
    most = max((c for where in f.coordinates for c in where), default=0)
    for path, value in leaves(f.coordinates):
        for by in (-1, 1):
            if 0 <= value + by <= most:
                new = put(f.coordinates, path, lambda x, by=by: x + by)
                what = f"coordinates.{'.'.join(map(str, path))} is {value + by}, not {value}"
                yield "coordinate", what, replace(f, coordinates=new)
    sizes = {n: _input(program, f, n) for n in set(f.input_of.values())}
    for (op, k), n in f.input_of.items():
        others = [m for m in sizes if m != n and sizes[m] == sizes[n]]
        for other in random.Random(f"{op} {k}").sample(others, min(TRIED, len(others))):
            new = replace(f, input_of={**f.input_of, (op, k): other})
            yield "input", f"input {k} of {op} is alias {other}, not {n}", new
    for a, b in pairs(len(f.outputs)):
        yield "output", f"outputs {a} and {b} change places", replace(f, outputs=_exchanged(f.outputs, a, b))
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

        def turned(new: Any, k: int = k) -> p.Function:
            return replace(f, ops=(*f.ops[:k], new, *f.ops[k + 1 :]))

        sizes = [(tensors[o.tensor].extents, tensors[o.tensor].dtype) for o in (*op.inputs, *op.outputs)]
        kept = [m for m in range(len(f.ops)) if m != k]
        parts = {name: tuple(getattr(f, name)[m] for m in kept) for name in ("ops", "boxes", "coordinates")}
        yield "op", f"{op.name} is left out", replace(f, **parts)
        yield "op", f"{op.name} is of the next module", turned(replace(op, name=f"{op.name}_1"))
        if len(op.inputs) > 1 and sizes[0] == sizes[1]:
            yield "op", f"{op.name} reads its inputs in reverse", turned(replace(op, inputs=op.inputs[::-1]))
        if len(set(sizes)) == 1 and len(op.inputs) == 1 and len(op.args) == 1:
            other = "aten.neg.default" if op.target != "aten.neg.default" else "aten.tanh.default"
            yield "op", f"{op.name} is {other}", turned(replace(op, target=other, kwargs=()))
