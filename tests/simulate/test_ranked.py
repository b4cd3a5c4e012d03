"""Regret of a table of measured plans, and the lines that benchmarks/simulate_published.py prints of recorded rows."""

import subprocess
import sys
from math import inf
from pathlib import Path

from tests.helpers.ranked import Measured, regret, summary, tau

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "simulate_published.py"


def test_regret_is_that_of_the_fastest_plan_that_is_said_to_fit() -> None:
    fast, slow, third = Measured("fast", 2.0, 1.0), Measured("slow", 1.0, 1.5), Measured("third", 3.0, 2.0)
    assert regret([fast, slow, third]) == 1.5
    assert regret([fast, Measured("slow", 1.0, 1.5, fits=False)]) == 1.0
    assert summary("t", [fast, slow, third]) == "regret 1.500 tau +0.33 of 3 plans, t: slow in place of fast"


def test_a_plan_that_ran_out_of_memory_has_no_rank_and_must_not_be_first() -> None:
    ran, out = Measured("ran", 2.0, 1.0), Measured("out", 1.0, inf)
    assert regret([ran, out]) == inf
    assert tau([ran, out]) == 0
    assert summary("t", [ran, out]).endswith("t, 1 out of memory said to fit: out in place of ran")
    assert regret([Measured("ran", 2.0, 1.0, fits=False)]) == inf
    assert "1 that ran said not to fit: nothing in place of ran" in summary("t", [Measured("ran", 2.0, 1.0, False)])


def test_recorded_rows_of_one_model_on_one_cluster_are_a_table(tmp_path: Path) -> None:
    """The last line of a row counts: 84.5 GB of 80 are said not to fit, but that plan ran, and was the fastest."""
    head = "llama:size=7b,seq=2048,batch=2048"
    pipe = "pipeline_1f1b:4,microbatches=512,blocks=8+8+8+8 x tensor_parallel:2"
    lines = [
        f"paddle 122.855 1.0 -1.3% 84.5 17  zero:stage=2,microbatches=64,halves=true {head} a100:1x8",
        f"paddle 134.826 137.593 +2.1% 71.6 16  zero:4,stage=1,microbatches=128,halves=true x tensor_parallel:2 {head} "
        "a100:1x8",
        f"paddle 140.853 148.183 +5.2% 52.3 38  {pipe} {head} a100:1x8",
        f"paddle 122.855 121.240 -1.3% 84.5 17  zero:stage=2,microbatches=64,halves=true {head} a100:1x8",
    ]
    file = tmp_path / "rows.txt"
    file.write_text("\n".join(lines))
    run = [sys.executable, str(SCRIPT), "--recorded", str(file), "--only", "paddle"]
    shown = subprocess.run(run, capture_output=True, text=True, check=True).stdout.splitlines()
    (line,) = (line for line in shown if line.startswith("regret"))
    # 134.826 / 122.855.
    assert line.startswith("regret 1.097 tau +1.00 of 3 plans, paddle llama:size=7b,seq=2048")
    assert ", 1 that ran said not to fit: zero:4,stage=1" in line
