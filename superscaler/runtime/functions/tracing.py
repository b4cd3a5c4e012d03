"""Whether a segment is traced to be compiled. Its functions are then the plain ones, which a compiler fuses."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_TRACED = ContextVar("superscaler_is_traced", default=False)


def is_traced() -> bool:
    """Return whether the running code is traced."""
    return _IS_TRACED.get()


@contextmanager
def traced() -> Iterator[None]:
    """Run the block as traced code."""
    before = _IS_TRACED.set(True)
    try:
        yield
    finally:
        _IS_TRACED.reset(before)
