"""The log of a run, on rank 0: a line on standard error, a JSON object a step, and scalars for TensorBoard."""

import errno
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from superscaler.specs.file_errors import unwritable, writing
from superscaler.train import resume
from superscaler.train.options import RankOptions

# In the folder of a run.
METRICS_FILE = "metrics.jsonl"
# Seconds between two progress lines where they do not overwrite each other.
_INTERVAL = 1.0
# Fewer TFLOPS are not shown: those of a small model on a CPU say nothing.
_TFLOPS = 0.1
# Where they do: to the start of the line, which is cleared.
_CLEAR = "\r\x1b[2K"


class Log(Protocol):
    """A receiver of one entry of numbers a step."""

    def add(self, entry: dict[str, Any]) -> None: ...
    def close(self) -> None: ...


class Metrics:
    """A file with one JSON object per line. A line that a full disk cannot take is left out with a warning.

    A run that goes on from step `start` first moves the lines of later steps, which it trains again, out of the file.
    """

    def __init__(self, path: Path, start: int) -> None:
        self._path, self._left_out = path, 0
        if start and path.is_file():
            try:
                _move_lines(path.resolve(), start)
            except OSError as error:
                resume.warn(f"{unwritable(f'--metrics {path}', error)}; it has steps from {start} on twice.")
        with writing(f"--metrics {path}", "name a file in a folder that you may write to"):
            self._file = path.open("ab" if start else "wb", buffering=0)

    def add(self, entry: dict[str, Any]) -> None:
        line, written = json.dumps(entry).encode() + b"\n", 0
        try:
            written = self._file.write(line)
            if written < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            # No partial line stays, if the path is a regular file.
            with suppress(OSError):
                os.truncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
            self._left_out += 1
            if self._left_out == 1:
                resume.warn(f"{unwritable(f'--metrics {self._path}', error)}; training goes on.")

    def close(self) -> None:
        self._file.close()
        if self._left_out:
            resume.warn(f"--metrics {self._path} is incomplete: it has no line of {self._left_out} steps.")


def _move_lines(path: Path, start: int) -> None:
    """Move the lines of steps from `start` on into a file beside this one, which is replaced once the other is whole.
    Lines that are cut off, as a killed run leaves them, go there, too.
    """
    kept, beyond = list[bytes](), list[bytes]()
    for line in path.read_bytes().splitlines(keepends=True):
        step = _step_of(line) if line.endswith(b"\n") else start
        (beyond if step >= start else kept).append(line)
    if not beyond:
        return
    aside, new = path.with_name(f"{path.name}.replaced"), path.with_name(f"{path.name}.new")
    for file, mode, lines in ((aside, "ab", [line.rstrip(b"\n") + b"\n" for line in beyond]), (new, "wb", kept)):
        with file.open(mode) as opened:
            opened.writelines(lines)
            opened.flush()
            os.fsync(opened.fileno())
    shutil.copymode(path, new)
    new.replace(path)
    resume.say(f"note: {len(beyond)} lines of {path} are of steps that are trained again; they are in {aside.name} now")


def _step_of(line: bytes) -> int:
    """Return the step of a line, -1 for a line of another form."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return -1
    return step if isinstance(step, int) else -1


class TensorBoard:
    """The numbers of each step as scalars, for TensorBoard."""

    def __init__(self, folder: Path, start: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # type: ignore[attr-defined]

        # It hides earlier numbers of these steps.
        self._writer = SummaryWriter(str(folder), purge_step=start or None)  # type: ignore[no-untyped-call]

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add the numbers of an entry; those of an evaluation keep their own names."""
        numbers = {**entry, **{f"evaluation/{name}": x for name, x in entry.get("evaluation", {}).items()}}
        for name, value in numbers.items():
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, entry["step"])  # type: ignore[no-untyped-call]

    def close(self) -> None:
        self._writer.close()  # type: ignore[no-untyped-call]


