"""One rank of many plans, which run one after the other on the processes of one launch."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from superscaler.comm.distributed import connect
from superscaler.launch.process import run_rank
from superscaler.runtime.load import modules
from superscaler.runtime.step import build_step
from superscaler.verify.results import run_steps


def work(folder: Path) -> None:
    communicator = connect()
    found = []
    for plan, files, values, batch in torch.load(folder / "plans"):
        step = build_step(plan, modules(files), values, communicator)
        found.append([tuple(getattr(result, f) for f in result.__slots__) for result in run_steps(step, batch)])
        communicator.moved = 0
    torch.save(found, folder / f"results{communicator.rank}")
    communicator.close()


if __name__ == "__main__":
    run_rank(lambda: work(Path(sys.argv[1])), log=Path(sys.argv[1]))
