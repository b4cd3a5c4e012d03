"""The options of a run: of `superscaler train`, of a plan's `run.py`, and of its ranks. No torch is imported here."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, NoReturn, get_args

from superscaler.errors import InputError, unknown

# The choices for training after a failed save.
CONTINUE, STOP = ON_FAILED_SAVE = ("continue", "stop")
# The options of a run that `superscaler train` starts, in the launcher's folder.
RUN_FILE = "run.json"

# Groups in the help of `superscaler train`.
_DATA, _SAVING, _RATE = "Data and evaluation", "Checkpoints", "Learning rate and gradients"


@dataclass(frozen=True)
class Option:
    """How an option is written: its help, the word for its value, its range, its choices, and its group in the help."""

    help: str
    metavar: str | None = None
    least: int | None = None
    most: int | None = None
    choices: Sequence[str] = ()
    panel: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """A run. Each field is an option of `superscaler train` and of `run.py`, by its name with dashes."""

    steps: Annotated[int, Option("Steps to train.", least=1, most=2**31)] = 20
    clip: Annotated[float | None, Option("Largest global norm of the gradients.", panel=_RATE)] = None
    ema: Annotated[
        float | None, Option("Decay of averages of the weights, as 0.999; --eval evaluates them.", panel=_RATE)
    ] = None
    schedule: Annotated[
        str | None,
        Option(
            "Of the learning rate, by torch.optim.lr_scheduler: constant, cosine, cosine_restarts, exponential, "
            "linear, polynomial, step.",
            "NAME[:key=value,...]",
            panel=_RATE,
        ),
    ] = None
    warmup: Annotated[int, Option("Steps in which the learning rate grows.", least=0, panel=_RATE)] = 0
    check_finite: Annotated[
        bool, Option("Stop where a loss or gradient is not finite; name the operator.", panel=_RATE)
    ] = False
    torch_compile: Annotated[bool, Option("Run each segment as torch's Inductor compiles it.")] = False
    cuda_graph: Annotated[bool, Option("Capture the third step as a CUDA graph, and replay it.")] = False
    data: Annotated[
        Path | None,
        Option(
            "A text, read as bytes, or a function that gives a data set, a DataLoader or batches; default: Python's "
            "own text.",
            "FILE | FILE.py:FUNCTION[:key=value,...]",
            panel=_DATA,
        ),
    ] = None
    eval: Annotated[
        Path | None,
        Option(
            "A function that gives batches, or (batches, metrics by name), for the model in eval mode.",
            "FILE.py:FUNCTION[:key=value,...]",
            panel=_DATA,
        ),
    ] = None
    eval_every: Annotated[
        int | None, Option("Steps between two evaluations; default: one at the end.", least=1, panel=_DATA)
    ] = None
    seed: Annotated[
        int,
        Option("Seed of batches; of a compilation also of dropout, and of weights captured on meta.",
               least=0, most=2**64 - 1),
    ] = 0  # fmt: skip
    save: Annotated[
        Path | None,
        Option("Save checkpoints into this folder, one of them at the end or at SIGTERM.", "DIR", panel=_SAVING),
    ] = None
    save_every: Annotated[
        int | None, Option("Steps between two checkpoints; default: one at the end.", least=1, panel=_SAVING)
    ] = None
    keep: Annotated[
        int | None, Option("How many checkpoints stay, the last ones; default: all.", least=1, panel=_SAVING)
    ] = None
    on_failed_save: Annotated[
        str, Option("Whether training goes on without it.", choices=ON_FAILED_SAVE, panel=_SAVING)
    ] = CONTINUE
    resume: Annotated[
        Path | None,
        Option("Go on from a checkpoint, or the last in a folder; --steps counts its steps too.", "DIR", panel=_SAVING),
    ] = None
    weights: Annotated[
        Path | None,
        Option("Start with these: a safetensors file, a folder of them, a checkpoint.", "PATH", panel=_SAVING),
    ] = None
    profile: Annotated[int | None, Option("Record so many steps, after a first one, into --run.", least=1)] = None
    run: Annotated[
        Path | None,
        Option("Folder for options.yaml, metrics.jsonl, scalars, and what --profile records.", "DIR"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RankOptions(RunOptions):
    """A run as its ranks know it. What is no option comes from the launcher.

    named            the model, for the checkpoints
    flops            the model's operations of a step on each device; `peak_flops`: of a device, a second
    peak_bytes       the predicted memory of the fullest device
    launched         the folder of the launcher, if it waits for the ranks
    """

    metrics: Annotated[Path | None, Option("File of a JSON object a step; a run that goes on adds to it.", "FILE")] = (
        None
    )
    named: str | None = None
    flops: float = 0.0
    peak_flops: float = 0.0
    peak_bytes: int = 0
    launched: Path | None = None

    def write(self, folder: Path) -> None:
        """Write the options into a folder, for `read`, with absolute paths."""
        plain = {name: str(x.resolve()) if isinstance(x, Path) else x for name, x in vars(self).items()}
        (folder / RUN_FILE).write_text(json.dumps(plain))

    @classmethod
    def read(cls, folder: Path) -> "RankOptions":
        """Return the options that `write` has put into a folder."""
        given: Mapping[str, Any] = json.loads((folder / RUN_FILE).read_text())
        kinds = {field.name: _type(field.type) for field in fields(cls)}
        read: dict[str, Any] = {name: x if x is None else kinds[name](x) for name, x in given.items()}
        return cls(**read)


def _type(annotation: Any) -> Any:
    """Return the type of an option's value, where it is given."""
    kind = get_args(annotation)[0] if hasattr(annotation, "__metadata__") else annotation
    return next((part for part in get_args(kind) if part is not NoneType), kind)


