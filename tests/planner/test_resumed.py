"""Searches for what is there: other batches, runs that go on, and plans that are measured."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import superscaler as ss
from superscaler.cluster import LOCAL, PRESETS
from superscaler.errors import InputError
from superscaler.planner import measured as measuring
from superscaler.planner.constraints import read_batches
from superscaler.planner.search import search
from tests.helpers.commands import answer, run
from tests.helpers.graphs import graph_of

TINY = "gpt2:size=tiny"
FEW = "no recompute, no zb_h1, zero < 3"


def _machine(folder: Path, devices: int) -> Path:
    """Write a cluster of this machine whose devices have the speeds of an A100."""
    file = folder / f"machine{devices}.yaml"
    file.write_text(str(ss.Cluster.of("machine", LOCAL, 1, devices, PRESETS[LOCAL].links, PRESETS["a100"].device)))
    return file


def test_a_batch_is_chosen_and_its_plan_is_predicted_as_a_capture_of_that_batch() -> None:
    graph = graph_of(f"{TINY},batch=8")
    found = search(graph, "a100:1x2", where=f"{FEW}, no chunked, no swap, rows <= 4, no pp, tp = 1", batches=[8, 16])
    rows = [plan.prediction.step_seconds / plan.choice.batch for plan in found.plans]
    assert rows == sorted(rows)
    assert {plan.choice.batch for plan in found.plans} > {16}
    for plan in found.plans[:2]:
        own = graph_of(f"{TINY},batch={plan.choice.batch}")
        assert ss.compile(own, plan.spec, "a100:1x2").simulate() == plan.prediction
    best = found.best.prediction.step_seconds
    assert 0 < found.bound <= best
    # Estimates of plans that were compiled whole are their predictions.
    assert {e.choice: e.seconds for e in found.estimates}[found.best.choice] == best


@pytest.mark.parametrize(
    ("text", "why"),
    [("8..", "give rows of a step"), ("0", "give rows"), ("16..8", "write 8..16"), ("1e3", "give rows")],
)
def test_batches_that_are_none_are_refused(text: str, why: str) -> None:
    with pytest.raises(InputError, match=why):
        read_batches(text)


def test_a_batch_that_cannot_be_divided_is_refused_with_what_can_be() -> None:
    """5 rows on 11 servers of 1: at most 2 stages and 4 tensor-parallel devices; 10 devices divide them."""
    with pytest.raises(InputError, match=r"a batch of 5 cannot be divided among the 11 .*a batch of 11, or 10 devices"):
        search(graph_of(f"{TINY},batch=5"), "a100:11x1")


@pytest.mark.dist
def test_a_checkpoint_of_another_model_or_precision_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    where = f"{FEW}, no chunked, no swap, rows = 4, tp = 1, pp = 1, zero = 0"
    model = "mlp:layers=2,hidden=8,batch=8"
    kept, given = tmp_path / "kept", ["--cluster", "a100:1x2", "--where", where]
    assert run("train", model, "--plan", "single", "--cluster", "local:1", "--steps", 1, "--save", kept) == 0
    capfd.readouterr()
    assert run("search", "--like", kept, *given) == 0
    # The cluster's own precision is another one.
    assert f"--cluster a100:1x2 --optimizer adamw --precision fp32 --out plan, and its run.py --resume {kept}" in (
        capfd.readouterr().out
    )
    refused = {
        ("--precision", "bf16"): "was trained in fp32",
        ("--optimizer", "sgd"): "was trained by AdamW with 1 parameter groups, but this model by SGD",
        (model.replace("layers=2", "layers=3"),): "lacks",
        ("--measure", "2"): "trains on this machine, but --cluster is a100:1x2",
    }
    for more, why in refused.items():
        assert run("search", "--like", kept, *given, *more) == 2
        assert re.search(why, capfd.readouterr().err)


def test_plans_near_the_shortest_step_take_more_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that seem alike the slower one may be the faster; the slowest rank counts, and the fastest turn."""
    turns = [{"0": [1.0, 1.0], "1": [1.02, 1.04], "2": [1.5, 1.5]}, {"0": [1.01, 1.03], "1": [0.9, 0.95]}]

    def call(_: object, world: int, folder: str, count: str, numbers: str, *options: str) -> list[list[float]]:
        found = turns.pop(0)
        assert numbers.split(",") == [*found]
        return [[found[number][rank] for number in found] for rank in range(world)]

    monkeypatch.setattr(measuring, "call", call)
    assert measuring.measured(["a", "b", "c"], lambda plan, folder: None, 2) == {"a": 1.0, "b": 0.95, "c": 1.5}
    assert not turns


@pytest.mark.slow
@pytest.mark.dist
def test_the_plan_of_the_shortest_measured_step_is_the_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["--cluster", _machine(tmp_path, 2), "--where", f"{FEW}, rows = 4", "--measure", 2]
    found, _ = answer(capfd, "search", TINY, *given)
    assert len(found["measured"]) == 2
    assert found["plan"] == min(found["measured"], key=lambda plan: found["measured"][plan])
    assert all(seconds > 1e-4 for seconds in found["measured"].values())


@pytest.mark.slow
@pytest.mark.dist(python="real")
def test_a_job_that_loses_devices_goes_on_under_a_plan_for_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its losses are those of a run on one device that nothing happened to, within the rounding of another order."""
    kept, command = tmp_path / "kept", [sys.executable, "-m", "superscaler", "train", TINY]
    lost = subprocess.Popen(
        [*command, "--plan", "hybrid:dp=2,tp=2", "--cluster", "local:4", "--steps", "100000", "--save", str(kept),
         "--save-every", "3", "--keep", "2"], start_new_session=True,
    )  # fmt: skip
    while not (kept / "latest").exists():
        time.sleep(0.2)
        assert lost.poll() is None
    os.killpg(lost.pid, signal.SIGKILL)
    lost.wait()
    machine = _machine(tmp_path, 2)
    capfd.readouterr()
    assert run("search", "--like", kept, "--cluster", machine, "--where", FEW) == 0
    printed = re.search(r"^ +superscaler (train .*) N$", capfd.readouterr().out, re.MULTILINE)
    assert printed is not None
    done = int((kept / "latest").read_text().strip().removeprefix("step-"))
    again, _ = answer(capfd, *shlex.split(printed[1]), done + 3)
    whole, _ = answer(capfd, "train", TINY, "--steps", done + 3, "--plan", "single", "--cluster", "local:1")
    assert again["world"] == 2
    assert again["losses"] == pytest.approx(whole["losses"][-3:], rel=1e-4)
