"""Checks of the arguments of public functions against their annotations, so that a wrong type is one message."""

import inspect
import re
import sys
import typing
from collections.abc import Callable
from functools import cache, wraps
from numbers import Integral, Real
from types import FrameType, UnionType
from typing import Any, ParamSpec, TypeVar

from superscaler.errors import InputError, brief, named

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
# Kinds that anything is of.
_OPEN = TypeVar, ParamSpec


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a function, and the items of those that are lists or tuples. Raises InputError with the
    caller's line.
    """
    return _checked(function, function.__name__)


def checked_class(kind: type[T]) -> type[T]:
    """Check the arguments of a class, as `checked` does those of a function."""
    kind.__init__ = _checked(kind.__init__, kind.__name__)  # type: ignore[method-assign]
    return kind


def _checked(function: Callable[P, R], called: str) -> Callable[P, R]:
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds = _kinds(function)
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            kind = kinds.get(name, Any)
            if type(value) is not kind and not fits(value, kind):
                frame = sys._getframe(1)
                form = function.__annotations__[name]
                # Without the modules of types.
                form = re.sub(r"\b(\w+\.)+", "", form if isinstance(form, str) else inspect.formatannotation(form))
                raise InputError(
                    f"{called} at {frame.f_code.co_filename}:{frame.f_lineno}: {name} is {brief(repr(value))} of type "
                    f"{type(value).__name__}; give {form}."
                )
        return function(*args, **kwargs)

    return run


@cache
def _kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the types of the arguments. They are resolved at the first call, when all modules are loaded."""
    return typing.get_type_hints(function)


def fits(value: Any, kind: Any, has_items: bool = True) -> bool:
    """Return whether a value is of a type, and each item of a list or a tuple. A bool is no int, a text no sequence,
    and an int is a float. Of texts to choose from, each fits: the one who takes it names the others.

    >>> fits(2, int), fits(True, int), fits("2", int), fits([2], list[int]), fits(["2"], list[int]), fits([], int | str)
    (True, False, False, True, False, False)
    """
    if kind is Any or isinstance(kind, _OPEN):
        return True
    origin, inner = _parts(kind)
    if origin in (typing.Union, UnionType):
        return any(fits(value, each, has_items) for each in inner)
    if origin is typing.Literal:
        return any(isinstance(value, type(each)) for each in inner)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if not isinstance(value, origin or kind) or (origin and isinstance(value, str | bytes)):
        return False
    many = has_items and isinstance(value, list | tuple) and inner
    # An item of each type says it for all.
    return not many or all(fits(item, inner[0], False) for item in {type(item): item for item in value}.values())


@cache
def _parts(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return the type that an annotation is of, None for a plain one, and its arguments."""
    return typing.get_origin(kind), typing.get_args(kind)


class Numbered(tuple[T, ...]):
    """A tuple of things that a plan takes by number. Raises InputError, with the line of the plan, for others.

    `NOUN`: what they are, in errors.
    """

    __slots__ = ()
    NOUN = "item"

    def __getitem__(self, key: Any) -> Any:
        try:
            return super().__getitem__(key)
        except (IndexError, TypeError):
            raise missing(self.NOUN, key, len(self), sys._getframe(1)) from None


def missing(noun: str, key: object, count: int, frame: FrameType) -> InputError:
    """Return the error of a number that none of `count` things has, in a line of the plan."""
    choice = f"choose a number from 0 to {count - 1}" if count > 1 else "there is 0 only" if count else "there are none"
    return InputError(f"{frame.f_code.co_filename}:{frame.f_lineno}: there is no {noun} {named(key)}; {choice}.")
