"""One rank that trains plans of a folder, one after the other, by the loop of a user.

Each plan has its batches beside it; its losses are written there, and what was trained as a checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import superscaler as ss
from superscaler.launch.process import run_rank


def work(folder: Path, names: list[str]) -> None:
    for name in names:
        step = ss.load(folder / name)
        given = torch.load(folder / name / "batches")
        losses = [float(step({n: batch[n] for n in step.inputs})) for batch in given]
        (folder / name / f"losses{step.rank}").write_text(json.dumps(losses))
        step.save(folder / name / "checkpoint")


if __name__ == "__main__":
    run_rank(lambda: work(Path(sys.argv[1]), sys.argv[2:]), log=Path(sys.argv[1]))
