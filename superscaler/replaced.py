"""Attributes of objects, and levels of loggers, replaced within a block."""

import logging
from collections.abc import Iterator
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
def quiet(level: int, *names: str) -> Iterator[None]:
    """Hold back messages of these loggers below a level in the block."""
    before = {logger: logger.level for logger in map(logging.getLogger, names)}
    try:
        for logger in before:
            logger.setLevel(level)
        yield
    finally:
        for logger, old in before.items():
            logger.setLevel(old)
