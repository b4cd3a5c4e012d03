"""The interpreter of programs with a domain that only counts, and the cohorts that it works on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from superscaler.certify.interpret import Interpreter
from superscaler.errors import ScheduleError
from superscaler.ir.cohorts import Cohort, cohorts
from superscaler.ir.grid import Ints
from superscaler.ir.program import ROLES, Collective, Free, Instruction, Program, Recv, Send, Wait, writes
from tests.helpers.small_plans import exact


class Count:
    """Counts the instructions that run on each device; every value is the number of the device that made it."""

    def __init__(self) -> None:
        self.ran: Counter[tuple[int, str]] = Counter()
        self.came: list[tuple[int, int]] = []

    def _count(self, cohort: Cohort, at: int) -> None:
        self.ran.update((device, type(cohort.code[at]).__name__) for device in cohort.devices.tolist())

    def run(self, cohort: Cohort, at: int, read: Sequence[Ints | None]) -> Sequence[Ints]:
        self._count(cohort, at)
        assert all(value is None or len(value) == len(cohort) for value in read)
        return [cohort.devices] * len(list(writes(cohort.code[at])))

    def start(self, cohort: Cohort, at: int, read: Sequence[Ints | None]) -> Sequence[Ints | None]:
        self._count(cohort, at)
        return [None if value is None else cohort.devices for value in read]

    def take(self, value: Ints, rows: Ints) -> Ints:
        return value[rows]

    def join(
        self, how: Collective, part: int, members: Sequence[tuple[Ints, Ints]], position: Ints, group: Ints
    ) -> Ints:
        return np.stack([value[rows] for value, rows in members], axis=-1).max(axis=-1)[group]

    def arrive(self, cohort: Cohort, at: int, recv: Instruction, value: Ints) -> Ints:
        self._count(cohort, at)
        self.came += zip(cohort.devices.tolist(), value.tolist(), strict=True)
        return value


@pytest.mark.parametrize("name", ["pipeline", "hybrid", "experts", "broadcasts", "exchanges"])
def test_every_instruction_of_every_device_runs_once(name: str) -> None:
    program, count = exact(name).program, Count()
    Interpreter(program, count).run()
    code = [(rank, i) for rank, device in enumerate(program.devices) for i in device.instructions]
    assert count.ran == Counter((rank, type(i).__name__) for rank, i in code if not isinstance(i, Free))
    # The number of the device that sends a message comes with it.
    assert not Counter((rank, i.peer) for rank, i in code if isinstance(i, Recv)) - Counter(count.came)


@pytest.mark.parametrize("name", ["pipeline", "folded", "exchanges"])
def test_cohorts_are_all_devices_with_the_data_of_each(name: str) -> None:
    program = exact(name).program
    found = cohorts(program)
    assert sorted(d for cohort in found for d in cohort.devices.tolist()) == list(range(program.world))
    devices = list(program.devices)
    for cohort in found:
        for at, i in enumerate(cohort.code):
            for field in {"peer", "group", "at", "box"} & ROLES[type(i)].keys():
                for row, device in enumerate(cohort.devices.tolist()):
                    own = getattr(devices[device].instructions[at], field)
                    assert cohort.data(at, field)[row].tolist() == np.array(own).tolist()


def changed(program: Program, kind: type, new: Instruction | None) -> Program:
    """Return the program with the first instruction of a kind, on the first device that has one, replaced or gone."""
    devices = list(program.devices)
    for rank, device in enumerate(devices):
        at = next((n for n, i in enumerate(device.instructions) if isinstance(i, kind)), None)
        if at is not None:
            code = [*device.instructions[:at], *([new] if new else []), *device.instructions[at + 1 :]]
            devices[rank] = replace(device, instructions=tuple(code))
            return replace(program, devices=tuple(devices))
    raise AssertionError(f"no device has a {kind.__name__}")


@pytest.mark.parametrize(
    ("kind", "message"),
    [(Send, "never ends: Recv .* is not met by devices"), (Recv, "waits for .*, which nothing makes"),
     (Wait, "reads .*, which nothing makes|no device receives it")],
)  # fmt: skip
def test_what_is_missing_is_named_with_the_device(kind: type, message: str) -> None:
    program = exact("pipeline").program
    with pytest.raises(ScheduleError, match=rf"device \d+, instruction \d+: .*({message})"):
        Interpreter(changed(program, kind, None), Count()).run()


def test_a_name_that_is_there_is_not_made_again() -> None:
    program = exact("pipeline").program
    first = next(i for i in program.devices[0].instructions if any(writes(i)))
    device = program.devices[0]
    twice = replace(device, instructions=(first, first, *device.instructions[1:]))
    with pytest.raises(ScheduleError, match="which exists already"):
        Interpreter(replace(program, devices=(twice, *list(program.devices)[1:])), Count()).run()
