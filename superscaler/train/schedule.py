"""Learning rates by the step: torch's own schedules, by name, after a linear warm-up."""

import inspect
import warnings
from collections.abc import Callable
from math import inf

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from superscaler.errors import InputError, brief, unknown
from superscaler.specs.options import for_function

SCHEDULES: dict[str, Callable[..., LRScheduler]] = {
    "constant": lr_scheduler.ConstantLR,
    "cosine": lr_scheduler.CosineAnnealingLR,
    "cosine_restarts": lr_scheduler.CosineAnnealingWarmRestarts,
    "exponential": lr_scheduler.ExponentialLR,
    "linear": lr_scheduler.LinearLR,
    "polynomial": lr_scheduler.PolynomialLR,
    "step": lr_scheduler.StepLR,
}
# Arguments that are the number of steps, where they are not given.
_LENGTHS = ("T_max", "total_iters")
# The least numbers with which torch's schedules end: with others a step of training fails.
_LEAST = {"step_size": 1, "T_max": 1, "power": 0}


def schedule_of(optimizer: Optimizer, spec: str | None, warmup: int, steps: int) -> LRScheduler | None:
    """Return the schedule `NAME[:key=value,...]`, with the arguments of torch's class, after a warm-up of some steps.

    The default length is that of training. Raises InputError for an unknown name or key, and a bad value.
    """
    if not 0 <= warmup < steps:
        raise InputError(f"--warmup is {warmup}, but it must be 0 or more, and less than the {steps} steps.")
    main = None if spec is None else _named(optimizer, spec, steps - warmup)
    if not warmup:
        return main
    first = lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), total_iters=warmup)
    return first if main is None else lr_scheduler.SequentialLR(optimizer, [first, main], [warmup])


def _named(optimizer: Optimizer, spec: str, length: int) -> LRScheduler:
    name, _, keys = spec.partition(":")
    if name not in SCHEDULES:
        raise InputError(unknown("schedule", name, SCHEDULES))
    kind = SCHEDULES[name]
    known = inspect.signature(kind).parameters
    defaults = "".join(f",{key}={length}" for key in _LENGTHS if key in known and f"{key}=" not in keys)
    options = for_function(spec, keys + defaults, kind, skip=1)
    for key, value in options.items():
        least = _LEAST.get(key, -inf)
        if isinstance(value, float | int) and not least <= value < inf:
            what = "a finite number" if least == -inf else f"{least} or more"
            raise InputError(f"--schedule {spec}: {key} is {value}, but it must be {what}.")
    try:
        return kind(optimizer, **options)
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"--schedule {spec}: {brief(error.args[0]).rstrip('.')}.") from None


def advance(schedule: LRScheduler | None, steps: int) -> None:
    """Advance the schedule by some steps."""
    with warnings.catch_warnings():
        # SequentialLR gives its schedules a number of a step, which torch deprecates.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(steps if schedule is not None else 0):
            schedule.step()  # type: ignore[union-attr]


def check_schedule(spec: str | None, warmup: int, steps: int) -> None:
    """Raise InputError for a schedule that ranks would refuse."""
    schedule_of(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), spec, warmup, steps)
