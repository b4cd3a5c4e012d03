"""Plans with hosts on real processes: equal, and trained on from a checkpoint under a plan without hosts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import superscaler as ss
from superscaler.plans import resolve
from tests.graphs import graph_of
from tests.rewrites import offloaded, swapped

pytestmark = pytest.mark.dist

PLAN = """
import superscaler as ss
from superscaler.plans import resolve


@ss.sprogram
def swap(graph, cluster):
    resolve("data_parallel")(graph, cluster)
    for block in graph.blocks:
        again = ss.op_trans(graph, graph.select(module=block.path), ss.Recompute())
        ss.op_assign(graph, ss.op_trans(graph, again, ss.Insert()), "host")
    ss.op_assign(graph, [op for op in graph.ops if op.kind == "optimizer"], "host")
"""


def test_a_step_on_processes_equals_the_exported_model() -> None:
    for name in ("data_parallel", "pipeline_1f1b:microbatches=2"):
        plan = ss.compile(graph_of("gpt2:size=tiny", "SGD"), offloaded(swapped(resolve(name))), "local:2")
        found = plan.verify(backend="processes")
        assert found["equal"], found
        assert found["bytes_moved"] == found["bytes_planned"] > 0


def test_training_goes_on_without_hosts(tmp_path: Path) -> None:
    (tmp_path / "swap.py").write_text(PLAN)

    def train(plan: str, cluster: str, *more: str) -> list[float]:
        command = [sys.executable, "-m", "superscaler", "train", "gpt2:size=tiny", "--plan", plan, "--cluster", cluster]
        done = subprocess.run([*command, *more, "--json"], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
        losses: list[float] = json.loads(done.stdout.splitlines()[-1])["losses"]
        return losses

    plain = train("single", "local:1", "--steps", "6")
    kept = str(tmp_path / "kept")
    hosted = train(f"{tmp_path / 'swap.py'}:swap", "local:2", "--steps", "3", "--save", kept)
    resumed = train("single", "local:1", "--steps", "6", "--resume", kept)
    assert [*hosted, *resumed] == pytest.approx(plain, abs=1e-5)
