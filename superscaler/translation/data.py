"""The data of devices: what a program says of each, and what the tables of its code hold."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any

from superscaler.emit.tables import Tables
from superscaler.ir.fold import Folded, evenly
from superscaler.ir.loops import Loop, Run, runs_of
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


class Data:
    """The data of one device: those of its program, from the sampled devices, beside the tables of its code."""

    def __init__(self, program: Program, rank: int, samples: Sequence[Device], tables: Tables) -> None:
        self.rank, self.tables = rank, {f.name: getattr(tables, f.name) for f in fields(tables)}
        devices = program.devices
        self._fold = devices.fold if isinstance(devices, Folded) and rank in devices.fold.places else None
        self._place = self._fold.place(rank) if self._fold is not None else ()
        self._runs: list[Sequence[Run]] = [runs_of(device.instructions) for device in samples]
        # What is equal in all repetitions, and was found equal to its table, with the number there.
        self._known = set[tuple[int, int, str, int]]()

    def differs(
        self, spot: Spot, table: str, number: int, role: Role, get: Callable[[Any], Any], then: Callable[[Any], Any]
    ) -> str:
        """Return how an entry of a table differs from `then` of what `get` takes from an instruction; '' if it does
        not.
        """
        key = (*spot[:2], table, number)
        if key in self._known:
            return ""
        found = [self._at(runs[spot[0]], spot, get) for runs in self._runs]
        moved, has_turns = then(self._moved(role, [value for value, _ in found])), any(moves for _, moves in found)
        entries = self.tables[table]
        entry = entries[number] if 0 <= number < len(entries) else "nothing"
        if not is_equal(entry, moved):
            return f"entry {number} of {table} on device {self.rank} is {entry}, and the program has {moved}"
        if not has_turns:
            self._known.add(key)
        return ""

    @staticmethod
    def _at(run: Run, spot: Spot, get: Callable[[Any], Any]) -> tuple[Any, bool]:
        """Return a value of an instruction, and whether it moves with the repetitions."""
        _, place, turn = spot
        if not isinstance(run, Loop):
            return get(run[place]), False
        first, second = get(run.first[place]), get(run.second[place])
        return (first, False) if first == second else (evenly((first, second), (turn,)), True)

    def _moved(self, role: Role, values: Sequence[Any]) -> Any:
        """Return the value of this device from those of the sampled ones."""
        if self._fold is None:
            return values[0]
        if role is Role.GROUP:
            return self._fold.move(values[0], self._place)
        if role is Role.PEER:
            peer, message = values[0]
            return self._fold.move([peer], self._place)[0], message
        return evenly(values, self._place) if role is Role.EVEN else values[0]


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
