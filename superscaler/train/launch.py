"""Train a plan directory with processes of this machine."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from superscaler.errors import InputError, RuntimeFailure
from superscaler.runtime.launch import launch
from superscaler.train.data import check_text
from superscaler.train.loop import check_options


def train(
    directory: Path, *, world: int, steps: int, data: Path | None = None, clip: float | None = None, seed: int = 0
) -> dict[str, Any]:
    """Train a plan directory with `world` processes on this machine.

    Returns `losses` (per step), `gradient_norms` (with clip), `tokens_per_second` (without the first step, which
    warms up), `seconds` (of all steps), `memory_bytes` (rank 0's peak) and `world`. Raises RuntimeFailure naming the
    first rank that failed; all others have ended by then.
    """
    program = directory / "run.py"
    if not program.is_file():
        raise InputError(f"{directory} is not a plan directory: it has no run.py; write one with superscaler compile.")
    if world < 1:
        raise InputError(f"a plan runs on 1 or more processes, not on {world}.")
    check_options(steps, clip)
    check_text(data, 1)
    with tempfile.TemporaryDirectory(prefix="superscaler-") as folder:
        metrics = Path(folder) / "metrics.jsonl"
        options = ["--launched", str(folder), "--steps", str(steps), "--seed", str(seed), "--metrics", str(metrics)]
        options += [] if clip is None else ["--clip", str(clip)]
        options += [] if data is None else ["--data", str(data.resolve())]
        launch(program, options, world, Path(folder))
        if not metrics.is_file():
            raise RuntimeFailure(f"{program} ended without an error, but wrote no metrics; compile the plan again.")
        return _summary([json.loads(line) for line in metrics.read_text().splitlines()], world)


def _summary(entries: list[dict[str, Any]], world: int) -> dict[str, Any]:
    warm = entries[1:] or entries
    norms = [entry["gradient_norm"] for entry in entries]
    return {
        "losses": [entry["loss"] for entry in entries],
        "gradient_norms": [norm for norm in norms if norm is not None],
        "tokens_per_second": sum(e["tokens"] for e in warm) / sum(e["seconds"] for e in warm),
        "seconds": sum(entry["seconds"] for entry in entries),
        "memory_bytes": max(entry["memory_bytes"] for entry in entries),
        "world": world,
    }
