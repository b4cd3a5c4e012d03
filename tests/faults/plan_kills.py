"""A process that writes a plan over another is killed: whatever the moment, one of the two is whole, or none is read.

    python tests/faults/plan_kills.py

Once before every operation on a file that the writing needs. After each kill the directory holds the old plan, the new
plan, or is refused in one line; writing again repairs it; a file of the user's stays.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import superscaler as ss
from superscaler.errors import InputError
from superscaler.store.plan import read_plan

MINE = "notes.txt"
# What Python tells of before it does it.
EVENTS = ("open", "os.", "shutil.")


class Net(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def plans() -> dict[str, ss.Plan]:
    """Return two plans of one model, with other files."""
    torch.manual_seed(0)
    net = Net(4, 4)
    graph = ss.capture(net, (torch.ones(8, 4),), optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    chosen = {"old": ("pipeline_1f1b:stages=2,microbatches=2", "local:2"), "new": ("single", "local:1")}
    return {name: ss.compile(graph, plan, cluster) for name, (plan, cluster) in chosen.items()}


def state(folder: Path, known: dict[str, ss.Plan]) -> str:
    """Return which plan a directory holds, whole; "refused" where it holds none."""
    try:
        plan = read_plan(folder)
        plan.check()
    except InputError as error:
        return "refused" if str(error).startswith(str(folder)) and len(str(error).splitlines()) == 1 else repr(error)
    return next(name for name, one in known.items() if one.compiled.program.world == plan.head["world"])


def save_killed(plan: ss.Plan, folder: Path, event: int) -> bool:
    """Save a plan in a process that is killed before an event on files; tell whether it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(name: str, _: object) -> None:
            nonlocal count
            if name.startswith(EVENTS):
                count += 1
                if count == event:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        plan.save(folder, evaluation=False)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def trial(known: dict[str, ss.Plan], folder: Path, is_first: bool, event: int) -> tuple[bool, str]:
    """Kill what writes the new plan over the old one, or into nothing; look, and write again."""
    shutil.rmtree(folder, ignore_errors=True)
    if not is_first:
        known["old"].save(folder, evaluation=False)
        (folder / MINE).write_text("mine")
    was_killed = save_killed(known["new"], folder, event)
    found = state(folder, known)
    assert found in (("refused", "new") if is_first else ("old", "refused", "new")), found
    assert was_killed or found == "new"
    known["new"].save(folder, evaluation=False)
    assert state(folder, known) == "new"
    listed = read_plan(folder).head["manifest"]["files"].keys()
    mine = set() if is_first else {MINE}
    there = {str(file.relative_to(folder)) for file in folder.rglob("*")}
    assert there == {*listed, "plan.json", "initial.safetensors", *mine}, there
    return was_killed, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="of the events, every how many-th")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    # A process with threads forks: the child writes files, and is killed if it hangs.
    warnings.simplefilter("ignore", DeprecationWarning)
    torch.set_num_threads(1)
    known, draw, found = plans(), random.Random(options.seed), Counter[str]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "plan"
        for is_first in (False, True):
            event = 1 + draw.randrange(options.every)
            was_killed = True
            while was_killed:
                was_killed, what = trial(known, folder, is_first, event)
                found[what] += was_killed
                event += options.every
    print(f"{found.total()} kills: {dict(found)}")


if __name__ == "__main__":
    main()
