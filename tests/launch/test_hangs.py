"""A rank that does something else while the others wait for it: it is named, with its line, and stacks are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import superscaler as ss
from superscaler.launch import hangs
from superscaler.launch.hangs import Place, late
from tests.helpers.small_plans import Net
from tests.helpers.sweeps import slow

ROOT = Path(__file__).parents[2]
# A loop of its own; each step is where a user may forget the other ranks.
LOOP = """
import os, sys, time
from pathlib import Path

import torch

import superscaler as ss
from superscaler.launch import watch
from superscaler.launch.process import run_rank

watch.LOOK = 0.1
here = Path(__file__).parent


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, row):
        if row == 8 and os.environ["RANK"] == "1":
            time.sleep(2.2)  # a slow disk
        return torch.full((8,), 0.1 * row)


def main():
    step = ss.load(here / "plan")
    for number, x in enumerate(torch.utils.data.DataLoader(Data(), batch_size=4)):
        loss = step({"x": x})
        if step.rank == 0:
            print(number, loss.item(), flush=True)
        if number == 3:
            if step.rank == 1:
                time.sleep(2.2)  # a checkpoint of its own
            step.save(here / "kept")
    step.close()


run_rank(main)
"""
LAUNCH = "import sys, pathlib; from superscaler.launch.launch import launch; launch(pathlib.Path(sys.argv[1]), [], 2)"


@pytest.mark.dist
def test_a_rank_outside_of_the_plan_is_named_with_its_line(tmp_path: Path) -> None:
    module = Net()
    graph = ss.capture(module, (torch.randn(4, 8),), optimizer=torch.optim.SGD(module.parameters(), lr=1e-3))
    ss.compile(graph, "data_parallel", "local:2").save(tmp_path / "plan", evaluation=False)
    (tmp_path / "loop.py").write_text(LOOP)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), hangs.VARIABLE: "1.1"}
    command = [sys.executable, "-c", LAUNCH, str(tmp_path / "loop.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    # All steps of the loop, whose numbers one rank alone reads: that makes no rank wait.
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1", "2", "3", "4", "5"]
    lines = LOOP.splitlines()
    slow = [f"loop.py:{number}" for number, line in enumerate(lines, 1) if "time.sleep(2.2)" in line]
    warnings = re.findall(r"warning: (rank 1 on .*)\n(rank 0 has waited .*)", done.stderr)
    assert len(warnings) == 2, done.stderr
    (data, _), (saved, waits) = warnings
    assert "has not begun step 3 of this run: since " in data
    assert f"{slow[0]} in __getitem__ (time.sleep(2.2)  # a slow disk)" in data
    assert "does something else: since " in saved
    assert f"{slow[1]} in main (time.sleep(2.2)  # a checkpoint of its own)" in saved
    assert '(step.save(here / "kept"))' in waits
    stacks = {rank: (tmp_path / "plan" / "stacks" / f"rank{rank}.txt").read_text() for rank in (0, 1)}
    assert "time.sleep(2.2)  # a checkpoint of its own" in stacks[1]
    assert "step.save(here" in stacks[0]


# Its third batch is a row too long, on all ranks or on one.
BAD = """
import os, sys
import torch
import superscaler as ss

step = ss.load(sys.argv[1])
for number in range(4):
    is_bad = number == 2 and os.environ["RANK"] in sys.argv[2]
    step({"x": torch.ones(5 if is_bad else 4, 8)})
"""


@pytest.mark.dist
@pytest.mark.parametrize("bad", ["01", *slow(("1",))])
def test_a_bad_batch_is_one_message_of_one_rank(bad: str, tmp_path: Path) -> None:
    module = Net()
    graph = ss.capture(module, (torch.randn(4, 8),), optimizer=torch.optim.SGD(module.parameters(), lr=1e-3))
    ss.compile(graph, "data_parallel", "local:2").save(tmp_path / "plan", evaluation=False)
    (tmp_path / "loop.py").write_text(BAD)
    program = [str(tmp_path / "loop.py"), str(tmp_path / "plan"), bad]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    said = re.findall(r"^error: rank (\d) (.*)$", done.stderr, re.MULTILINE)
    assert len(said) == 1, done.stderr
    assert said[0][0] in bad
    assert "loop.py:9 in <module>" in said[0][1]
    assert "'x' has shape (5, 8), but this plan was compiled for (4, 8)" in said[0][1]
    # That of torchrun, whose report has the message of the rank that failed first.
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert "InputError: 'x' has shape (5, 8)" in done.stderr.partition("Root Cause")[2]


def place(calls: int = 3, seconds: float = 70.0, *, inside: bool = True, waiting: bool = True) -> Place:
    return Place(calls, inside, waiting, seconds, "at a line", "here")


@pytest.mark.parametrize(
    ("places", "told"),
    [
        # The first rank that waits says it, of the one that has not begun the step.
        ([place(), place(2, inside=False, waiting=False), place()], {0: [1]}),
        ([place(2, inside=False, waiting=False), place(), place()], {1: [0]}),
        # One that computes in the plan's code has a limit of its own; all that wait have lost a message.
        ([place(), place(inside=True, waiting=False)], {}),
        ([place(), place()], {}),
        # Not long enough; all outside of the plan; one that has ended.
        ([place(seconds=50.0), place(2, inside=False, waiting=False)], {}),
        ([place(inside=False, waiting=False), place(inside=False, waiting=False)], {}),
        ([place(), None], {}),
        # It waits in a save, as on GPUs in `loss.item()`, of which nobody knows that it waits.
        ([place(inside=False), place(inside=False, waiting=False)], {0: [1]}),
        ([place(inside=False, waiting=False), place(2, inside=False, waiting=False)], {0: [1]}),
    ],
)
def test_who_is_late(places: list[Place | None], told: dict[int, list[int]]) -> None:
    found = {rank: late(rank, places, 60.0) for rank in range(len(places))}
    assert {rank: ranks for rank, ranks in found.items() if ranks} == told
