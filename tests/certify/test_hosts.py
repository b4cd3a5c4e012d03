"""Nothing but copies goes between a device and its host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from superscaler.certify.certificate import check_program
from superscaler.certify.hosts import on_host
from superscaler.errors import ScheduleError
from superscaler.ir.program import Copy, Device, Program, Wait
from tests.graphs import graph_of
from tests.ran import exact
from tests.rewrites import offloaded, swapped


def first(device: Device, kind: type, at: int = 0) -> int:
    return [n for n, i in enumerate(device.instructions) if isinstance(i, kind)][at]


def turned(device: Device) -> Device:
    code, at = list(device.instructions), first(device, Copy)
    code[at] = replace(code[at], to_host=not code[at].to_host)  # type: ignore[call-arg, union-attr]
    return replace(device, instructions=tuple(code))


def left_out(device: Device) -> Device:
    """What is brought to the device is read where it is."""
    at = next(n for n, i in enumerate(device.instructions) if isinstance(i, Copy) and not i.to_host)
    copy = device.instructions[at]
    assert isinstance(copy, Copy)
    wait = next(n for n, i in enumerate(device.instructions) if isinstance(i, Wait) and i.work == copy.work)
    out = device.instructions[wait].out  # type: ignore[union-attr]
    code = list(device.instructions)
    for n, i in enumerate(code):
        if hasattr(i, "inputs") and out in i.inputs:
            code[n] = replace(i, inputs=tuple(copy.source if v == out else v for v in i.inputs))  # type: ignore[call-arg]
    return replace(device, instructions=tuple(code))


def brought(device: Device) -> Device:
    return replace(device, weights=tuple(replace(w, host=False) for w in device.weights))


@pytest.mark.parametrize(("change", "told"), [(turned, "Copy of"), (left_out, "Forward s"), (brought, "Copy of")])
def test_a_value_in_the_wrong_memory_is_named(change: Callable[[Device], Device], told: str) -> None:
    program = exact(graph_of("gpt2:size=tiny", "SGD"), offloaded(swapped("single")), 1).program
    (device,) = program.devices
    check_program(program)
    assert {w.name for w in device.weights if w.trained} <= on_host(program, device)
    wrong = Program(program.model, program.functions, (change(device),), program.notes)
    with pytest.raises(ScheduleError, match=f"{told}.* reads a value in the other memory"):
        check_program(wrong)
