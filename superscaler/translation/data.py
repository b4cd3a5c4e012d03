"""The data of devices: what a program says of each, and what the tables of its code hold."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from superscaler.emit.tables import Table, Tables
from superscaler.ir.fold import Folded
from superscaler.ir.instructions.fields import evenly
from superscaler.ir.loops import Loop, runs_of
from superscaler.ir.program import Device, Instruction, Program, Role, Weight

# The place of an instruction in its code: the number of its run, its place in a body, the repetition.
Spot = tuple[int, int, int]


def code_of(device: Device) -> Iterator[tuple[Instruction, Spot]]:
    """Yield the instructions of a device, each with its place."""
    for number, run in enumerate(runs_of(device.instructions)):
        turns = range(run.count) if isinstance(run, Loop) else range(1)
        for turn in turns:
            body = run.repetition(turn) if isinstance(run, Loop) else run
            for place, i in enumerate(body):
                yield i, (number, place, turn)


@dataclass(frozen=True, slots=True)
class EntryCheck:
    """What an instruction needs of a table: `then` of what `get` takes from it. `line`: of the code that asks first.

    `turns` and `numbers`: the repetitions, each with the number of the entry that the code names.
    """

    table: str
    role: Role
    get: Callable[[Any], Any]
    then: Callable[[Any], Any]
    line: int
    turns: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


class Data:
    """The data of one device: those of its program, from the sampled devices, beside the tables of its code."""

    def __init__(self, program: Program, rank: int, samples: Sequence[Device], tables: Tables) -> None:
        self.rank, self.tables = rank, {f.name: getattr(tables, f.name) for f in fields(tables)}
        devices = program.devices
        self._fold = devices.fold if isinstance(devices, Folded) and rank in devices.fold.places else None
        self._place = self._fold.place(rank) if self._fold is not None else ()
        self._runs = [runs_of(device.instructions) for device in samples]

    def difference(self, spot: tuple[int, int], asked: EntryCheck) -> str:
        """Return the difference between entries of a table and the needs of an instruction; '' if there is none."""
        entries, (run, place) = self.tables[asked.table], spot
        for number in asked.numbers:
            if not 0 <= number < len(entries):
                return f"{asked.table} of device {self.rank} has {len(entries)} entries, and none of number {number}"
        bodies = [runs[run] for runs in self._runs]
        ends = [(b.first[place], b.second[place]) if isinstance(b, Loop) else (b[place],) * 2 for b in bodies]
        pairs = [[asked.get(i) for i in pair] for pair in ends]
        for number, turn in _deciding(entries, asked):
            wanted = asked.then(self._moved(asked.role, [evenly(pair, (turn,)) for pair in pairs]))
            if not is_equal(entry := entries[number], wanted):
                where = f"entry {number} of {asked.table} on device {self.rank}"
                return f"{where} is {entry}, and the program has {wanted}"
        return ""

    def _moved(self, role: Role, values: Sequence[Any]) -> Any:
        """Return the value of this device from those of the sampled ones."""
        if self._fold is None:
            return values[0]
        if role is Role.PEER:
            peer, message = values[0]
            return self._fold.move([peer], self._place)[0], message
        move = self._fold.mover(role, values)
        return values[0] if move is None else move(*self._place)


def weight_record(weight: Weight) -> dict[str, Any]:
    """Return the row of a weight at rest in the tables of its device."""
    row = {f.name: getattr(weight, f.name) for f in fields(weight)} | {"name": str(weight.name)}
    return {name: value for name, value in row.items() if value or name != "host"}


def is_equal(one: Any, other: Any) -> bool:
    """Return whether data are equal; lists equal tuples, but no flag equals a number."""
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    return type(one) is type(other) and bool(one == other)


def _deciding(entries: Sequence[Any], asked: EntryCheck) -> Iterator[tuple[int, int]]:
    """Return the numbers of entries with their repetitions: where both move evenly, those that decide for all."""
    numbers, turns = np.array(asked.numbers), np.array(asked.turns)
    is_even = len(turns) > 1 and all(len(np.unique(np.diff(some))) == 1 for some in (numbers, turns))
    some = entries.deciding(numbers) if is_even and isinstance(entries, Table) else np.arange(len(turns))
    return zip(numbers[some].tolist(), turns[some].tolist(), strict=True)
