"""What the training loop costs beside its steps: CPU seconds between two steps, against those in a step.

python benchmarks/loop.py [--steps 30]: GPT-2 with 4 layers of width 256 on one device; with text, a schedule, clipping,
a log, and checkpoints.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

import superscaler as ss
from superscaler.models import build
from superscaler.runtime.step import Step
from superscaler.train.loop import train_rank
from superscaler.train.options import parse

MODEL = "gpt2:layers=4,hidden=256,heads=4,seq=128,vocab=4096,batch=8"
LIMIT = 0.02


class Timed(Step):
    """A step that keeps the CPU seconds at which it begins and ends."""

    times: list[tuple[float, float]]

    def __call__(self, *given: Any, **options: Any) -> Any:
        begun = time.process_time()
        loss = super().__call__(*given, **options)
        self.times.append((begun, time.process_time()))
        return loss


def run(directory: Path, steps: int) -> tuple[float, float]:
    """Return the median CPU seconds of a step, and of the loop between two steps."""
    found: list[Timed] = []

    def load(_: Path, **options: Any) -> Step:
        step: Any = ss.load(directory, **options)
        step.__class__, step.times = Timed, []
        found.append(step)
        return step  # type: ignore[no-any-return]

    given = ["--steps", str(steps), "--clip", "1", "--schedule", "cosine", "--warmup", "2"]
    given += ["--run", f"{directory}/run", "--save", f"{directory}/kept"]
    train_rank(parse(given)[1], directory, load)
    # The first steps warm up.
    times = found[0].times[3:]
    between = [after[0] - before[1] for before, after in pairwise(times)]
    return median(end - begin for begin, end in times), median(between)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--steps", type=int, default=30)
    steps = options.parse_args().steps
    built = build(MODEL)
    graph = ss.capture(built.module, built.args, built.kwargs, torch.optim.AdamW(built.module.parameters()))
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan"
        ss.compile(graph, "single", "local:1").save(plan)
        step, loop = run(plan, steps)
    share = loop / step
    print(f"a step {1e3 * step:.1f} ms of CPU, the loop beside it {1e3 * loop:.2f} ms: {share:.2%} (limit {LIMIT:.0%})")
    raise SystemExit(share > LIMIT)


if __name__ == "__main__":
    main()
