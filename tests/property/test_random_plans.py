"""Random graphs under random nested cuts on random devices equal the unsplit graph, and cannot deadlock."""

from __future__ import annotations

import dataclasses

import pytest

from superscaler.certify.certificate import CHECKS
from superscaler.errors import ScheduleError
from superscaler.ir.communication import check_rendezvous
from superscaler.ir.program import Collective, Send
from tests.helpers.ran import rewritten
from tests.helpers.random_graphs import largest_error, random_model, random_plan


def check(seed: int, irregular: bool) -> None:
    model, values = random_model(seed, 6)
    compiled = random_plan(model, seed + 1, 1 + seed % 4, irregular)
    for check in CHECKS.values():
        check(compiled.program)
    error, where = largest_error(compiled, values)
    assert error < 1e-9, (seed, where)


def test_random_cuts_equal_the_unsplit_graph() -> None:
    """Regular grids, and nested, uneven, misaligned trees."""
    for seed in range(10, 13):
        check(seed, irregular=False)
        check(10_000 + seed, irregular=True)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(100))
def test_many_more_random_plans(block: int) -> None:
    for seed in range(20_000 + 20 * block, 20_000 + 20 * block + 20):
        check(seed, irregular=block % 4 > 0)


def test_the_check_of_equality_can_fail() -> None:
    model, values = random_model(3, 6)
    compiled = random_plan(model, 4, 2, irregular=False)
    text = compiled.emitted.files["segments.py"]
    broken = text.replace("torch.tanh(", "torch.sin(").replace(" - ", " + ")
    assert broken != text
    files = {**compiled.emitted.files, "segments.py": broken}
    wrong = rewritten(compiled, dataclasses.replace(compiled.emitted, files=files))
    assert largest_error(wrong, values)[0] > 1e-9


def test_a_program_whose_devices_disagree_about_order_is_refused() -> None:
    for seed in range(200):
        compiled = random_plan(random_model(seed, 6)[0], seed + 1, 2, irregular=False)
        program = compiled.program
        code = list(program.devices[0].instructions)
        at = [k for k, i in enumerate(code) if isinstance(i, Collective | Send)]
        if len(at) >= 2:
            code[at[0]], code[at[-1]] = code[at[-1]], code[at[0]]
            device = dataclasses.replace(program.devices[0], instructions=tuple(code))
            with pytest.raises(ScheduleError, match="deadlocks"):
                check_rendezvous(dataclasses.replace(program, devices=(device, *program.devices[1:])))
            return
    pytest.fail("no random program communicates twice")


@pytest.mark.parametrize("kind", [Collective, Send])
def test_communication_with_a_device_that_is_not_there_is_refused(kind: type[Collective | Send]) -> None:
    programs = (random_plan(random_model(s, 6)[0], s + 1, 2, irregular=False).program for s in range(200))
    program, device, at = next(
        (p, d, k) for p in programs for d in p.devices for k, i in enumerate(d.instructions) if isinstance(i, kind)
    )
    i, code = device.instructions[at], list(device.instructions)
    code[at] = dataclasses.replace(i, peer=7) if isinstance(i, Send) else dataclasses.replace(i, group=(device.rank, 7))
    devices = tuple(dataclasses.replace(d, instructions=tuple(code)) if d is device else d for d in program.devices)
    with pytest.raises(ScheduleError, match=r"device.* 7\)?, but the program has devices 0 to 1"):
        check_rendezvous(dataclasses.replace(program, devices=devices))
