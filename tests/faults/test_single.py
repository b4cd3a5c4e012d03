"""Every single mutation of a plan is refused, or gives the numbers of the plan."""

from __future__ import annotations

from itertools import islice

import pytest
from outcome import SCOPES, differs, has_certificate, judge, sweep
from single import mutants, without_frees
from small_plans import PLANS, exact

from superscaler.ir.program import Program

NEEDED = pytest.mark.skipif(not has_certificate(), reason="needs superscaler.verify.certificate")
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


@NEEDED
@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_some_mutants_of_every_class_are_refused_or_equal(name: str) -> None:
    _check(name, "one device", most=6, numbers=2)


@NEEDED
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
