"""Whether a segment is traced to be compiled, or recorded: functions are then the plain ones, which a compiler fuses,
or those whose shapes do not depend on data.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")
_IS_TRACED = ContextVar("superscaler_is_traced", default=False)
_IS_RECORDED = ContextVar("superscaler_is_recorded", default=False)
_BALANCE = ContextVar("superscaler_balance", default=1.0)


def is_traced() -> bool:
    """Return whether the running code is traced."""
    return _IS_TRACED.get()


def is_static() -> bool:
    """Return whether the shapes of the running code may not depend on data."""
    return _IS_TRACED.get() or _IS_RECORDED.get()


def balance() -> float:
    """Return the tokens of the experts of a device by their mean, where no data say it."""
    return _BALANCE.get()


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Run the block with another value of a variable."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


def balanced(busiest: float) -> AbstractContextManager[None]:
    """Run the block on fake tensors of the device whose experts have `busiest` times the mean tokens."""
    return setting(_BALANCE, busiest)


def recorded() -> AbstractContextManager[None]:
    """Run the block as recorded code."""
    return setting(_IS_RECORDED, True)


def traced() -> AbstractContextManager[None]:
    """Run the block as traced code."""
    return setting(_IS_TRACED, True)
