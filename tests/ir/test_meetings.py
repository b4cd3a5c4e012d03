"""Meetings: every end finds the others, as queues between devices do that know no numbers."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from superscaler.errors import ScheduleError
from superscaler.ir.cohorts import cohorts
from superscaler.ir.communication import check_rendezvous
from superscaler.ir.names import Value
from superscaler.ir.program import Collective, Device, Instruction, Loss, Program, Recv, Send
from superscaler.ir.running.meetings import Ends, Message, Turn, meetings, rows_of
from tests.helpers.small_plans import exact

PLANS = ("pipeline", "hybrid", "folded", "exchanges")
X = Value("x")
# The place of an end: its device, and its instruction there.
Place = tuple[int, int]


def by_queues(program: Program) -> set[frozenset[Place]]:
    """Return the places that meet: the n-th send to a device and its n-th receive from there, and the n-th collectives
    of devices that name one group.
    """
    queues = defaultdict[tuple[object, ...], list[Place]](list)
    for rank, device in enumerate(program.devices):
        for at, i in enumerate(device.instructions):
            if isinstance(i, Send):
                queues[rank, i.peer, "sends"].append((rank, at))
            elif isinstance(i, Recv):
                queues[i.peer, rank, "receives"].append((rank, at))
            elif isinstance(i, Collective):
                queues[i.group, rank].append((rank, at))
    ends = defaultdict[object, list[list[Place]]](list)
    for (*group, _), places in queues.items():
        ends[tuple(group)].append(places)
    return {frozenset(places) for queue in ends.values() for places in zip(*queue, strict=True)}


@pytest.mark.parametrize("name", PLANS)
def test_the_ends_of_all_communication_meet_as_queues_have_it(name: str) -> None:
    program, met = exact(name).program, defaultdict[object, set[Place]](set)
    for rank, device in enumerate(program.devices):
        for at, i, key in meetings(device.instructions, rank):
            assert i == device.instructions[at]
            met[key].add((rank, at))
    assert {frozenset(places) for places in met.values()} == by_queues(program)
    assert {len(places) for key, places in met.items() if isinstance(key, Message)} <= {2}
    assert all({rank for rank, _ in met[key]} == {*key.group} for key in met if isinstance(key, Turn))


@pytest.mark.parametrize("name", PLANS)
def test_the_ends_of_a_cohort_are_those_of_each_of_its_devices(name: str) -> None:
    program = exact(name).program
    found, devices = cohorts(program), list(program.devices)
    cohort_of, row_of = rows_of([cohort.devices for cohort in found], program.world)
    for cohort in found:
        for at, i in enumerate(cohort.code):
            if isinstance(i, Collective):
                ends = Ends.of(cohort.devices, cohort.data(at, "group"))
            elif isinstance(i, Send | Recv):
                ends = Ends.of_pairs(cohort.devices, cohort.data(at, "peer"), isinstance(i, Send))
            else:
                continue
            for row, device in enumerate(cohort.devices.tolist()):
                own = devices[device].instructions[at]
                group = ends.groups[ends.group[row]].tolist()
                assert (cohort_of[device], row_of[device]) == (cohort.number, row)
                if isinstance(own, Collective):
                    assert group == list(own.group)
                else:
                    assert group == ([device, own.peer] if isinstance(own, Send) else [own.peer, device])
                assert group[ends.place[row]] == device


def over(*group: int) -> Collective:
    return Collective("all_reduce", (None,), (X,), group, (), "float32", 4)


def test_keys_are_equal_at_the_ends_and_different_otherwise() -> None:
    one = [over(0, 1), Send(X, 1, 7, 4, 0), Loss((), ()), over(1, 0), over(0, 1), Send(X, 1, 8, 4, 0)]
    other = [Recv(X, 0, 8, (1,), "float32", 0), Send(X, 0, 7, 4, 0), over(0, 1), over(0, 1), Recv(X, 0, 7, (), "", 0)]
    first, second = ({at: key for at, _, key in meetings(code, rank)} for rank, code in enumerate((one, other)))
    assert first == {0: ((0, 1), 0), 1: (0, 1, 7), 3: ((1, 0), 0), 4: ((0, 1), 1), 5: (0, 1, 8)}
    assert second == {0: (0, 1, 8), 1: (1, 0, 7), 2: ((0, 1), 0), 3: ((0, 1), 1), 4: (0, 1, 7)}


def test_a_device_without_cohort_has_no_row() -> None:
    found = rows_of([np.array([3, 0]), np.array([2])], 5)
    assert [x.tolist() for x in found] == [[0, -1, 1, 0, -1], [1, -1, 0, 0, -1]]


def stuck(*codes: Sequence[Instruction]) -> list[str]:
    """Return the devices that wait for ever, each with its step."""
    devices = tuple(Device(rank, (), code) for rank, code in enumerate(codes))
    try:
        check_rendezvous(Program(None, (), devices))  # type: ignore[arg-type]
    except ScheduleError as error:
        return re.findall(r"device \d+, step \d+", str(error))
    return []


def test_devices_wait_for_all_ends_of_what_they_start() -> None:
    together = [Send(X, 1, 0, 4, 0), Recv(X, 1, 1, (1,), "float32", 0)], [Send(X, 0, 1, 4, 0), Recv(X, 0, 0, (), "", 0)]
    assert stuck(*together) == []
    apart = [[i, Loss((), ()), replace(j, point=1)] for i, j in together]
    assert stuck(*apart) == ["device 0, step 0", "device 1, step 0"]
    # A device that a group leaves out waits for ever, and hinders no other.
    assert stuck([over(0, 1)], [over(0, 1)], [over(0, 1)]) == ["device 2, step 0"]
    assert stuck([over(0, 1), over(0, 2)], [over(0, 1)], [over(0, 2)]) == []
    assert stuck([over(0, 1), over(0, 2)], [over(0, 1)], [over(1, 2), over(0, 2)]) == [
        "device 0, step 1",
        "device 2, step 0",
    ]
