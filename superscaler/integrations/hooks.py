"""The functions of a user that a loop calls between steps, and what they, or a capture, may not read."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from superscaler.errors import InputError

_LOG = logging.getLogger(__name__)


class Changing:
    """An object of a loop during a capture. Raises InputError where attributes are read that change between steps.

    `path`: the object in the user's code. `hook`: a method in which the user can change a batch.
    """

    def __init__(self, whole: object, path: str, names: Sequence[str], hook: str) -> None:
        self._whole, self._path, self._names, self._hook = whole, path, names, hook

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            return getattr(self._whole, name)
        raise _changes(f"{self._path}.{name}", self._hook)


class Unread:
    """A number of a loop during a capture. Raises InputError where it is read, since it changes between steps."""

    def __init__(self, name: str, hook: str) -> None:
        self._name, self._hook = name, hook

    def _read(self, *_: Any) -> NoReturn:
        raise _changes(self._name, self._hook)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __index__ = __float__ = _read
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _read
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _read
    __neg__ = __abs__ = __and__ = __rand__ = __or__ = __ror__ = __xor__ = __hash__ = _read
    __str__ = __repr__ = __format__ = _read


def _changes(name: str, hook: str) -> InputError:
    """Return the error for what changes, with the line of the user that reads it."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] in ("superscaler", "lightning", "transformers"):
        frame = frame.f_back
    return InputError(
        f"{name}, read at {frame.f_code.co_filename}:{frame.f_lineno}, changes from step to step, but "
        f"a plan reads it once. Add a tensor of it to the batch, in {hook}, and read that."
    )


def users(objects: Iterable[object], events: Sequence[str], library: str) -> list[str]:
    """Return the events of objects, as `Class.event`, that are no functions of the library itself."""
    found = ((one, event, getattr(one, event, None)) for one in objects for event in events)
    own = re.compile(rf"({library}|superscaler)\b")
    return [
        f"{type(one).__name__}.{event}"
        for one, event, function in found
        if function is not None and not own.match(getattr(function, "__module__", ""))
    ]


def warn_of_stale(found: Sequence[str], put: str) -> None:
    """Log once which of the user's functions get older weights, and the call that puts the present ones."""
    if found and os.environ.get("RANK", "0") == "0":
        _LOG.warning(
            "%s: the module has older weights there, since a plan trains its own, of the last evaluation, checkpoint, "
            "or end of an epoch with a callback, and no gradients. To read the present ones, call %s on all ranks; "
            "changes are lost.",
            ", ".join(found),
            put,
        )


def tell_of_gradients(found: Sequence[str]) -> None:
    """Log once which of the user's functions get whole gradients, and that this takes time."""
    if found and os.environ.get("RANK", "0") == "0":
        _LOG.warning(
            "%s: each rank gets whole gradients, weights and optimizer states over the network in each step for it, "
            "which takes time and memory. Without it the plan clips by the norm and updates its own parts.",
            ", ".join(found),
        )
