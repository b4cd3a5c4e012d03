"""Plans that order updates, copies and offloads between backwards, by the script of the benchmark, on processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "orders.py"
# The columns of what a plan's code must have, but for `early`, which all have.
HAS = {"halves": ["halves"], "to_host": ["inputs_on_hosts", "weights_on_hosts"], "tapes": ["tapes_on_hosts"]}


def table(*options: str) -> dict[str, dict[str, str]]:
    """Return the rows of the script by plan, once all are as they must be."""
    command = [sys.executable, str(SCRIPT), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    head, *rows, _ = (line.split() for line in done.stdout.splitlines())
    return {row[1]: dict(zip([*head, "judged"], row, strict=False)) for row in rows}


@pytest.mark.slow
def test_lomo_trains_as_torch_does_and_other_training_is_found() -> None:
    found = table("--families", "gpt2", "--plans", "lomo", "stale", "--layers", "5")
    assert int(found["lomo"]["early"])
    assert int(found["lomo"]["loops"]) > 1
    assert "judged" not in found["lomo"]
    assert found["stale"]["judged"] == "found"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "vit", "mixtral"])
def test_ten_plans_train_as_torch_does(family: str) -> None:
    found = table("--families", family)
    assert len(found) == 11
    del found["stale"]
    for plan, row in found.items():
        assert int(row["early"])
        assert int(row["loops"])
        assert all((int(row[column]) > 0) == (plan in plans) for column, plans in HAS.items()), row
