"""The output of a command: text and tables for people, one JSON object, and its progress.

Progress is a spinner on a terminal, lines elsewhere, and a table of seconds for --timings.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from threading import Timer
from typing import TYPE_CHECKING, Any

from superscaler.errors import PlanError
from superscaler.timing import listeners

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress as Spinner
    from rich.table import Table

# A phase is said where it takes longer than so many seconds.
_PATIENCE = 1.0
# Columns of a table that is not on a terminal.
_WIDE = 160
# phase -> what is being done
_TEXTS = {
    "import": "importing torch",
    "model": "building the model",
    "export": "exporting the model by torch.export",
    "capture": "capturing the model",
    "check": "comparing two steps of the module with the graph",
    "smaller": "trying smaller batches on the module",
    **dict.fromkeys(("plan", "schedule", "materialize", "emit", "translation"), "compiling"),
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

    def say(self, text: str) -> None:
        """Print a line that is no phase."""
        _print(text)

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


@contextmanager
def printing(as_json: bool, timings: bool = False) -> Iterator[Printer]:
    """Yield a printer. With JSON, all other output of the block goes to standard error."""
    with redirect_stdout(sys.stderr) if as_json else nullcontext(), listening() as progress:
        printer = Printer(as_json, progress)
        yield printer
        if timings:
            printer.show(_timings(progress))
    if as_json and printer.result is not None:
        print(json.dumps(plain(printer.result), allow_nan=False), flush=True)


@contextmanager
def refusing(as_json: bool) -> Iterator[None]:
    """With JSON, print the error that ends the block as an object, too."""
    try:
        yield
    except PlanError as error:
        if as_json:
            print(json.dumps({"error": str(error), "kind": type(error).__name__}), flush=True)
        raise


def _timings(progress: Progress) -> Table:
    """Return the table of --timings."""
    whole = progress.elapsed
    rows = [(name, f"{some:.2f}", f"{some / whole:.0%}") for name, some in (*progress.seconds.items(), ("all", whole))]
    return table(("phase", "seconds", ""), rows, right=("seconds", ""))


@dataclass
class Printer:
    """A printer for people, which also keeps the one JSON object for the end."""

    as_json: bool
    progress: Progress = field(default_factory=Progress)
    result: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    # What went wrong, although there is a result.
    failure: str = ""

    def show(self, *things: RenderableType) -> None:
        """Print tables or plain text; markup in text is not read."""
        from rich.console import Console

        console = Console(stderr=self.as_json, markup=False, highlight=False, soft_wrap=True)
        if not console.is_terminal:
            # Rows of tables stay on one line for other programs.
            console.width = max(console.width, _WIDE)
        for thing in things:
            console.print(thing)


def plain(value: Any) -> Any:
    """Return the value as JSON has it: numbers that are not finite become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def table(names: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = (), title: str = "") -> Table:
    """Return a table for people, whose columns `right` have numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Column, Table

    columns = (Column(name, justify="right" if name in right else "left", overflow="fold") for name in names)
    made = Table(*columns, title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in rows:
        made.add_row(*row)
    return made
