"""Changes of a program: of what its instructions hold, of the code of a device, and of the devices of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

from superscaler.ir import program as p
from superscaler.ir.fold import Folded

Code = Sequence[p.Instruction]
Change = Callable[[p.Device], p.Device]
Path = tuple[str | int, ...]


# What a device, an instruction or a function holds.


def leaves(value: Any, path: Path = (), names: bool = True) -> Iterator[tuple[Path, Any]]:
    """Yield names, numbers, flags and texts in tuples and dataclasses, each with how to get there; or not whole `names`
    but what is in them.
    """
    if (names and isinstance(value, p.Value)) or not (isinstance(value, tuple) or is_dataclass(value)):
        yield path, value
    elif isinstance(value, tuple):
        for k, item in enumerate(value):
            yield from leaves(item, (*path, k), names)
    else:
        for f in fields(value):
            if f.compare:
                yield from leaves(getattr(value, f.name), (*path, f.name), names)


def turned(value: Any, path: Path, turn: Callable[[Any], Any]) -> Any:
    """Return the value with what is at a path turned into something else."""
    if not path:
        return turn(value)
    at, rest = path[0], path[1:]
    if isinstance(at, str):
        return replace(value, **{at: turned(getattr(value, at), rest, turn)})
    items = [turned(v, rest, turn) if k == at else v for k, v in enumerate(value)]
    return type(value)(*items) if hasattr(value, "_fields") else tuple(items)


def put(value: Any, path: Path, new: Any) -> Any:
    return turned(value, path, lambda _: new)


def exchanged(items: tuple[Any, ...], a: int, b: int) -> tuple[Any, ...]:
    order = list(range(len(items)))
    order[a], order[b] = b, a
    return tuple(items[k] for k in order)


def pairs(count: int) -> list[tuple[int, int]]:
    """Return neighbours, and the ends."""
    return [*pairwise(range(count)), *([(0, count - 1)] if count > 2 else [])]


def shown(i: p.Instruction) -> str:
    """Return an instruction by its kind and the names that it makes, or else reads."""
    names = p.writes(i) or (i.names if isinstance(i, p.Free) else p.reads(i))
    return f"{type(i).__name__} of {', '.join(map(str, names[:3]))}{' ...' if len(names) > 3 else ''}"


# The code of a device.


def code_of(turn: Callable[[Code], Code]) -> Change:
    return lambda device: replace(device, instructions=tuple(turn(device.instructions)))


def turns(path: Path, turn: Callable[[Any], Any]) -> Change:
    """Return the change of what is at a path from a device: `("instructions", 3, "box")`."""
    return lambda device: turned(device, path, turn)


def sets(path: Path, new: Any) -> Change:
    return turns(path, lambda _: new)


def spliced(start: int, stop: int, *new: p.Instruction) -> Change:
    """Return the change of instructions `start` to below `stop` into others."""
    return code_of(lambda code: [*code[:start], *new, *code[stop:]])


def left_out(n: int) -> Change:
    return spliced(n, n + 1)


def again(n: int) -> Change:
    return code_of(lambda code: [*code[: n + 1], *code[n:]])


def later(n: int) -> Change:
    """Return the change of instruction `n` for the one after it."""
    return code_of(lambda code: [*code[:n], code[n + 1], code[n], *code[n + 2 :]])


def at(code: Code, of: type, /, **told: Any) -> int:
    """Return where the first instruction of a kind is whose fields read as given, or have what reads so."""

    def is_it(value: Any, told: Any) -> bool:
        several = isinstance(value, tuple) and not hasattr(value, "_fields")
        return any(is_it(v, told) for v in value) if several else str(value) == str(told)

    found = (n for n, i in enumerate(code) if isinstance(i, of))
    return next(n for n in found if all(is_it(getattr(code[n], name), it) for name, it in told.items()))


def named(name: str) -> p.Value:
    return p.Value.parse(name)


def renamed(code: Code, old: p.Value, new: p.Value) -> list[p.Instruction]:
    """Return code in which all that reads a value reads another one."""

    def turn(i: p.Instruction) -> p.Instruction:
        fields = p.FIELDS[type(i), p.Role.READ]
        for path in [path for name in fields for path, v in leaves(getattr(i, name), (name,)) if v == old]:
            i = put(i, path, new)
        return i

    return [turn(i) for i in code]


# The devices of a plan.


def without_frees(program: p.Program) -> p.Program:
    return program.changed(code_of(lambda code: [i for i in code if not isinstance(i, p.Free)]))


def codes(program: p.Program) -> list[list[p.Instruction]]:
    """Return the code of all devices without frees, which a change would have to keep up to date."""
    return [list(d.instructions) for d in without_frees(program).devices]


def with_codes(program: p.Program, code: Sequence[Code]) -> p.Program:
    devices = zip(program.devices, code, strict=True)
    return replace(program, devices=tuple(replace(d, instructions=tuple(c)) for d, c in devices))


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
        yield from i.group
        if i.meets is p.Meets.PEER:
            yield i.peer
