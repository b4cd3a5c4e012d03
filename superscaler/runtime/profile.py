"""The profile of steps on a rank: torch's profiler, under the plan's names for its work and communication.

A call of emitted code is an event `superscaler WHAT NUMBER`: the name of a task, or the number of earlier calls of its
sort in the step. So `superscaler report --run` finds the instruction of each. On a GPU the time of an event is that of
its kernels.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from superscaler.collectives import KINDS
from superscaler.comm.communicator import Communicator, Handle
from superscaler.runtime.executor import Rank
from superscaler.runtime.step import Step
from superscaler.specs.file_errors import writing

PREFIX = "superscaler "
# The version of the files of a run.
VERSION = 1
# Rounds in which ranks compare their clocks.
_ROUNDS = 15
_WHAT = {
    **{name: name for name in ("forward", "backward", "backward_input", "backward_weight")},
    **{name: name for name in ("slice", "send", "recv", "offload", "fetch", "update", "loss")},
    **{name + bucket: "collective" for name in KINDS for bucket in ("", "_bucket")},
    **dict.fromkeys(("to_host", "to_device"), "copy"),
}


class _Waited:
    """A started operation whose wait is an event."""

    def __init__(self, work: Handle, name: str) -> None:
        self._work, self._name = work, name

    def wait(self) -> Tensor:
        with record_function(f"{PREFIX}wait_{self._name}"):
            return self._work.wait()


class _Recorded:
    """A rank whose calls are events."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._counts = rank, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._rank, name)
        return partial(self._call, _WHAT[name], found) if name in _WHAT else found

    def _call(self, what: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
        name = f"{what} {given[0] if what.startswith(('forward', 'backward')) else self._counts[what]}"
        if what == "update":
            with record_function(f"{PREFIX}wait_{name}"):
                self._rank.communicator.flush()
        with record_function(f"{PREFIX}{name}"):
            made = function(*given, **options)
        self._counts[what] += 1
        if what not in ("collective", "recv", "copy"):
            return made
        return tuple(_Waited(work, name) for work in made) if isinstance(made, tuple) else _Waited(made, name)


class Profile:
    """A recorder of `count` steps of a rank, after a first one that warms up, into a file of a folder."""

    def __init__(self, step: Step, count: int, folder: Path) -> None:
        self._step, self._left, self._folder, self._is_warm = step, count, folder, False
        self._steps = 0
        self._torch: Any = None

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Record the step of the block, if it is one of the requested ones."""
        if not self._is_warm or not self._left:
            yield
            self._is_warm = True
            return
        if self._torch is None:
            self._begin()
        self._step.state.shown = _Recorded
        try:
            with record_function(f"{PREFIX}step {self._steps}"):
                yield
        finally:
            self._step.state.shown = None
        self._steps, self._left = self._steps + 1, self._left - 1
        if not self._left:
            self._end()

    def _begin(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._torch = profile(activities=activities)
        self._torch.start()
        self._offset, self._error = clock_offset(self._step.state.communicator)
        self._mark = time.time_ns()
        with record_function(f"{PREFIX}clock 0"):
            pass

    def _end(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._torch.stop()
        events = [e for e in self._torch.events() if e.name.startswith(PREFIX)]
        mark = next(e for e in events if e.name.endswith("clock 0"))
        # Seconds of the clock of rank 0.
        zero = (self._mark + self._offset) * 1e-9 - mark.time_range.start * 1e-6
        rows = sorted(
            (
                e.time_range.start * 1e-6,
                e.time_range.end * 1e-6,
                e.name[len(PREFIX) :],
                e.device_type.name == "CUDA",
            )
            for e in events
        )
        found = {
            "version": VERSION,
            "rank": self._step.rank,
            "world": self._step.world,
            "code": self._step.plan["manifest"]["code"],
            "compiled": self._step.state.compiled is not None,
            "zero": zero,
            "clock_error": self._error,
            "events": [(round(start, 9), round(end, 9), name, int(is_gpu)) for start, end, name, is_gpu in rows],
        }
        with writing(f"--run {self._folder}", "name a folder that you may write to"):
            self._folder.mkdir(parents=True, exist_ok=True)
            (self._folder / f"rank_{self._step.rank}.json").write_text(json.dumps(found))


def clock_offset(communicator: Communicator) -> tuple[int, float]:
    """Return the nanoseconds from this rank's clock to that of rank 0, and the spread of the rounds, in seconds.

    All ranks leave a barrier at nearly the same time.
    """
    stamps = torch.zeros(communicator.world, _ROUNDS, dtype=torch.int64)
    for k in range(_ROUNDS):
        communicator.barrier()
        stamps[communicator.rank, k] = time.time_ns()
    stamps = communicator.sum_of_all(stamps.to(communicator.device))
    offsets = (stamps[0] - stamps[communicator.rank]).tolist()
    middle = int(statistics.median(offsets))
    return middle, statistics.median(abs(x - middle) for x in offsets) * 1e-9
