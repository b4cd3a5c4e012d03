"""A sample of the kills of plan_kills.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.dist
def test_a_directory_holds_the_old_plan_or_the_new_one_or_is_refused_whenever_its_writer_is_killed() -> None:
    script = Path(__file__).with_name("plan_kills.py")
    known = {**os.environ, "PYTHONPATH": str(script.parents[2])}
    command = [sys.executable, str(script), "--every", "5", "--trials", "8"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=known, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 20
    assert all(what in done.stdout for what in ("old", "refused"))
