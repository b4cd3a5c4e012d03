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
    for number, victim in enumerate(("rank", "launcher")):
        folder = tmp_path / victim
        folder.mkdir()
        trial(plan, folder, whole, victim, random.Random(number), is_saving=victim == "rank")
    (tmp_path / "torchrun").mkdir()
    assert "trained again" in restart(plan, tmp_path / "torchrun", whole, random.Random(0))
