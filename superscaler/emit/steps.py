"""Device programs -> Python: one `step` function per distinct program; peers, groups and slices become data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from superscaler.emit.segments import draws_of, emit_segments
from superscaler.ir.program import (
    Accumulate,
    Backward,
    Bucket,
    Collective,
    Combine,
    Device,
    Forward,
    Free,
    Instruction,
    Load,
    Loss,
    Program,
    Recv,
    Send,
    Slice,
    Update,
    Wait,
)  # fmt: skip

HEAD = '''"""What {devices} in one training step. Written by superscaler; peers, groups and slices are in plan.json."""

import {segments}


def step(rt):
'''


@dataclass(slots=True)
class Tables:
    """What differs between devices that run one program, by the number under which the code asks for it."""

    weights: list[dict[str, Any]] = field(default_factory=list)
    inputs: list[tuple[str, Any]] = field(default_factory=list)
    groups: list[tuple[int, ...]] = field(default_factory=list)
    messages: list[tuple[int, int]] = field(default_factory=list)
    boxes: list[Any] = field(default_factory=list)
    draws: list[list[dict[str, Any]]] = field(default_factory=list)
    counted: list[tuple[bool, ...]] = field(default_factory=list)

    @staticmethod
    def number(table: list[Any], entry: Any) -> int:
        if entry not in table:
            table.append(entry)
        return table.index(entry)


@dataclass(frozen=True, slots=True)
class Emitted:
    """The files of a plan: text by name, and per device the file of its program and its tables."""

    files: dict[str, str]
    programs: tuple[str, ...]
    tables: tuple[Tables, ...]


def emit(program: Program) -> Emitted:
    """Return the Python source of a program. Equal programs give equal bytes."""
    segments, names = emit_segments(program)
    groups: dict[str, list[int]] = {}
    tables = []
    for device in program.devices:
        writer = _Writer(program, device, names)
        groups.setdefault(writer.write(), []).append(device.rank)
        tables.append(writer.tables)
    files, programs = {"segments.py": segments}, [""] * program.world
    for number, (body, ranks) in enumerate(groups.items()):
        name = f"program_{number}"
        shown = ", ".join(map(str, ranks[:16])) + (" ..." if len(ranks) > 16 else "")
        who = f"devices {shown} do" if len(ranks) > 1 else f"device {shown} does"
        files[f"{name}.py"] = HEAD.format(devices=who, segments="segments") + body
        for rank in ranks:
            programs[rank] = name
    return Emitted(files, tuple(programs), tuple(tables))


class _Writer:
    def __init__(self, program: Program, device: Device, names: list[str]) -> None:
        self.program, self.model = program, program.model
        self.device = device
        self.functions = names
        self.tables = Tables(
            [
                {
                    "name": w.name,
                    "tensor": w.tensor,
                    "box": w.box,
                    "trained": w.trained,
                    "counted": w.counted,
                    "group": w.group,
                }
                for w in device.weights
            ]
        )
        self.pretty: dict[str, str] = {"_": "_", "one": "rt.one"}
        self.taken: dict[str, int] = {}

    def write(self) -> str:
        lines: list[str] = []
        module = ""
        for instruction in self.device.instructions:
            if isinstance(instruction, Forward) and instruction.module != module:
                module = instruction.module
                lines.append(f"# {module}" if module else "#")
            lines.append(self._line(instruction))
        return "".join(f"    {line}\n" for line in lines if line != "#")

    def name(self, name: str) -> str:
        """Return a short name for a value: what stands before '~', numbered where that is taken."""
        if name not in self.pretty:
            stem = name.split("~")[0] + ("_work" if name.endswith("w") and "~c" in name else "")
            self.taken[stem] = self.taken.get(stem, 0) + 1
            self.pretty[name] = stem if self.taken[stem] == 1 else f"{stem}__{self.taken[stem]}"
        return self.pretty[name]

    def tuple_of(self, names: Sequence[str | None]) -> str:
        inner = ", ".join("None" if n is None else self.name(n) for n in names)
        return f"({inner},)" if len(names) == 1 else f"({inner})"

    def _line(self, i: Instruction) -> str:
        match i:
            case Load():
                return self._load(i)
            case Forward():
                return self._forward(i)
            case Backward():
                left = f"{self.tuple_of(i.outputs)} = " if set(i.outputs) - {"_"} else ""
                wide = f', "{_bits(i.wide)}"' if any(i.wide) else ""
                return f'{left}rt.backward("{i.tag}", {self.tuple_of(i.gradients)}{wide})'
            case Slice():
                box = Tables.number(self.tables.boxes, i.ranges)
                return f"{self.name(i.out)} = rt.slice({self.name(i.source)}, {i.view}, {box}, {i.shape})"
            case Combine():
                return self._combine(i)
            case Accumulate():
                if i.in_place:
                    return f"{self.name(i.out)} += {self.name(i.value)}"
                return f"{self.name(i.out)} = {self.name(i.into)} + {self.name(i.value)}"
            case Collective():
                return self._collective(i)
            case Bucket():
                group = Tables.number(self.tables.groups, i.group)
                return f"{self.tuple_of(i.works)} = rt.all_reduce_bucket({self.tuple_of(i.sources)}, {group})"
            case Send():
                return f"rt.send({self.name(i.source)}, {self._message(i.peer, i.message)})"
            case Recv():
                return f'{self.name(i.work)} = rt.recv({self._message(i.peer, i.message)}, {i.shape}, "{i.dtype}")'
            case Wait():
                return f"{self.name(i.out)} = {self.name(i.work)}.wait().reshape({i.shape})"
            case Update():
                update = f"rt.update({self._pairs(i.pairs)})"
                return f"{update}\n    rt.write({self._pairs(i.writes)})" if i.writes else update
            case Loss():
                counted = Tables.number(self.tables.counted, i.counted)
                return f"return rt.loss({self.tuple_of(i.parts)}, {counted})"
            case Free():
                return "del " + ", ".join(self.name(n) for n in i.names)

    def _pairs(self, pairs: Sequence[tuple[str, str]]) -> str:
        inner = "".join(f"\n        ({self.name(w)!r}, {self.name(value)})," for w, value in pairs)
        return f"[{inner}\n    ]" if pairs else "[]"

    def _load(self, i: Load) -> str:
        if self.model.tensors[i.tensor].kind == "input":
            return (
                f"{self.name(i.out)} = rt.input({Tables.number(self.tables.inputs, (i.tensor, i.box))})  # {i.tensor}"
            )
        return f'{self.name(i.out)} = rt.weight("{i.out}")'

    def _forward(self, i: Forward) -> str:
        left = f"{self.tuple_of(i.outputs)} = " if i.outputs else ""
        function = f"segments.{self.functions[i.function]}"
        draws = draws_of(self.model, self.program.functions[i.function], i.draws)
        extra = ""
        if draws:
            entry = [{"op": d.op, "box": d.box, "extents": d.extents, "shape": d.shape} for d in draws]
            self.tables.draws.append(entry)
            extra = f", draws={len(self.tables.draws) - 1}"
        inputs = self.tuple_of(i.inputs)
        return f'{left}rt.forward("{i.tag}", {function}, {inputs}, "{_bits(i.grads)}", {i.saved}{extra})'

    def _combine(self, i: Combine) -> str:
        whole = tuple((0, size) for size in i.view)
        if i.pieces and all(box == whole for _, box in i.pieces):
            return f"{self.name(i.out)} = " + " + ".join(self.name(name) for name, _ in i.pieces)
        boxes = Tables.number(self.tables.boxes, tuple(box for _, box in i.pieces))
        pieces = self.tuple_of([name for name, _ in i.pieces])
        return f'{self.name(i.out)} = rt.combine({pieces}, {boxes}, {i.view}, {i.shape}, "{i.dtype}")'

    def _collective(self, i: Collective) -> str:
        group = Tables.number(self.tables.groups, i.group)
        source = self.name(i.source) if i.source else "None"
        if source != "None" and i.view != i.local and i.kind not in ("all_reduce", "broadcast"):
            source += f".reshape({i.view})"
        extra = {
            "all_reduce": "",
            "all_gather": f", {i.take}",
            "reduce_scatter": f", {i.give}",
            "all_to_all": f", {i.give}, {i.take}",
            "broadcast": f', {i.shape}, "{i.dtype}"',
        }[i.kind]
        return f"{self.name(i.work)} = rt.{i.kind}({source}, {group}{extra})"

    def _message(self, peer: int, message: int) -> int:
        return Tables.number(self.tables.messages, (peer, message))


def _bits(flags: Sequence[bool]) -> str:
    return "".join("1" if flag else "0" for flag in flags)