class WeightsAndBiases:
    """The entries of each step for Weights & Biases."""

    def __init__(self, folder: Path) -> None:
        import wandb

        self._run = wandb.init(dir=str(folder))

    def add(self, entry: Mapping[str, Any]) -> None:
        """Log an entry."""
        self._run.log({name: value for name, value in entry.items() if name != "step"}, step=entry["step"])

    def close(self) -> None:
        self._run.finish()


def logs_of(options: RankOptions, start: int, saved: Path | None) -> list[Log]:
    """Return the logs of a run: the file of --metrics, and a folder for TensorBoard and Weights & Biases.

    The folder is that of --run, else that of checkpoints. TensorBoard needs to be installed, Weights & Biases also
    needs WANDB_PROJECT.
    """
    files = [options.metrics] if options.metrics else []
    if options.run is None:
        return [Metrics(file, start) for file in (*files, *([saved / METRICS_FILE] if saved else []))]
    with writing(f"--run {options.run}", "name a folder that you may write to"):
        options.run.mkdir(parents=True, exist_ok=True)
    found: list[Log] = [Metrics(file, start) for file in (*files, options.run / METRICS_FILE)]
    found += [TensorBoard(options.run, start)] if find_spec("tensorboard") else []
    return found + ([WeightsAndBiases(options.run)] if os.environ.get("WANDB_PROJECT") and find_spec("wandb") else [])


class Reporter:
    """A writer of a progress line on standard error and of the logs."""

    def __init__(self, steps: int, logs: Sequence[Log] = ()) -> None:
        self._steps, self._logs = steps, logs
        self._shown = -math.inf
        self._is_finite = True

    def close(self) -> None:
        for log in self._logs:
            log.close()

    def _log(self, entry: dict[str, Any]) -> None:
        for log in self._logs:
            log.add(entry)

    def add(self, number: int, loss: float, found: Mapping[str, Any], lr: float | tuple[float, ...]) -> None:
        """Report a step: its loss, what `Step.metrics` has found, and the learning rates."""
        unit = "tokens" if "tokens" in found else "samples"
        memory, norm, tflops, mfu = (found[k] for k in ("peak_memory_bytes", "gradient_norm", "tflops", "mfu"))
        entry = {
            "step": number, "loss": loss, "seconds": found["seconds"], "tokens": found[unit], "unit": unit,
            "memory_bytes": memory, "gradient_norm": norm, "lr": lr,
        }  # fmt: skip
        known = {name: x for name, x in (("tflops", tflops), ("mfu", mfu)) if x is not None}
        self._log(entry | known)
        rates = (lr,) if isinstance(lr, float) else lr
        words = [
            f"step {number + 1}/{self._steps}", f"loss {loss:.4f}", "lr " + " ".join(f"{rate:.2e}" for rate in rates),
            f"{found[f'{unit}_per_second']:,.0f} {unit}/s", f"{tflops:.3g} TFLOPS" if (tflops or 0) >= _TFLOPS else "",
            f"MFU {mfu:.0%}" if mfu is not None else "", f"memory {memory / 1e9:.2f} GB",
            f"norm {norm:.3f}" if norm is not None else "",
        ]  # fmt: skip
        if self._is_finite and not math.isfinite(loss):
            self._is_finite = False
            resume.warn(f"the loss of step {number + 1} is {loss}; --check-finite names the operator that made it so.")
        self._show("  ".join(filter(None, words)), is_last=number + 1 == self._steps)

    def evaluated(self, done: int, found: dict[str, float]) -> None:
        """Report an evaluation after so many steps."""
        self._log({"step": done - 1, "evaluation": found})
        text = "  ".join(f"{name} {value:.4f}" for name, value in found.items())
        resume.say(f"{_CLEAR * sys.stderr.isatty()}step {done}/{self._steps}  evaluation: {text}")

    def _show(self, text: str, *, is_last: bool) -> None:
        if sys.stderr.isatty():
            resume.say(f"{_CLEAR}{text}", end="\n" if is_last else "")
        elif is_last or time.monotonic() - self._shown >= _INTERVAL:
            self._shown = time.monotonic()
            resume.say(text)
