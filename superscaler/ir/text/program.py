"""Programs as text, an instruction a line, and back. A plan directory holds this form beside the code.

    program of 4 devices
    mesh {"dp": 2, "tp": 2}
    function 0 "layers.0": [["x", "layers.0.weight"], ["linear"]]
    gradients {"grads": [1], "saved": [0]}
      linear (%0, %1) 0:16@0 0:32@1 0:64@1
    devices 0 1 2 3
      layers_0_weight = Weight(tensor='layers.0.weight', box=T[0], trained=True, counted=T[1], group=0)
      linear = Forward(task=s0, function=0, at=T[2], inputs=(x, layers_0_weight))
      T[2] = [(0, 0), (16, 0), (32, 0), (48, 0)]

Each section is one program. T lists the fields that differ between its devices, in the order of the devices. After
`loop 30 of 10` come the first two of a loop's 30 repetitions, 10 instructions each. In a folded program, `fold` lists
the devices by base and place; a section then has the devices of one base at place 0 and at place 1 of each axis. In a
function an op has its inputs (%k is input k of the function) and, per index, the start, the end and the coordinate of a
part. `gradients` has the numbers of inputs and outputs of a function with gradients, as `Function` names them.
"""

import ast
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from superscaler.errors import InputError
from superscaler.groups import group_by
from superscaler.ir import program as p
from superscaler.ir.cohorts import form
from superscaler.ir.fold import Fold, Folded
from superscaler.ir.loops import Loop, Rolled, Run, runs_of
from superscaler.ir.model import Model

_DATA = (p.Role.EVEN, p.Role.GROUP, p.Role.PEER, p.Role.MESSAGE)
# Left out where they are not set.
_FLAGS = {
    (k.__name__, f.name): f.default
    for k in (p.Weight, *p.KINDS)
    for f in fields(k)
    if f.default is False or f.default == "" or f.name in ("again", "root", "sums", "alive")
}
_ROLES: Mapping[str, Mapping[str, p.Role | None]] = {kind.__name__: p.roles(kind) for kind in (p.Weight, *p.KINDS)}
_GRADIENTS = ("grads", "wide", "again", "saved")
_KINDS: Mapping[str, type] = {"Weight": p.Weight, **{kind.__name__: kind for kind in p.KINDS}}


def print_program(program: p.Program) -> str:
    """Return a program as text; without its notes."""
    return "".join(f"{line}\n" for line in _lines(program))


def _lines(program: p.Program) -> Iterator[str]:
    devices = program.devices
    yield f"program of {program.world} devices"
    if program.mesh:
        yield f"mesh {json.dumps(program.mesh)}"
    if isinstance(devices, Folded):
        yield f"fold {json.dumps(devices.fold.devices.tolist())}"
    for number, function in enumerate(program.functions):
        yield f"function {number} {json.dumps(function.module)}: {json.dumps([function.inputs, function.outputs])}"
        if gradients := {name: some for name in _GRADIENTS if (some := getattr(function, name))}:
            yield f"gradients {json.dumps(gradients)}"
        for op, box, where in zip(function.ops, function.boxes, function.coordinates, strict=True):
            given = (function.input_of.get((op.name, k)) for k in range(len(op.inputs)))
            shown = ", ".join("." if n is None else f"%{n}" for n in given)
            spans = " ".join(f"{lo}:{hi}@{c}" for (lo, hi), c in zip(box, where, strict=True))
            yield f"  {op.name} ({shown}) {spans}".rstrip()
    if not isinstance(devices, Folded):
        sections = list(group_by(devices, form).values())
    else:
        sections = [[devices.compiled[d] for d in devices.fold.samples(b)] for b in range(len(devices.fold.devices))]
        sections += [[devices.idle]]
    for section in sections:
        yield f"devices {' '.join(str(device.rank) for device in section)}"
        yield from (f"  {line}" for line in _section(section))


def _section(devices: Sequence[p.Device]) -> Iterator[str]:
    tables: dict[tuple[Any, ...], int] = {}
    yield from _rows(zip(*(d.weights for d in devices), strict=True), tables)
    for some in zip(*(runs_of(device.instructions) for device in devices), strict=True):
        instructions = [run.first + run.second if isinstance(run, Loop) else run for run in some]
        if isinstance(loop := some[0], Loop):
            yield f"loop {loop.count} of {len(loop.first)}"
        yield from _rows(zip(*instructions, strict=True), tables)


