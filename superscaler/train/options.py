"""The options of a plan's `run.py`. This module imports no torch, which takes seconds."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from superscaler.errors import InputError, unknown

# The choices for training after a failed save.
CONTINUE, STOP = ON_FAILED_SAVE = ("continue", "stop")


def path(text: str) -> Path:
    # An empty path is the current folder to Python, and an unset variable to a shell.
    if not text:
        raise argparse.ArgumentTypeError("it is empty; '.' is the current folder")
    return Path(text)


def _add_saving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", type=path, help="folder of checkpoints; one is saved at the end")
    parser.add_argument("--save-every", type=int, help="steps between two checkpoints")
    parser.add_argument("--keep", type=int, help="whole checkpoints that stay; default: all")
    parser.add_argument("--on-failed-save", choices=ON_FAILED_SAVE, default=CONTINUE, help="default: %(default)s")
    parser.add_argument("--resume", type=path, help="checkpoint, or folder of them, to go on from")
    parser.add_argument("--weights", type=path, help="checkpoint, safetensors file or folder to start with")
    parser.add_argument("--named", help=argparse.SUPPRESS)


def parser(kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser of the options of a plan's `run.py`."""
    made = kind(description="Train this plan; start it with torchrun.")
    made.add_argument("directory", nargs="?", type=path, help="the plan; default: the folder of this program")
    made.add_argument("--steps", type=int, default=20)
    made.add_argument("--clip", type=float, help="largest global norm of the gradients")
    made.add_argument("--ema", type=float, help="decay of averages of the weights, by which --eval evaluates")
    made.add_argument("--schedule", help="NAME[:key=value,...] of torch.optim.lr_scheduler, as cosine")
    made.add_argument("--warmup", type=int, default=0, help="steps in which the learning rate grows to its own")
    made.add_argument("--check-finite", action="store_true", help="stop at a loss or gradient that is not finite")
    made.add_argument("--data", type=path, help="a text, read as bytes, or FILE.py:function; default: Python's own")
    made.add_argument("--eval", type=path, help="FILE.py:function that gives batches to evaluate, or with metrics")
    made.add_argument("--eval-every", type=int, help="steps between two evaluations; default: one at the end")
    made.add_argument("--torch-compile", action="store_true", help="run each segment as Inductor compiles it")
    made.add_argument("--seed", type=int, default=0, help="seed of the batches")
    made.add_argument("--metrics", type=path, help="file of a JSON object a step; a run that goes on adds to it")
    made.add_argument("--profile", type=int, help="steps to record with torch's profiler, after a first one; see --run")
    made.add_argument("--run", type=path, help="folder for metrics.jsonl, scalars, and what --profile records")
    made.add_argument("--flops", type=float, help=argparse.SUPPRESS)
    made.add_argument("--peak-flops", type=float, help=argparse.SUPPRESS)
    _add_saving(made)
    made.add_argument("--launched", type=path, help=argparse.SUPPRESS)
    return made


def check_options(steps: int, clip: float | None, ema: float | None) -> None:
    """Raise InputError for an impossible number of steps, norm or decay."""
    if ema is not None and not 0 <= ema < 1:
        raise InputError(f"--ema is {ema}, but a decay is a number from 0 to below 1, as 0.999.")
    if steps < 1:
        raise InputError(f"{steps} steps cannot be trained; give 1 or more.")
    if clip is not None and not clip > 0:
        raise InputError(f"--clip is {clip}, but a norm to clip to is a number above 0.")


def check_profile(options: Any, start: int = 0) -> None:
    """Raise InputError for a profile without a folder, or of more steps than follow the first one, `start`."""
    steps = options.steps - start
    if options.profile is not None and options.run is None:
        raise InputError("--profile N records N steps into the folder of --run DIR; give that, too.")
    if options.profile is not None and not 1 <= options.profile < steps:
        raise InputError(
            f"--profile {options.profile} of {steps} steps: the first step warms up, so at least 1 and at most "
            f"{steps - 1} can be recorded."
        )
    if options.profile is not None and options.check_finite:
        raise InputError("--profile records the plan's own code, which --check-finite replaces; leave one of them out.")


class _Refusing(argparse.ArgumentParser):
    """A parser that raises what it would print."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}.")


def check_words(words: Sequence[str]) -> None:
    """Raise InputError for words that the `run.py` of a plan, which is started later, would not take."""
    made = parser(_Refusing)
    try:
        options, more = made.parse_known_args(["plan", *words])
    except InputError as error:
        raise InputError(f"options of run.py, after --: {error}") from None
    known = [name for action in made._actions if action.help != argparse.SUPPRESS for name in action.option_strings]
    if more:
        raise InputError(
            f"options of run.py, after --: {unknown('option', more[0], [n for n in known if n[:2] == '--'])}"
        )
    check_options(options.steps, options.clip, options.ema)
    check_profile(options)
