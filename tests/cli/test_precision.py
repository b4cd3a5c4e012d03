"""One precision: each command means the same step of a model on a cluster of GPUs, and says in which dtypes it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from superscaler.store.plan import EVALUATION, read_plan
from tests.helpers.commands import answer, run

MODEL = "gpt2:size=tiny"
GPUS = ["--plan", "data_parallel", "--cluster", "a100:1x2"]
HALF = "products in bfloat16, weights in bfloat16"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a plan for GPUs, compiled without a word about its precision."""
    out = tmp_path_factory.mktemp("precision") / "plan"
    assert run("compile", MODEL, *GPUS, "--out", out) == 0
    return out


def test_simulate_compile_and_report_mean_one_step(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, _ = answer(capsys, "simulate", MODEL, *GPUS)
    after, _ = answer(capsys, "simulate", planned)
    assert (after["step_seconds"], after["precision"]) == (before["step_seconds"], HALF)
    assert before["precision"] == HALF
    page = planned.with_suffix(".html")
    assert run("report", planned, "--out", page) == 0
    assert HALF in capsys.readouterr().out.splitlines()[0]
    assert HALF in page.read_text()
    full, _ = answer(capsys, "simulate", MODEL, *GPUS, "--precision", "fp32")
    assert full["precision"] == "products in float32, weights in float32"
    assert full["bound"] > 5 * before["bound"]


def test_a_saved_plan_keeps_its_precision(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_plan(planned).head["optimizer"]["precision"] == "bf16"
    # The weights are cut from a module in float32, unless it is captured as the plan was.
    found, _ = answer(capsys, "validate", MODEL, planned)
    assert found["equal"]


def test_answers_say_the_precision_first(planned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compile", MODEL, *GPUS, "--out", planned) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"precision: {HALF}"
    assert run("simulate", planned) == 0
    assert capsys.readouterr().out.splitlines()[1] == f"  precision: {HALF}"
    mlp = "mlp:layers=1,hidden=8,inputs=4,classes=4,batch=8"
    assert run("verify", mlp, "--plan", "data_parallel", "--cluster", "v100:1x2") == 0
    out = capsys.readouterr().out
    assert out.splitlines()[1] == "  precision: products in float16, weights in float16"
    assert "in float16: " in out


def test_a_report_names_the_precision_where_it_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On an A100 products in bfloat16 have 16 times the peak; in a step that waits for its host they save nothing."""
    large = "mlp:layers=1,hidden=1024,inputs=1024,batch=65536,device=meta"
    for model, helps in ((large, True), ("mlp:layers=1,hidden=8,batch=8", False)):
        assert run("compile", model, *GPUS, "--precision", "fp32", "--out", tmp_path / "plan") == 0
        assert run("report", tmp_path / "plan", "--out", tmp_path / "plan.html") == 0
        text = (tmp_path / "plan.html").read_text()
        assert ("a lower precision (--precision bf16): the products of this plan have 19.5 TFLOPS" in text) == helps


def test_compile_writes_the_module_in_eval_mode_in_the_same_precision(
    planned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not (planned / EVALUATION).exists()
    assert run("compile", MODEL, *GPUS, "--evaluation", "--out", planned) == 0
    dtypes = {entry["dtype"] for entry in read_plan(planned / EVALUATION).head["tensors"].values()}
    assert dtypes == {"bfloat16"}
    assert run("compile", MODEL, *GPUS, "--evaluation") == 2
    assert "--evaluation writes into the plan directory; give --out DIR, too" in capsys.readouterr().err
