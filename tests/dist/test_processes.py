"""Plans on real gloo processes: equal to one device, and a lost rank ends the others with its name."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from superscaler.cluster import Cluster
from superscaler.models import build
from superscaler.plan import Plan, capture, compile
from superscaler.plans import resolve

pytestmark = pytest.mark.dist


def plan_of(model: str, spec: str, world: int, again: bool) -> Plan:
    built = build(model)
    if again:
        built.module.gradient_checkpointing_enable()
    graph = capture(built.module, built.args, built.kwargs, torch.optim.AdamW(built.module.parameters(), lr=1e-3))
    return compile(graph, resolve(spec), Cluster.local(world))


@pytest.mark.parametrize(
    ("model", "spec", "world", "again"),
    [
        # Other plans are those of test_random_plans.py, which run on the ranks of one launch.
        ("mixtral:size=tiny,layers=1", "expert_parallel:capacity=1.25", 2, False),
        ("gpt2:size=tiny,dropout=0.1", "tensor_parallel", 2, True),
        ("gpt2:size=tiny", "pipeline_1f1b:stages=2,microbatches=4", 2, True),
        pytest.param("gpt2:size=tiny", "hybrid:dp=2,tp=2,pp=2,microbatches=2", 8, False, marks=pytest.mark.slow),
    ],
)
def test_a_step_on_processes_equals_the_exported_model(model: str, spec: str, world: int, again: bool) -> None:
    result = plan_of(model, spec, world, again).verify(backend="processes")
    assert result["equal"], result
    assert result["bytes_moved"] == result["bytes_planned"] > 0


def superscaler(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "superscaler", *arguments]


def test_training_from_the_command_line_gives_the_losses_of_one_device() -> None:
    found = []
    for plan, cluster in (("single", "local:1"), ("data_parallel", "local:2")):
        command = superscaler("train", "gpt2:size=tiny", "--plan", plan, "--cluster", cluster, "--steps", "20", "--json")
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1])["losses"])
    assert len(found[0]) == 20
    assert found[1] == pytest.approx(found[0], abs=1e-5)


@pytest.mark.slow
def test_a_plan_with_loops_trains_from_its_directory_and_others_go_on(tmp_path: Path) -> None:
    def losses(plan: str, steps: int, *options: str) -> list[float]:
        world = 1 if plan == "single" else 2
        told = "train", model, "--plan", plan, "--cluster", f"local:{world}", "--steps", f"{steps}", *options, "--json"
        done = subprocess.run(superscaler(*told), capture_output=True, text=True, timeout=240, check=True)
        found: list[float] = json.loads(done.stdout.splitlines()[-1])["losses"]
        return found

    model, loops = "mlp:layers=4,batch=32", "pipeline_1f1b:microbatches=32"
    plan, save = tmp_path / "plan", ("--save", str(tmp_path / "saved"))
    go_on = *save, "--resume", str(tmp_path / "saved")
    found = losses(loops, 2, "--out", str(plan), *save)
    assert "for m in range(" in (plan / "program_0.py").read_text()
    subprocess.run(superscaler("validate", str(plan)), check=True, timeout=120)
    found += losses("data_parallel", 4, *go_on) + losses(loops, 6, *go_on)
    assert found == pytest.approx(losses("single", 6), rel=1e-5)


@pytest.mark.dist(python="real")
def test_killing_one_rank_ends_the_others_with_its_name(tmp_path: Path) -> None:
    out = tmp_path / "plan"
    command = superscaler(
        "train", "gpt2:size=tiny", "--plan", "data_parallel", "--cluster", "local:2", "--steps", "100000", "--out", str(out)
    )
    errors = tmp_path / "errors"
    with errors.open("w") as file, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file) as run:
        victim = wait_for_rank(run.pid, "1")
        while "step" not in errors.read_text() and run.poll() is None:
            time.sleep(0.2)
        # A look of its watch.
        time.sleep(2)
        os.kill(victim, signal.SIGKILL)
        assert run.wait(timeout=60) == 1
    text = errors.read_text()
    assert re.search(r"rank 1 of 2 was killed by SIGKILL at program_0\.py:\d+ \(.+\) \(the system", text), text
    assert not psutil.pid_exists(victim)
    assert "Traceback" not in text


def wait_for_rank(parent: int, rank: str) -> int:
    """Return the process of a rank of a running launch."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        for child in psutil.Process(parent).children(recursive=True):
            try:
                if child.environ().get("RANK") == rank:
                    return child.pid
            except psutil.Error:
                continue
        time.sleep(0.2)
    raise TimeoutError(f"rank {rank} never started")
