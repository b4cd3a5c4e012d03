"""A sample of the trials of kills.py and of plan_kills.py."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.kills import losses_of, make_plan, restart, trial


@pytest.mark.dist
def test_training_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "plan")
    whole = losses_of(plan)
    (tmp_path / "torchrun").mkdir()
    assert "trained again" in restart(plan, tmp_path / "torchrun", whole, random.Random(0))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("victim", ["rank", "launcher", "job"])
def test_training_goes_on_after_a_process_is_killed(victim: str, tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "plan")
    trial(plan, tmp_path, losses_of(plan), random.Random(0), victim, is_saving=victim == "rank")


@pytest.mark.dist
def test_a_directory_holds_the_old_plan_or_the_new_one_or_is_refused_whenever_its_writer_is_killed() -> None:
    script = Path(__file__).with_name("plan_kills.py")
    known = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    command = [sys.executable, str(script), "--every", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=known, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 8
    assert all(what in done.stdout for what in ("old", "refused"))
