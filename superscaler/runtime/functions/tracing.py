"""Whether a segment is traced to be compiled, or recorded: functions are then the plain ones, which a compiler fuses,
or those whose shapes do not depend on data.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_TRACED = ContextVar("superscaler_is_traced", default=False)
_IS_RECORDED = ContextVar("superscaler_is_recorded", default=False)


def is_traced() -> bool:
    """Return whether the running code is traced."""
    return _IS_TRACED.get()


def is_static() -> bool:
    """Return whether the shapes of the running code may not depend on data."""
    return _IS_TRACED.get() or _IS_RECORDED.get()


@contextmanager
def recorded() -> Iterator[None]:
    """Run the block as recorded code."""
    before = _IS_RECORDED.set(True)
    try:
        yield
    finally:
        _IS_RECORDED.reset(before)


@contextmanager
def traced() -> Iterator[None]:
    """Run the block as traced code."""
    before = _IS_TRACED.set(True)
    try:
        yield
    finally:
        _IS_TRACED.reset(before)
