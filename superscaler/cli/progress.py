"""The progress of a command, with its seconds: a spinner on a terminal, lines elsewhere, and a table for --timings."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Timer
from typing import TYPE_CHECKING

from superscaler.timing import listeners

if TYPE_CHECKING:
    from rich.progress import Progress as Spinner

# A phase is said where it takes longer than so many seconds.
_PATIENCE = 1.0
# phase -> what is being done
_TEXTS = {
    "import": "importing torch",
    "model": "building the model",
    "export": "exporting the model by torch.export",
    "capture": "capturing the model",
    "check": "comparing two steps of the module with the graph",
    **dict.fromkeys(("plan", "schedule", "materialize", "emit"), "compiling"),
    "certify": "certifying the programs",
    "memory": "predicting the memory",
    "simulate": "predicting a step",
    "verify": "running steps of the plan and of the model",
    "save": "writing the plan",
}


class Progress:
    """A listener of phases. `seconds`: of each phase by name, in the order of their ends."""

    def __init__(self) -> None:
        # Until here the process has done nothing but import the command line.
        self._start = time.perf_counter() - time.process_time()
        self.seconds: dict[str, float] = {"command line": time.process_time()}
        self._open: list[str] = []
        self._first, self._said = "", ""
        self._timer: Timer | None = None
        self._spinner: Spinner | None = None

    @property
    def elapsed(self) -> float:
        """Return the seconds since the command was entered."""
        return time.perf_counter() - self._start

    def announce(self, text: str) -> None:
        """Set the line to print before the first phase that takes long."""
        self._first = text

    def __call__(self, name: str, seconds: float | None) -> None:
        if seconds is not None:
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if name in _TEXTS:
            self._open = [*self._open, name] if seconds is None else self._open[:-1]
            self._stop()
            if self._open:
                self._show(_TEXTS[self._open[-1]])

    def _show(self, text: str) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            self._say_first()
            self._spinner = _spinner()
            self._spinner.add_task(text)
            self._spinner.start()
        elif text != self._said:
            self._timer = Timer(_PATIENCE, self._say, [text])
            self._timer.daemon = True
            self._timer.start()

    def _say(self, text: str) -> None:
        self._said = text
        self._say_first()
        _print(f"[{self.elapsed:5.1f} s] {text}")

    def _say_first(self) -> None:
        if self._first:
            _print(self._first)
        self._first = ""

    def _stop(self) -> None:
        """End the display and its thread: a process is forked, and lines are printed, between phases only."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()
        if self._spinner is not None:
            self._spinner.stop()
        self._timer = self._spinner = None


def _spinner() -> Spinner:
    from rich.console import Console
    from rich.progress import Progress as Spinner
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    return Spinner(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4)


def _print(text: str) -> None:
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


@contextmanager
def listening() -> Iterator[Progress]:
    """Show the phases of the block."""
    progress = Progress()
    listeners.append(progress)
    try:
        yield progress
    finally:
        listeners.remove(progress)
