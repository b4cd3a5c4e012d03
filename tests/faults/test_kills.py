"""A sample of the trials of kills.py."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from kills import losses_of, make_plan, restart, trial


@pytest.mark.dist(python="real")
def test_training_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "plan")
    whole = losses_of(plan, tmp_path)
    (tmp_path / "torchrun").mkdir()
    assert "trained again" in restart(plan, tmp_path / "torchrun", whole, random.Random(0))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "launcher"])
def test_training_goes_on_after_a_process_is_killed(victim: str, tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "plan")
    trial(plan, tmp_path, losses_of(plan, tmp_path), victim, random.Random(0), is_saving=victim == "rank")