def _rows(each: Iterable[tuple[Any, ...]], tables: dict[tuple[Any, ...], int]) -> Iterator[str]:
    for rows in each:
        known = len(tables)
        kind, made, given = type(rows[0]).__name__, [], []
        for name, role in _ROLES[kind].items():
            if role is p.Role.NOTE:
                continue
            values = tuple(getattr(row, name) for row in rows)
            if values[0] == _FLAGS.get((kind, name)):
                continue
            if role is p.Role.WRITE:
                made = [_text(v) for v in ((values[0],) if isinstance(values[0], p.Value) else values[0])]
            elif role in _DATA and any(value != values[0] for value in values[1:]):
                given.append(f"{name}=T[{tables.setdefault(values, len(tables))}]")
            else:
                given.append(f"{name}={_text(values[0])}")
        yield from (f"T[{n}] = {_text(list(values))}" for values, n in list(tables.items())[known:])
        yield f"{', '.join(made)} = {kind}({', '.join(given)})" if made else f"{kind}({', '.join(given)})"


def _text(value: Any) -> str:
    if value is None:
        return "_"
    if isinstance(value, p.Value | p.Task):
        return str(value)
    if isinstance(value, p.CollectiveArg):
        # Few collectives are uneven.
        return _text(tuple(getattr(value, f.name) for f in fields(p.CollectiveArg) if value.sizes or f.name != "sizes"))
    if isinstance(value, tuple):
        return f"({', '.join(map(_text, value))}{',' * (len(value) == 1)})"
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, list) else repr(value)


def parse_program(text: str, model: Model) -> p.Program:
    """Read the text of `print_program`. Raises InputError with the line that cannot be read."""
    reader = _Reader(model)
    for number, line in enumerate(text.splitlines(), 1):
        try:
            reader.read(line)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, SyntaxError, AssertionError) as error:
            raise InputError(
                f"line {number} of the program, {line[:120]!r}, cannot be read: {error or type(error).__name__}."
            ) from None
    try:
        return reader.program()
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise InputError(f"the text of the program is incomplete ({error}).") from None


