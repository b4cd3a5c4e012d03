"""Attributes of objects, levels of loggers and random numbers, replaced within a block."""

import logging
import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def replaced(*values: tuple[Any, str, Any]) -> Iterator[None]:
    """Set attributes (owner, name, value) in the block. Afterwards they have their old values; an attribute that only a
    class of the owner had is deleted.
    """
    before = [(owner, name, vars(owner).get(name, _MISSING)) for owner, name, _ in values]
    try:
        for owner, name, value in values:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            delattr(owner, name) if value is _MISSING else setattr(owner, name, value)


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Set a variable of the environment in the block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


@contextmanager
def quiet(level: int, *names: str) -> Iterator[None]:
    """Hold back messages of these loggers below a level in the block."""
    # To set a level takes the time of all loggers there are.
    before = {logger: logger.level for logger in map(logging.getLogger, names) if logger.level != level}
    try:
        for logger in before:
            logger.setLevel(level)
        yield
    finally:
        for logger, old in before.items():
            logger.setLevel(old)


@contextmanager
def own_numbers(devices: Iterable[int] = ()) -> Iterator[None]:
    """Restore the random generators of Python, numpy and torch after the block, on the CPU and on these GPUs."""
    import numpy as np
    import torch

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