def options_of(kind: type) -> Iterator[tuple[str, Any, Option, Any]]:
    """Yield the options among the fields of a class: name, type of the value, `Option` and default."""
    for field in fields(kind):
        for option in getattr(field.type, "__metadata__", ()):
            if isinstance(option, Option):
                yield field.name, _type(field.type), option, field.default


def path(text: str) -> Path:
    # An empty path is the current folder to Python, and an unset variable to a shell.
    if not text:
        raise argparse.ArgumentTypeError("it is empty; '.' is the current folder")
    return Path(text)


def _parser(kind: type[argparse.ArgumentParser] = argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Return the parser of the options of a plan's `run.py`."""
    made = kind(description="Train this plan; start it with torchrun.", usage="%(prog)s [options] [directory]")
    made.add_argument("directory", nargs="?", type=path, help="The plan; default: the folder of this program.")
    for name, value, option, default in options_of(RankOptions):
        more: dict[str, Any] = {"action": "store_true"} if value is bool else {
            "type": path if value is Path else value, "default": default, "metavar": option.metavar,
            "choices": option.choices or None,
        }  # fmt: skip
        text = "" if default in (None, False) else f" Default: {default}."
        made.add_argument(f"--{name.replace('_', '-')}", help=option.help + text, **more)
    made.add_argument("--launched", type=path, help=argparse.SUPPRESS)
    return made


def parse(words: Sequence[str] | None = None) -> tuple[Path | None, RankOptions]:
    """Return the plan and the options in the words of a `run.py`, or those that its launcher has written."""
    directory, options = _parts(_parser().parse_args(words))
    return directory, options if options.launched is None else RankOptions.read(options.launched)


def _parts(given: argparse.Namespace) -> tuple[Path | None, RankOptions]:
    options = vars(given)
    return options.pop("directory"), RankOptions(**options)


def check_options(options: RunOptions) -> None:
    """Raise InputError for an impossible number of steps, norm or decay."""
    if options.ema is not None and not 0 <= options.ema < 1:
        raise InputError(f"--ema is {options.ema}, but a decay is a number from 0 to below 1, as 0.999.")
    if options.steps < 1:
        raise InputError(f"{options.steps} steps cannot be trained; give 1 or more.")
    if options.clip is not None and not options.clip > 0:
        raise InputError(f"--clip is {options.clip}, but a norm to clip to is a number above 0.")


def check_profile(options: RunOptions, start: int = 0) -> None:
    """Raise InputError for a profile without a folder, or of more steps than follow the first one, `start`."""
    steps = options.steps - start
    if options.profile is not None and options.run is None:
        raise InputError("--profile N records N steps into the folder of --run DIR; give that, too.")
    if options.profile is not None and not 1 <= options.profile < steps:
        raise InputError(
            f"--profile {options.profile} of {steps} steps: the first step warms up, so at least 1 and at most "
            f"{steps - 1} can be recorded."
        )
    for name, is_on in (("--check-finite", options.check_finite), ("--profile", options.profile is not None)):
        if options.cuda_graph and is_on:
            raise InputError(f"{name} looks at the calls of each step, and --cuda-graph replays a step without them; "
                             "leave one of them out.")  # fmt: skip
    if options.profile is not None and options.check_finite:
        raise InputError("--profile records the plan's own code, which --check-finite replaces; leave one of them out.")


class _Refusing(argparse.ArgumentParser):
    """A parser that raises what it would print."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}.")


def check_words(words: Sequence[str]) -> None:
    """Raise InputError for words that the `run.py` of a plan, which is started later, would not take."""
    made = _parser(_Refusing)
    try:
        given, more = made.parse_known_args(["plan", *words])
    except InputError as error:
        raise InputError(f"options of run.py, after --: {error}") from None
    if more:
        known = [f"--{name.replace('_', '-')}" for name, *_ in options_of(RankOptions)]
        raise InputError(f"options of run.py, after --: {unknown('option', more[0], [*known, '--help'])}")
    _, options = _parts(given)
    check_options(options)
    check_profile(options)
