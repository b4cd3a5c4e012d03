"""Training that is killed at random moments and goes on from its last checkpoint, as a user would do it.

    python tests/faults/kills.py [--trials 50] [--victim rank|launcher|torchrun|job] [--saving] [--seed 0] [--out FILE]

Every trial trains two ranks with a checkpoint a step, kills a rank, the launcher, or all of the job,
with SIGKILL, at any moment or while a checkpoint is written, waits until all have ended, and resumes. It fails where a
process lives on, the culprit is not named, the checkpoint is not the newest whole one, a loss is not that of the run
which nobody disturbed, bit for bit, or a checkpoint that is not whole is still there at the end. With `--victim
torchrun` a rank is killed under `torchrun --max-restarts 1`, which starts all ranks again by the same command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import superscaler as ss

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from superscaler.train.launch import train  # noqa: E402
from tests.helpers.quick import quick_python  # noqa: E402

STEPS, WORLD, LIMIT = 60, 2, 30.0
TRAIN = """
import json, sys
from pathlib import Path
from superscaler.train.launch import train
plan, out, steps, keeping = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
kept = {k: Path(v) if k in ("save", "resume") else v for k, v in keeping.items()}
out.write_text(json.dumps(train(plan, world=2, steps=steps, **kept)))
"""


class Noisy(nn.Module):
    """Two layers with dropout between them, so that random numbers must go on, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(64, 512), nn.Dropout(0.2), nn.Linear(512, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.first(x).tanh())).square().mean()


def make_plan(folder: Path) -> Path:
    torch.manual_seed(0)
    module = Noisy()
    graph = ss.capture(module, (torch.randn(32, 64),), optimizer=torch.optim.AdamW(module.parameters(), lr=1e-3))
    ss.compile(graph, "pipeline_1f1b:stages=2,microbatches=4", f"local:{WORLD}").save(folder, evaluation=False)
    return folder


def start(plan: Path, out: Path, **keeping: Any) -> subprocess.Popen[str]:
    told = json.dumps({k: str(v) if isinstance(v, Path) else v for k, v in keeping.items()})
    command = [sys.executable, "-c", TRAIN, str(plan), str(out), str(STEPS), told]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)


def wait_for_save(saved: Path, process: Any, draw: random.Random, is_saving: bool) -> None:
    """Wait for a first checkpoint, then for a random moment, in a save if `is_saving`."""
    wait_for_checkpoint(process, saved)
    time.sleep(draw.uniform(0.0, 1.0 if is_saving else 2.0))
    while is_saving and not unfinished(saved) and process.poll() is None:
        time.sleep(0.0005)
    time.sleep(draw.uniform(0.0, 0.005))


def losses_of(plan: Path) -> list[float]:
    """Return the losses of a run that nobody disturbs."""
    found: list[float] = train(plan, world=WORLD, steps=STEPS)["losses"]
    return found


def ranks_of(saved: Path) -> dict[int, int]:
    """Return the process of each rank that saves into a folder."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = dict(v.split("=", 1) for v in (process / "environ").read_text().split("\0") if "=" in v)
            if str(saved) in (process / "cmdline").read_text().split("\0") and "RANK" in variables:
                found[int(variables["RANK"])] = int(process.name)
    return found


def unfinished(saved: Path) -> list[str]:
    """Return the checkpoints that are not whole, or not yet."""
    return [folder.name for folder in saved.glob("step-*") if not (folder / "manifest.json").is_file()]


def trial(
    plan: Path, folder: Path, whole: list[float], draw: random.Random, victim: str, is_saving: bool = False
) -> str:
    """Disturb one run and let it go on. Returns what was done; raises AssertionError for what is not right."""
    saved, out = folder / "checkpoints", folder / "out.json"
    process = start(plan, out, save=saved, save_every=1, keep=3)
    wait_for_save(saved, process, draw, is_saving)
    ranks, number, killed = ranks_of(saved), draw.randrange(WORLD), time.monotonic()
    dead = {"rank": [ranks.get(number, process.pid)], "launcher": [process.pid]}.get(
        victim, [process.pid, *ranks.values()]
    )
    for one in dead:
        os.kill(one, signal.SIGKILL)
    text = process.communicate(timeout=LIMIT)[1]
    while any(map(is_alive, ranks.values())):
        assert time.monotonic() - killed < LIMIT, f"a rank lives on after {victim} was killed"
        time.sleep(0.1)
    if process.pid not in dead and not out.is_file():
        assert f"rank {number} of {WORLD} was killed by SIGKILL" in text, text[-2000:]
    step = int((saved / "latest").read_text().strip().removeprefix("step-").split(".")[0])
    done = f"{victim} {number}, goes on from step {step}{', half of one left' if unfinished(saved) else ''}"
    if step == STEPS:
        return done
    out.unlink(missing_ok=True)
    text = start(plan, out, resume=saved).communicate(timeout=600)[1]
    assert out.is_file(), text[-2000:]
    result = json.loads(out.read_text())
    assert result["start"] == step, (result["start"], step)
    assert result["losses"] == whole[step:], "other losses than those of the run that nobody disturbed"
    assert not unfinished(saved), unfinished(saved)
    return done


def restart(plan: Path, folder: Path, whole: list[float], draw: random.Random) -> str:
    """Kill one rank of a run that torchrun starts again. Returns and raises as `trial`."""
    saved, metrics = folder / "checkpoints", folder / "metrics"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD), "--max-restarts", "1"]
    command += [str(plan / "run.py"), "--steps", str(STEPS), "--metrics", str(metrics)]
    command += ["--save", str(saved), "--save-every", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    wait_for_checkpoint(process, saved)
    time.sleep(draw.uniform(0.0, 0.5))
    number = draw.randrange(WORLD)
    os.kill(ranks_of(saved)[number], signal.SIGKILL)
    text = process.communicate(timeout=600)[1]
    assert process.returncode == 0, text
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert {step["step"]: step["loss"] for step in steps} == dict(enumerate(whole))
    assert all(step["loss"] == whole[step["step"]] for step in steps)
    return f"rank {number}, {len(steps) - STEPS} steps were trained again" if "goes on from" in text else "too late"


def wait_for_checkpoint(process: Any, saved: Path) -> None:
    deadline = time.monotonic() + 120
    while not (saved / "latest").is_file():
        assert process.poll() is None, "it ended before the first checkpoint"
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--victim", choices=["rank", "launcher", "torchrun", "job"], default="rank")
    parser.add_argument("--saving", action="store_true", help="kill while a checkpoint is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file to which the result is added")
    options = parser.parse_args()
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        sys.executable = str(quick_python(Path(folder)))
        plan = make_plan(Path(folder) / "plan")
        whole = losses_of(plan)
        for number in range(options.trials):
            own = Path(folder) / f"trial{number}"
            own.mkdir()
            draw = random.Random(options.seed + number)
            if options.victim == "torchrun":
                told = restart(plan, own, whole, draw)
            else:
                told = trial(plan, own, whole, draw, options.victim, options.saving)
            print(number, told, flush=True)
            done["half of one left"] += told.endswith("left")
            done["ended before"] += f"from step {STEPS}" in told
    when = "while a checkpoint is written" if options.saving else "at any moment"
    line = (
        f"{options.victim:8} killed {when:29} {options.trials:4} trials, all resumed bit for bit; "
        f"{done['half of one left']:3} left half a checkpoint, {done['ended before']} came after the end"
    )
    print(line)
    if options.out is not None:
        with options.out.open("a") as file:
            print(line, file=file)


if __name__ == "__main__":
    main()
