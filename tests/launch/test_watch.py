"""A rank that hangs, one that is stopped, and a launcher that is killed: all ranks end, and the culprit is named."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from kills import is_alive
from torch import Tensor, nn

import superscaler as ss

ROOT = Path(__file__).parents[2]
# Trains the plan; where rank 1 has an op that takes long, that is after its second step. What must be waited for is
# less than for users.
RUN = """
import os, sys, time
from pathlib import Path
from superscaler.launch import watch
from superscaler.runtime import executor
from superscaler.runtime.step import load
from superscaler.train.loop import main

watch.SILENCE, watch.LEAST = 6.0, 3.0
here = Path(__file__).parent
whole = executor.Rank.forward

def forward(self, *args):
    if self.steps == 2:
        (here / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    if self.steps == 2 and (here / "hang").exists() and self.communicator.rank == 1:
        while True:
            time.sleep(0.1)
    return whole(self, *args)

executor.Rank.forward = forward
# This file is not the one that compile wrote.
main([str(here), *sys.argv[1:]], load=lambda directory: load(directory, manifest=False))
"""
TRAIN = "import sys, pathlib; from superscaler.train.launch import train; "
TRAIN += "train(pathlib.Path(sys.argv[1]), world=2, steps=10**9)"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()).square().mean()


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    module, folder = Net(), tmp_path_factory.mktemp("watch") / "plan"
    graph = ss.capture(module, (torch.randn(4, 8),), optimizer=torch.optim.SGD(module.parameters(), lr=1e-3))
    ss.compile(graph, "pipeline_1f1b:stages=2,microbatches=2", "local:2").save(folder)
    (folder / "run.py").write_text(RUN)
    return folder


@pytest.fixture
def launcher(plan: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for file in plan.glob("pid*"):
        file.unlink()
    with subprocess.Popen([sys.executable, "-c", TRAIN, str(plan)], stderr=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def ranks(plan: Path) -> list[int]:
    """Return the processes of both ranks, once both have trained two steps."""
    deadline = time.monotonic() + 90
    while len(list(plan.glob("pid*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    # The watchdogs look once a second.
    time.sleep(3.0)
    return [int((plan / f"pid{rank}").read_text()) for rank in range(2)]


def wait_for_end(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank lives on"
        time.sleep(0.2)


@pytest.mark.dist
def test_no_rank_outlives_its_launcher(plan: Path, launcher: subprocess.Popen[str]) -> None:
    pids = ranks(plan)
    assert all(map(is_alive, pids))
    launcher.kill()
    wait_for_end(pids)


@pytest.mark.dist
def test_a_stopped_rank_is_named(plan: Path, launcher: subprocess.Popen[str]) -> None:
    pids = ranks(plan)
    os.kill(pids[1], signal.SIGSTOP)
    wait_for_end(pids)
    text = launcher.communicate(timeout=30)[1]
    assert f"rank 1 on {socket.gethostname()} does not answer: it said nothing for" in text
    assert "rank 0 is at program_0.py:" in text


@pytest.mark.dist
def test_a_rank_that_hangs_is_named_with_its_line(plan: Path, launcher: subprocess.Popen[str]) -> None:
    (plan / "hang").touch()
    try:
        pids = ranks(plan)
        wait_for_end(pids)
    finally:
        (plan / "hang").unlink()
    text = launcher.communicate(timeout=30)[1]
    assert "rank 1 hangs: it has been at program_1.py:" in text
    assert "rt.forward(" in text
    assert "in step 2 for" in text
