"""Saving and resuming in the training loop: the options, the start of training, and its early end."""

import json
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from superscaler.errors import InputError, RuntimeFailure, some, unknown
from superscaler.runtime.step import Step
from superscaler.specs.file_errors import reading
from superscaler.specs.options import Options
from superscaler.specs.user_file import is_function
from superscaler.store.checkpoint import POINTER_FILE, checkpoints
from superscaler.store.restore import restore
from superscaler.store.save import Saver
from superscaler.store.tensors import is_there, open_checkpoint
from superscaler.train.options import ON_FAILED_SAVE, STOP, RankOptions, RunOptions

# Files in the folder of the launcher: a request to stop, the outcome of training, and when rank 0 began.
STOP_FILE, OUTCOME_FILE, TIMES_FILE = "stop", "outcome.json", "times.json"


def saving_folder(save: Path | None, resume: Path | None) -> Path | None:
    """Return the folder of checkpoints: by default a run that resumes saves beside its checkpoint."""
    beside = [] if resume is None else [resume, resume.resolve().parent]
    return save or next((folder for folder in beside if is_there(folder / POINTER_FILE)), None)


def check_count(name: str, value: int | None) -> None:
    """Raise InputError for a number below 1."""
    if value is not None and value < 1:
        raise InputError(f"{name} is {value}, but it must be 1 or more.")


def check_saving(options: RunOptions, folder: Path | None) -> None:
    """Raise InputError for options that do not go together, and for the checkpoints of another run."""
    for name, value in (("--save-every", options.save_every), ("--keep", options.keep)):
        check_count(name, value)
        if value is not None and folder is None:
            raise InputError(f"{name} {value} needs --save DIR, the folder of the checkpoints.")
    if options.on_failed_save not in ON_FAILED_SAVE:
        raise InputError(unknown("--on-failed-save", options.on_failed_save, ON_FAILED_SAVE))
    if options.on_failed_save == STOP and folder is None:
        raise InputError(f"--on-failed-save {STOP} needs --save DIR, the folder of the checkpoints.")
    if options.resume is not None and options.weights is not None:
        raise InputError(
            "--resume goes on with the weights of a checkpoint, so --weights has no use; give one of both."
        )
    if folder is None:
        return
    theirs = [] if options.resume is None else [options.resume.resolve(), options.resume.resolve().parent]
    if is_there(folder / POINTER_FILE) and folder.resolve() not in theirs:
        raise InputError(
            f"--save {folder} has the checkpoints of another run; go on from them with --resume {folder}, "
            "or choose another folder."
        )
    above = next((p for p in (folder, *folder.parents) if is_there(p)), Path())
    if not above.is_dir():
        raise InputError(f"--save {folder}: {above} is a file; choose a folder.")


def is_first(save: Path | None, resume: Path | None) -> bool:
    """Return whether a run resumes from its own, still empty, folder of checkpoints: then it starts anew."""
    return save is not None and resume == save and not is_there(save / POINTER_FILE)


def continued(step: Step, options: RankOptions, folder: Path) -> RankOptions:
    """Return the options of this start: ranks that torchrun restarted resume from their own checkpoints."""
    communicator, file, found = step.state.communicator, folder / POINTER_FILE, ""
    if step.rank == 0:
        latest = (file.read_text(errors="replace") if file.is_file() else "") or "nothing"
        if communicator.set_if_unset("latest", latest) != latest:
            found = "restart"
            say(f"note: a rank has failed; training goes on from {folder / latest.strip()}")
        elif is_first(options.save, options.resume):
            found = "first"
    # Ranks may see a new file on a shared disk at different times.
    found = communicator.first_text(found)
    if found == "restart":
        return replace(options, resume=folder, weights=None)
    return replace(options, resume=None) if found == "first" else options


def check_resume(resume: Path, steps: int, data: Path | None) -> dict[str, Any]:
    """Return a checkpoint's manifest. Raises InputError if nothing is left to train, or for other data."""
    with reading(resume, "name a folder of checkpoints"):
        is_empty = not resume.exists() or (resume.is_dir() and not any(resume.iterdir()))
    if is_empty:
        raise InputError(
            f"--resume {resume} has no checkpoint yet; to start anew there, and to go on when the same command is "
            f"given again, add --save {resume}."
        )
    stored = open_checkpoint(resume)
    manifest = dict(stored.head)
    if manifest["step"] >= steps:
        raise InputError(
            f"{stored.directory} was trained for {manifest['step']} steps, and --steps {steps} counts these; "
            f"give more than {manifest['step']}."
        )
    kept, given = manifest["training"], data_of(data)
    if kept is not None and kept["data"] != given:
        theirs, ours = ((d and f"{d['name']} ({d['bytes']:,} bytes)") or "the default" for d in (kept["data"], given))
        raise InputError(
            f"{stored.directory} was trained on {theirs}, but --data is {ours}; "
            "give the same text, or start anew on another one with --weights."
        )
    return manifest


def data_of(data: Path | None) -> dict[str, Any] | None:
    """Return the identity of training data: of a text file; or the name, keys and file of a function."""
    return None if data is None else {"name": data.name, "bytes": 0 if is_function(data) else data.stat().st_size}


