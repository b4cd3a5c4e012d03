"""Checks of the arguments of public functions against their annotations, so that a wrong type is one message."""

import inspect
import sys
import typing
from collections.abc import Callable
from functools import cache, wraps
from numbers import Integral
from types import UnionType
from typing import Any, ParamSpec, TypeVar

from superscaler.errors import InputError, brief

P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a function, and the items of those that are lists or tuples. Raises InputError with the
    caller's line.
    """
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = _kinds(function)
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            kind = kinds.get(name, Any)
            if type(value) is not kind and not fits(value, kind):
                frame = sys._getframe(1)
                raise InputError(
                    f"{function.__name__} at {frame.f_code.co_filename}:{frame.f_lineno}: {name} is "
                    f"{brief(repr(value))} of type {type(value).__name__}; give {function.__annotations__[name]}."
                )
        return function(*args, **kwargs)

    return run


@cache
def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the arguments. They are resolved at the first call, when all modules are loaded."""
    return typing.get_type_hints(function)


def fits(value: Any, kind: Any, has_items: bool = True) -> bool:
    """Return whether a value is of a type, and each item of a list or a tuple. A bool is no int, a text no sequence.

    >>> fits(2, int), fits(True, int), fits("2", int), fits([2], list[int]), fits(["2"], list[int]), fits([], int | str)
    (True, False, False, True, False, False)
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return True
    if origin in (typing.Union, UnionType):
        return any(fits(value, each, has_items) for each in inner)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if not isinstance(value, origin or kind) or (origin and isinstance(value, str)):
        return False
    many = has_items and isinstance(value, list | tuple) and inner
    return not many or all(fits(item, inner[0], False) for item in value)
