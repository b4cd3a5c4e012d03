"""Details of instructions in words: what they do, with which tensor, and the line of the plan behind them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from superscaler.errors import some
from superscaler.groups import collect, group_by
from superscaler.ir import program as p
from superscaler.ir.grid import Ints
from superscaler.ir.model import Op
from superscaler.ir.parts import block_of
from superscaler.materialize.local_tensors import unique_identifiers
from superscaler.report.journal import Row
from superscaler.report.kinds import Kind
from superscaler.report.words import heading
from superscaler.simulate.timetable import place

# The name of the block for ops outside all modules.
OUTSIDE = "the model"


@dataclass(frozen=True)
class Detail:
    """An instruction in words. `letter`: of its kind, in a schedule; `asked`: effects of lines of the plan on its ops,
    or on the ops that make and read its tensor; `devices`: those of a collective, or the other end of a message.
    """

    title: str
    letter: str = ""
    tensor: str = ""
    bytes: int = 0
    devices: str = ""
    operators: str = ""
    why: str = ""
    asked: tuple[str, ...] = ()


class Details:
    """The distinct details of the instructions of a program. `found`: in the order of their numbers.

    `account`: explain.json of the plan; `journal`: the effects of its lines.
    """

    def __init__(self, program: p.Program, account: Mapping[str, Any], journal: Sequence[Row]) -> None:
        self.program = program
        self.found: list[Detail] = []
        self._known: dict[Hashable, tuple[Kind, int]] = {}
        self._tensors = {name: tensor for tensor, name in unique_identifiers(program.model.tensors).items()}
        self._home = dict[str, str]()
        self._ops = defaultdict[str, list[Op]](list)
        for op in program.model.forward_ops:
            self._home |= {o.tensor: home_of(op) for o in op.outputs}
        for op in program.model.ops:
            for o in (*op.outputs, *op.inputs):
                self._ops[o.tensor].append(op)
        for op in program.model.forward_ops:
            for o in op.inputs:
                self._home.setdefault(o.tensor, home_of(op))
        self._blocks = {name: block for block in account["blocks"] for name in block["names"]}
        # The effects on each op, with the line of the plan.
        self._lines = collect((op, (row.effect, row.where)) for row in journal for op in row.ops)
        self._functions = dict[int, p.Function]()

    def columns(self, code: Sequence[p.Instruction], used: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the kind, the number of the detail and the microbatch of each used instruction of a program."""
        for _, i in p.calls(code):
            self._functions.setdefault(i.task.segment, self.program.functions[i.function])
        found = np.full((3, max(len(code), 1)), -1)
        for at in used[used >= 0].tolist():
            i = code[at]
            key = _key(i)
            if key not in self._known:
                kind, detail = self._describe(i)
                self._known[key] = kind, len(self.found)
                self.found.append(detail)
            found[:2, at] = self._known[key]
            found[2, at] = place(i)[0]
        return found[0], found[1], found[2]

    def _describe(self, i: p.Instruction) -> tuple[Kind, Detail]:
        if i.task is not None:
            return self._of_task(i, self._functions[i.task.segment].ops)
        match i.meets:
            case p.Meets.GROUP:
                # The first name of a bucket stands for all.
                title = f"{i.kind} of {self._said(i)}"
                where = "devices " + some(tuple(map(str, i.group)))
                return Kind.TRANSFER, self._transfer(i, title, where)
            case p.Meets.PEER:
                verb, way = ("send", "to") if i.is_send else ("receive", "from")
                return Kind.TRANSFER, self._transfer(i, f"{verb} {self._said(i)}", f"{way} device {i.peer}")
            case p.Meets.HOST:
                return Kind.COPY, self._transfer(i, f"copy {self._said(i)} {_way(i)}", "")
            case p.Meets.ALL:
                return Kind.TRANSFER, Detail("sum of the loss over all devices")
        if i.updates:
            weights = [self._tensors.get(w.name, w.name) for w in i.weights]
            title = f"update of {len(weights)} weights: {heading(_homes(map(self._home_of, weights)))}"
            updates = (op for w in weights for op in self._ops[w] if not op.is_forward)
            return Kind.UPDATE, Detail(title, tensor=some(weights), asked=self._asked(updates))
        return Kind.OTHER, Detail(f"{type(i).__name__.lower()} of {self._said(i)}", tensor=self._said(i))

    def _of_task(self, i: p.Instruction, ops: Sequence[Op]) -> tuple[Kind, Detail]:
        homes = _homes(map(home_of, ops))
        if i.meets is p.Meets.HOST:
            return Kind.COPY, Detail(f"copy what the backward of {heading(homes)} needs {_way(i)}")
        kind, verb = Kind.FORWARD, "forward"
        if i.is_mirror:
            kind = Kind.WEIGHTS if i.half == "weight" else Kind.BACKWARD
            verb = {"": "backward", "input": "gradients of activations", "weight": "gradients of weights"}[i.half]
        elif any(op.origin for op in ops):
            kind, verb = Kind.AGAIN, "forward, again,"
        letter = "I" if i.half == "input" else kind.sign
        operators = f"{len(ops)} operators: {some([op.name for op in ops], 5)}"
        return kind, Detail(f"{verb} of {heading(homes)}", letter, operators=operators, asked=self._asked(ops))

    def _transfer(self, i: p.Instruction, title: str, devices: str) -> Detail:
        values = _values(i)
        tensor = self._tensors.get(values[0].name, "") if values else ""
        home = self._home_of(tensor)
        why = i.notes[0].reason if i.notes else self._why(home, i.kind, bool(values and values[0].is_gradient))
        every = some([self._tensors.get(v.name, v.name) for v in values])
        return Detail(title, "", every, i.bytes, devices, "", why, self._asked(self._ops[tensor]))

    def _said(self, i: p.Instruction) -> str:
        values = _values(i)
        if not values:
            return "nothing"
        first = values[0]
        shown = self._tensors.get(first.name, first.name)
        more = f" and {len(values) - 1} more" if len(values) > 1 else ""
        return ("gradients of " if first.is_gradient else "") + shown + more

    def _home_of(self, tensor: str) -> str:
        return self._home.get(tensor, OUTSIDE)

    def _why(self, home: str, kind: str, is_gradient: bool) -> str:
        """Return why the plan moves this tensor, "" if its account does not say."""
        direction = "backward" if is_gradient else "forward"
        rows = [row for row in self._blocks.get(home, {}).get("moves", ()) if row.get("kind") == kind]
        rows.sort(key=lambda row: row["direction"] != direction)
        return rows[0]["reason"] if rows else ""

    def _asked(self, ops: Iterable[Op]) -> tuple[str, ...]:
        """Return the plan lines that changed these ops: `split of op1 (plan.py:12)`; no ops: all."""
        every = dict.fromkeys(op.name if op.name in self._lines else op.origin for op in ops)
        found = group_by(((line, name) for name in every for line in self._lines.get(name, ())), lambda pair: pair[0])
        return tuple(
            effect
            + ("" if len(some_of) == len(every) else f" of {some([name for _, name in some_of], 3)}")
            + f" ({where})"
            for (effect, where), some_of in found.items()
        )


def home_of(op: Op) -> str:
    """Return the block of an op, else its module."""
    return block_of(op.module) or op.module or OUTSIDE


def _homes(homes: Any) -> list[str]:
    return list(dict.fromkeys(homes))


def _way(i: p.Instruction) -> str:
    return "to the host" if i.to_host else "back from the host"


def _values(i: p.Instruction) -> tuple[p.Value, ...]:
    values = p.names(i, p.Role.READ) or p.names(i, p.Role.WRITE) or p.names(i, p.Role.LAST)
    return tuple(v for v in values if v.name != "one")


def _key(i: p.Instruction) -> Hashable:
    """Return a key that is equal for instructions with equal details."""
    if i.task is not None:
        return type(i), i.task.segment, i.half
    if i.meets is p.Meets.ALL:
        return (type(i),)
    values = tuple((v.name, v.is_gradient) for v in _values(i))
    return type(i), values, i.kind, i.group, i.peer