def start_of(step: Step, options: RankOptions) -> tuple[int, int]:
    """Load the checkpoint or weights in the options. Returns the first step, and the seed of the batches."""
    if options.weights is not None:
        unread = step.load_weights(options.weights)
        if unread and step.rank == 0:
            say(f"note: {len(unread)} tensors of {options.weights} were not read: {some(unread, 3)}")
    if options.resume is None:
        return 0, options.seed
    check_resume(options.resume, options.steps, options.data)
    planned = step.groups.options()
    manifest = restore(step, options.resume)
    # A schedule follows from the plan's rate.
    left_out = ("lr",) if options.schedule is not None or options.warmup else ()
    if (changed := _changed(planned, step.groups.options(), left_out)) and step.rank == 0:
        say(f"note: the optimizer has options of the checkpoint, not of the plan: {'; '.join(changed)}")
    training = manifest["training"]
    return manifest["step"], options.seed if training is None else training["seed"]


def _changed(planned: Sequence[Options], now: Sequence[Options], left_out: Collection[str]) -> list[str]:
    """Return the options of parameter groups that differ from the plan's, as text, the same ones once."""
    found = [
        f"{key} {json.dumps(own[key])}, not {json.dumps(x)}"
        for given, own in zip(planned, now, strict=True)
        for key, x in given.items()
        if key not in left_out and own[key] != x
    ]
    return list(dict.fromkeys(found))


@contextmanager
def stop_requests(launched: Path | None) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether SIGTERM, or a file in the launcher's folder, asked this rank to stop."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        yield lambda: bool(came) or (launched is not None and (launched / STOP_FILE).exists())
    finally:
        signal.signal(signal.SIGTERM, before)


class Saves:
    """The checkpoints of a run: the periodic ones, one at the end, and one when training is `asked` to stop.

    `stopped`: the cause of an early end of training, "" while it goes on.
    """

    def __init__(self, step: Step, options: RankOptions, folder: Path, seed: int, asked: Callable[[], bool]) -> None:
        self._options, self._asked, self.stopped = options, asked, ""
        self._position = {"seed": seed, "data": data_of(options.data), "model": options.named}
        self._saver = Saver(step, folder, options.keep, warn)
        self._saver.open()
        self.finish = self._saver.finish

    def after(self, done: int, is_due: bool) -> None:
        """Save a checkpoint after so many steps if one is due, or training is asked to stop."""
        is_asked, has_failed = self._signs()
        if has_failed:
            self.finish()
        if is_asked or is_due:
            self._saver.save(self._position)
        if done == self._options.steps:
            # It is on disk before the last evaluation, in which the user's code may raise.
            self.finish()
        has_ended = self._saver.failures and self._options.on_failed_save == STOP
        self.stopped = "a failed save" if has_ended else "SIGTERM" if is_asked else ""

    def _signs(self) -> tuple[bool, bool]:
        """Return, equal on all ranks, whether any was asked to stop, and whether any part of a save has failed."""
        communicator = self._saver.step.state.communicator
        here = torch.tensor([float(self._asked()), float(self._saver.has_failed)], device=communicator.device)
        is_asked, has_failed = (communicator.sum_of_all(here) > 0).tolist()
        return is_asked, has_failed

    def report(self, start: int) -> None:
        """Report the end to the launcher; without one print it, or raise RuntimeFailure for a failed save."""
        saver, launched = self._saver, self._options.launched
        outcome = {
            "saved": None if saver.last is None else str(saver.last), "failed_saves": saver.failures,
            "stopped": self.stopped or None, "start": start, "steps": saver.step.state.steps,
        }  # fmt: skip
        if launched is not None:
            with suppress(OSError):
                (launched / OUTCOME_FILE).write_text(json.dumps(outcome))
                return
        say(ending(outcome))
        if saver.failures:
            raise RuntimeFailure(unsaved(saver.failures))


def warn(text: str) -> None:
    """Print a warning, in place of the progress line."""
    say(f"{chr(13)}{chr(27)}[2K" * sys.stderr.isatty() + f"warning: {text}")


def say(text: str, end: str = "\n") -> None:
    """Print to standard error. Training goes on if that cannot be written, as a file on a full disk."""
    with suppress(OSError):
        print(text, end=end, file=sys.stderr, flush=True)


def report_times(times: list[float], launched: Path | None) -> None:
    """Report to the launcher, after the first step, when rank 0 began, was loaded, and had made that step."""
    if len(times) == 2:
        times.append(time.time())
        if launched is not None:
            with suppress(OSError):
                (launched / TIMES_FILE).write_text(json.dumps(times))


def interrupted(save: Path | None, resume: Path | None) -> str:
    """Return, in words, what is left of a run that Ctrl-C ended, and how to resume it."""
    folder = saving_folder(save, resume)
    kept = checkpoints(folder) if folder else []
    if not kept:
        return "nothing was saved; --save DIR --save-every N saves while training"
    return f"Ctrl-C saves nothing; the last checkpoint is {kept[-1]}: go on with --resume {folder}"


def ending(outcome: dict[str, Any]) -> str:
    """Return, in words, where a run was saved, and how to resume it if it was stopped."""
    saved = Path(outcome["saved"]) if outcome["saved"] else None
    text = f"saved in {saved}" if saved else "nothing was saved"
    if outcome["stopped"]:
        hint = f"; go on with --resume {saved.parent}" if saved else ""
        text = f"stopped by {outcome['stopped']} after step {outcome['steps']}; {text}{hint}"
    return text


def unsaved(failures: Sequence[str]) -> str:
    """Return failed saves in words."""
    count = "1 checkpoint was" if len(failures) == 1 else f"{len(failures)} checkpoints were"
    return f"{count} not saved; the first: {failures[0]}"