class _Reader:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.ops = {op.name: op for op in model.ops}
        self.world = 0
        self.mesh: dict[str, int] = {}
        self.fold: Fold | None = None
        self.functions: list[dict[str, Any]] = []
        self.sections: list[tuple[list[int], list[list[Any]]]] = []
        self.tables: list[list[Any]] = []

    def read(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if not self.world and word != "program":
            raise ValueError("the first line is 'program of N devices'; lines are missing before this one")
        match word:
            case "program":
                self.world = int(rest.split()[1])
            case "mesh":
                self.mesh = {str(axis): int(size) for axis, size in json.loads(rest).items()}
                if math.prod(self.mesh.values()) != self.world:
                    raise ValueError(f"the mesh does not have {self.world} devices")
            case "fold":
                self.fold = Fold(np.array(json.loads(rest), dtype=np.int64))
            case "function":
                head, _, ends = rest.partition(": ")
                inputs, outputs = (tuple(side) for side in json.loads(ends))
                module = json.loads(head.partition(" ")[2])
                self.functions.append(
                    {"inputs": inputs, "outputs": outputs, "module": module, "ops": [], "input_of": {}}
                )
            case "gradients" if self.functions:
                self.functions[-1] |= {name: tuple(json.loads(rest).get(name, ())) for name in _GRADIENTS}
            case "devices":
                ranks = [int(rank) for rank in rest.split()]
                self.sections.append((ranks, [[] for _ in ranks]))
                self.tables = []
            case "" if self.sections:
                self._line(line.strip())
            case "" if self.functions:
                self._op(self.functions[-1], line)
            case _:
                raise ValueError(
                    "a line starts with program, mesh, fold, function or devices; after function also with gradients, "
                    "and after function or devices with two spaces"
                )

    def _op(self, function: dict[str, Any], line: str) -> None:
        name, _, rest = line.strip().partition(" (")
        given, _, spans = rest.partition(")")
        op = self.ops[name]
        for k, source in enumerate(given.split(", ") if given else []):
            if source != ".":
                function["input_of"][name, k] = int(source[1:])
        cut = [span.replace("@", ":").split(":") for span in spans.split()]
        box, where = tuple((int(lo), int(hi)) for lo, hi, _ in cut), tuple(int(c) for *_, c in cut)
        if len(box) != len(op.indices):
            raise ValueError(f"{name} has {len(op.indices)} indices, not {len(box)}")
        function["ops"].append((op, box, where))

    def _line(self, line: str) -> None:
        if line.startswith("loop "):
            count, length = map(int, line.removeprefix("loop ").split(" of "))
            for code in self.sections[-1][1]:
                code.append(_Repeat(count, length))
            return
        statement = ast.parse(line).body[0]
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
            self.tables.append(self._value(statement.value))
            return
        call = statement.value  # type: ignore[attr-defined]
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        made = self._value(targets[0]) if targets else ()
        kind, given = call.func.id, {k.arg: k.value for k in call.keywords}
        for row, code in enumerate(self.sections[-1][1]):
            code.append(self._made(kind, made, given, row))

    def _made(self, kind: str, made: Any, given: Mapping[str | None, ast.expr], row: int) -> p.Instruction | p.Weight:
        found: dict[str, Any] = {}
        for name, role in _ROLES[kind].items():
            if role is p.Role.NOTE:
                continue
            if role is p.Role.WRITE:
                is_one = name in ("out", "work", "name")
                found[name] = made if is_one or (isinstance(made, tuple) and not isinstance(made, p.Value)) else (made,)
                continue
            node = given.get(name) if (kind, name) in _FLAGS else given[name]
            if node is None:
                continue
            if isinstance(node, ast.Subscript):
                found[name] = self.tables[ast.literal_eval(node.slice)][row]
            elif role is p.Role.TASK:
                assert isinstance(node, ast.Name)
                found[name] = p.Task.parse(node.id)
            else:
                found[name] = self._value(node)
        if kind == "Collective":
            found["ways"] = tuple(p.CollectiveArg(*way) for way in found["ways"])
        if len(found) != len(given) + any(role is p.Role.WRITE for role in _ROLES[kind].values()):
            raise ValueError(f"{kind} has other fields")
        made_of: p.Instruction | p.Weight = _KINDS[kind](**found)
        return made_of

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return None if node.id == "_" else p.Value.parse(node.id)
        if isinstance(node, ast.Tuple):
            return tuple(map(self._value, node.elts))
        return list(map(self._value, node.elts)) if isinstance(node, ast.List) else ast.literal_eval(node)

    def program(self) -> p.Program:
        if not self.sections:
            raise ValueError("it has no devices")
        functions = []
        for f in self.functions:
            ops, boxes, where = zip(*f.pop("ops"), strict=True)
            functions.append(p.Function(ops=ops, boxes=boxes, coordinates=where, **f))
        devices = {
            rank: _device(rank, code) for ranks, some in self.sections for rank, code in zip(ranks, some, strict=True)
        }
        if self.fold is None:
            # Compare the number first: `world` comes from the text and may be huge.
            if len(devices) != self.world or sorted(devices) != list(range(self.world)):
                raise ValueError(f"it has {len(devices)} of {self.world} devices")
            ordered = tuple(devices[rank] for rank in range(self.world))
            return p.Program(self.model, tuple(functions), ordered, mesh=self.mesh)
        last = self.sections[-1][0][0]
        compiled = {d: devices[d] for b in range(len(self.fold.devices)) for d in self.fold.samples(b)}
        folded = Folded(self.fold, compiled, devices[last], self.world)
        return p.Program(self.model, tuple(functions), folded, mesh=self.mesh)


class _Repeat(NamedTuple):
    times: int
    length: int


def _device(rank: int, rows: Sequence[Any]) -> p.Device:
    weights, code = (tuple(row for row in rows if isinstance(row, p.Weight) == is_one) for is_one in (True, False))
    runs, here = list[Run](), 0
    for at, repeat in ((n, row) for n, row in enumerate(code) if isinstance(row, _Repeat)):
        body, end = code[at + 1 :], at + 1 + 2 * repeat.length
        loop = Loop(body[: repeat.length], body[repeat.length : end - at - 1], repeat.times)
        if repeat.times < 2 or end > len(code) or tuple(loop.repetition(1)) != loop.second:
            raise ValueError(f"device {rank} has a loop whose first two repetitions are not {2 * repeat.length} lines")
        runs += [code[here:at], loop]
        here = end
    return p.Device(rank, weights, Rolled((*(run for run in runs if len(run)), code[here:])) if runs else code)
