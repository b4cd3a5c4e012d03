"""Every bug put into a plan is caught, with its culprit named; plans without one raise no alarm."""

from __future__ import annotations

from dataclasses import replace

import pytest

from superscaler.artifact import initial_values
from superscaler.verify import compare_with_eager
from superscaler.verify.locate import first_difference
from tests.helpers.changes import left_out, with_change
from tests.helpers.mutations import DP, GRID, PIPE, TABLE, TIMEOUT, TP, Mutation, intact, report
from tests.helpers.sweeps import slow


@pytest.mark.parametrize("mutation", TABLE, ids=lambda m: m.name.replace(" ", "_"))
def test_a_fault_is_caught_and_its_culprit_named(mutation: Mutation) -> None:
    caught, text = report(mutation)
    assert caught
    assert any(culprit in text for culprit in mutation.culprits), text


@pytest.mark.parametrize("spec", [DP, TP, PIPE])
def test_no_instruction_can_be_left_out(spec: str) -> None:
    exact = intact("mlp", spec)
    for device in exact.program.devices:
        for n, gone in enumerate(device.instructions):
            program = with_change(exact.program, [device.rank], left_out(n))
            assert program is not None
            result = compare_with_eager(replace(exact, program=program), timeout=TIMEOUT)
            assert not result["equal"], gone
            assert result["first_difference"], gone


PLANS = [("mlp", spec) for spec in (DP, TP, PIPE, GRID)]
PLANS += slow(*(("gpt2:size=tiny", spec) for spec in (DP, TP, PIPE, GRID)))


@pytest.mark.parametrize(("model", "spec"), [*PLANS, ("noise", DP)])
def test_an_intact_plan_has_no_difference(model: str, spec: str) -> None:
    exact = intact(model, spec)
    assert compare_with_eager(exact)["equal"]
    captured = exact.graph.captured
    double = {k: v.double() if v.is_floating_point() else v for k, v in captured.batch.items()}
    values = initial_values(exact.graph.model, captured.values)
    values = {k: v.double() if v.is_floating_point() else v for k, v in values.items()}
    assert first_difference(exact, values, double, TIMEOUT) == ""
