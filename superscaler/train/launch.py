"""Training of a plan directory with processes of this machine."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from superscaler.errors import InputError, RuntimeFailure
from superscaler.interrupt import TemporaryFolder
from superscaler.launch import forks
from superscaler.launch.launch import launch
from superscaler.store.checkpoint import check_folder
from superscaler.store.tensors import open_stored
from superscaler.timing import record
from superscaler.train.data import check_text
from superscaler.train.options import RankOptions, RunOptions, check_options, check_profile
from superscaler.train.resume import (
    OUTCOME_FILE,
    STOP_FILE,
    TIMES_FILE,
    check_count,
    check_resume,
    check_saving,
    is_first,
    saving_folder,
)
from superscaler.train.schedule import check_schedule


def start_server() -> bool:
    """Start the process that ranks may be forks of; return whether they may."""
    # The first optimizer imports torch._dynamo, which takes seconds.
    return forks.start_server(["torch._dynamo", "superscaler.train.loop", "superscaler.launch.watch"])


def check(options: RunOptions) -> None:
    """Raise InputError for options that ranks would refuse, before any rank starts."""
    check_options(options)
    check_profile(options)
    check_gpu(options)
    folder = saving_folder(options.save, options.resume)
    check_saving(options, folder)
    check_schedule(options.schedule, options.warmup, options.steps)
    check_count("--eval-every", options.eval_every)
    if options.eval_every is not None and options.eval is None:
        raise InputError("--eval-every needs --eval FILE.py:function, the batches to evaluate.")
    if options.resume is not None and not is_first(options.save, options.resume):
        check_resume(options.resume, options.steps, options.data)
    if options.weights is not None:
        open_stored(options.weights)
    if folder is not None:
        check_folder(folder)


def check_gpu(options: RunOptions) -> None:
    """Raise InputError for what needs a GPU, where torch sees none."""
    if options.cuda_graph:
        import torch

        from superscaler.runtime.replay.cuda import check_device

        check_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def train(directory: Path, *, world: int, is_forked: bool = False, **given: Any) -> dict[str, Any]:
    """Train a plan directory with `world` processes on this machine. `given`: of `RankOptions`; `is_forked`: of
    `launch`.

    Returns `losses` (per step), `gradient_norms` (with clip), `tokens_per_second` (without the first step, which warms
    up; `unit`: tokens, or samples of other inputs), `seconds` (of all steps), `memory_bytes` (rank 0's peak) and
    `world`; with checkpoints also `saved` (the last one), `failed_saves` (the reasons), `stopped` (the cause, if it
    was), `start` and `steps` (of all runs). Raises RuntimeFailure with the first rank that failed; all others have
    ended by then.
    """
    program, options = directory / "run.py", RankOptions(**given)
    if not program.is_file():
        raise InputError(f"{directory} is not a plan directory: it has no run.py; write one with superscaler compile.")
    if world < 1:
        raise InputError(f"a plan runs on 1 or more processes, not on {world}.")
    check_options(options)
    check_text(options.data, 1)
    with TemporaryFolder() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        replace(options, launched=Path(folder), metrics=metrics).write(Path(folder))
        is_saved = saving_folder(options.save, options.resume) is not None
        started = time.time()
        stop = metrics.with_name(STOP_FILE) if is_saved else None
        launch(program, ["--launched", folder], world, Path(folder), stop, is_forked)
        _record([started, *_read(metrics.with_name(TIMES_FILE), []), time.time()])
        entries = metrics.read_text().splitlines() if metrics.is_file() else []
        if not entries:
            raise RuntimeFailure(f"{program} ended without an error, but wrote no metrics; compile the plan again.")
        ending = _read(metrics.with_name(OUTCOME_FILE), {})
        return _summary([json.loads(line) for line in entries], world) | ending


def _read(file: Path, default: Any) -> Any:
    """Return the JSON in a file that rank 0 may have written."""
    return json.loads(file.read_text()) if file.is_file() else default


def _record(times: list[float]) -> None:
    """Record the phases of a launch, between its times."""
    names = ("start processes", "load and connect", "first step", "other steps")
    for name, begin, end in zip(names, times, times[1:], strict=False):
        record(name, end - begin)


def _summary(entries: list[dict[str, Any]], world: int) -> dict[str, Any]:
    evaluations = [entry for entry in entries if "evaluation" in entry]
    entries = [entry for entry in entries if "loss" in entry]
    warm = entries[1:] or entries
    norms = [entry["gradient_norm"] for entry in entries]
    return {
        "losses": [entry["loss"] for entry in entries],
        "gradient_norms": [norm for norm in norms if norm is not None],
        "tokens_per_second": sum(e["tokens"] for e in warm) / sum(e["seconds"] for e in warm),
        "unit": entries[0]["unit"],
        "seconds": sum(entry["seconds"] for entry in entries),
        "memory_bytes": max(entry["memory_bytes"] for entry in entries),
        "world": world,
        **({"evaluations": evaluations} if evaluations else {}),
    }
