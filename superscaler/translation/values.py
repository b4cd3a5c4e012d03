"""The values of emitted code on symbols: tensors, sums and handles, known by their identity."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from superscaler.ir.program import Value

# How often, and after how many seconds, it is looked again whether the code holds a value.
_LOOKS, _SECONDS = 40, 0.005


class Differs(Exception):
    """Emitted code does something else than its program."""


def stays(is_held: Callable[[], object]) -> bool:
    """Return whether something is held for long: a thread that looks at the frames of this one, as the watchdog of a
    rank does, holds their variables for a moment.
    """
    for _ in range(_LOOKS if threading.active_count() > 1 else 0):
        if not is_held():
            return False
        time.sleep(_SECONDS)
    return bool(is_held())


class Held:
    """A tensor, a sum, or the handle of something started. Its step learns when Python frees it."""

    __slots__ = ("freed", "names", "step")

    def __init__(self, step: Any, names: int = 0) -> None:
        # `names`: how many names of the program it has. `freed`: the last of them, once the program has freed it.
        self.step, self.names = step, names
        self.freed: Value | None = None

    def __del__(self) -> None:
        if self.freed is not None:
            self.step.late.pop(id(self), None)

    def reshape(self, shape: Sequence[int]) -> View:
        return View(self, shape)

    def wait(self) -> Arriving:
        return Arriving(self)

    def maximum(self, other: object) -> Any:
        return self.step.add([self, other], largest=True)

    def __add__(self, other: object) -> Any:
        return self.step.add([self, other], largest=False)

    def __iadd__(self, other: object) -> Any:
        return self.step.add_in_place(self, other)


class View:
    """A tensor in another shape, as a collective reads it."""

    __slots__ = ("of", "shape")

    def __init__(self, of: Held, shape: Sequence[int]) -> None:
        self.of, self.shape = of, shape


class Arriving:
    """The result of something started, before it has its shape."""

    __slots__ = ("work",)

    def __init__(self, work: Held) -> None:
        self.work = work

    def reshape(self, shape: Sequence[int]) -> Any:
        return self.work.step.arrive(self.work, shape)


class Total:
    """A sum, or the largest, of the first of several pieces."""

    __slots__ = ("largest", "pieces", "step")

    def __init__(self, step: Any, pieces: list[object], largest: bool) -> None:
        self.step, self.pieces, self.largest = step, pieces, largest

    def maximum(self, other: object) -> Any:
        return self.step.add([*self.pieces, other], largest=True, before=self)

    def __add__(self, other: object) -> Any:
        return self.step.add([*self.pieces, other], largest=False, before=self)
