"""Every single mutation of a plan is refused, or gives the numbers of the plan."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise

import pytest
import torch

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import ScheduleError
from superscaler.ir.communication import check_rendezvous
from superscaler.ir.program import Accumulate, Backward, Collective, Forward, Program, Recv, Send
from superscaler.models import build
from tests.helpers.changes import later, left_out, turns, with_change, without_frees
from tests.helpers.mutants import mutants
from tests.helpers.outcome import SCOPES, differs, judge, sweep
from tests.helpers.small_plans import PLANS, exact

SWEEPS = [(name, scope) for name in PLANS for scope in SCOPES.get(name, ("one device",))]


@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_an_intact_plan_passes_with_and_without_frees(name: str) -> None:
    program = exact(name).program
    for form in (program, without_frees(program)):
        assert judge(form) == ("", "")
        assert differs(name, form) == ""


def test_mutants_are_always_the_same_and_all_differ_from_the_plan() -> None:
    once, again = (list(islice(mutants(exact("pipeline")), 300)) for _ in range(2))
    assert [(m.kind, m.what) for m in once] == [(m.kind, m.what) for m in again]
    programs: list[Program] = [m.program for m in once]
    assert programs == [m.program for m in again]
    assert all(program != without_frees(exact("pipeline").program) for program in programs)


def test_numbers_show_what_no_check_is_asked_about() -> None:
    found = [m for m in mutants(exact("data")) if m.kind in ("gap", "weight flag", "weight tensor")]
    assert found
    assert all(differs("data", m.program) for m in found)


@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_some_mutants_of_every_class_are_refused_or_equal(name: str) -> None:
    _check(name, "one device", most=6, numbers=2)


def test_messages_that_start_together_in_another_order_at_one_end_are_refused() -> None:
    """NCCL knows no tags: the second message of a group would be read as the first."""
    program, found = exact("tied").program, 0
    for device in program.devices:
        for n, (a, b) in enumerate(pairwise(device.instructions)):
            if isinstance(a, Send | Recv) and type(a) is type(b) and a.peer == b.peer:
                changed = with_change(program, [device.rank], later(n))
                assert changed is not None
                with pytest.raises(ScheduleError, match="deadlocks"):
                    check_rendezvous(changed)
                found += 1
    assert found


def test_the_source_of_a_broadcast_gives_the_shape_that_it_says() -> None:
    program = exact("broadcasts").program
    rank, at = next((d.rank, n) for d in program.devices for n, i in enumerate(d.instructions)
                    if isinstance(i, Collective) and i.kind == "broadcast" and any(i.sources))  # fmt: skip
    smaller = turns(("instructions", at, "ways", 0, "shape", 0), lambda size: size - 1)
    changed = with_change(program, [rank], smaller)
    assert changed is not None
    with pytest.raises(ScheduleError, match=rf"device {rank}, instruction {at}: broadcast of"):
        check_program(changed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "scope"), SWEEPS)
def test_every_mutant_is_refused_or_equal(name: str, scope: str) -> None:
    assert judge(exact(name).program) == ("", "")
    _check(name, scope, most=None, numbers=30)


def _check(name: str, scope: str, most: int | None, numbers: int) -> None:
    rows = sweep(name, scope, most, numbers)
    assert rows
    for field in ("missed", "failed", "raised"):
        assert not [text for row in rows.values() for text in getattr(row, field)], field


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Collective, Recv, Accumulate, Forward, Backward])
def test_a_bug_in_one_device_of_1024_is_found(large: Program, kind: type) -> None:
    devices, device = list(large.devices), large.devices[777]
    at = next(n for n, i in enumerate(device.instructions) if isinstance(i, kind))
    devices[777] = left_out(at)(device)
    with pytest.raises(ScheduleError, match=r"device 777, instruction \d+: "):
        check_program(replace(large, devices=tuple(devices)))


@pytest.fixture(scope="module")
def large() -> Program:
    built = build("gpt2:layers=8,hidden=64,heads=8,seq=64,vocab=512,batch=64,dropout=0,device=meta")
    optimizer = torch.optim.SGD(built.module.parameters(), lr=0.1)
    graph = ss.capture(built.module, built.args, built.kwargs, optimizer=optimizer)
    return ss.compile(graph, "hybrid:dp=16,tp=8,pp=8,microbatches=4", "local:1024").compiled.program
