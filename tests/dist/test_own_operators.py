"""The page about operators, from the command line: its code is run as a user's file, on threads and on processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

# Their code runs in one process as a page (`tests/docs/test_pages.py`).
pytestmark = [pytest.mark.dist, pytest.mark.slow]

PAGE = (Path(__file__).parents[2] / "docs" / "ops.md").read_text()


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "ops.py").write_text("\n\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)))
    return f"{tmp_path / 'ops.py'}:build"


def superscaler(*arguments: str) -> dict:
    command = [sys.executable, "-m", "superscaler", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_verify_on_processes(model: str) -> None:
    assert superscaler("verify", model, "--plan", "tensor_parallel", "--cluster", "local:2", "--processes")["equal"]


def test_train_in_processes_that_import_the_file(model: str) -> None:
    found = [
        superscaler("train", model, "--plan", plan, "--cluster", cluster, "--steps", "3")["losses"]
        for plan, cluster in (("single", "local:1"), ("data_parallel", "local:2"))
    ]
    assert len(found[0]) == 3
    assert found[1] == pytest.approx(found[0], abs=1e-5)
