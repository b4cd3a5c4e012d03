"""Constraints of a search in words: `tp <= 8, no recompute, schedule = zb_h1`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

from superscaler.errors import InputError, unknown
from superscaler.planner.space import LAYOUTS, LOSS, RECOMPUTE, SCHEDULES, SWAP, Choice

Allows = Callable[[Choice], bool]
NUMBERS = ("dp", "tp", "pp", "microbatches", "rows", "chunks", "zero")
WORDS = {
    "recompute": tuple(RECOMPUTE), "schedule": tuple(SCHEDULES), "layout": tuple(LAYOUTS), "loss": tuple(LOSS),
    "swap": tuple(SWAP),
}  # fmt: skip
# What `no NAME` means: the value that is left, or no such value.
_NONE = {"dp": 1, "tp": 1, "pp": 1, "chunks": 1, "zero": 0, "recompute": "none", "swap": "none"}
_VALUES = {value: name for name, values in WORDS.items() for value in values if value not in ("none", "whole")}
_SIGNS = {
    "<=": operator.le, ">=": operator.ge, "!=": operator.ne, "<": operator.lt, ">": operator.gt, "=": operator.eq,
}  # fmt: skip
# The largest batch that is searched.
_MOST_ROWS = 1_000_000
_CLAUSE = re.compile(r"(\w+)\s*(<=|>=|!=|==|<|>|=)\s*(\w+)")


def read(text: str) -> list[tuple[str, Allows]]:
    """Return the constraints of a text, each with its words. They are separated by commas.

    >>> [words for words, _ in read("tp <= 8, no recompute")]
    ['tp <= 8', 'no recompute']
    """
    return [(clause, _read(clause)) for part in text.split(",") if (clause := part.strip())]


def _read(clause: str) -> Allows:
    if clause.startswith("no "):
        name = clause[3:].strip()
        if name in _VALUES:
            return lambda c: bool(getattr(c, _VALUES[name]) != name)
        if name not in _NONE:
            raise InputError(f"--where: '{clause}': {unknown('decision', name, (*_NONE, *_VALUES))}")
        return lambda c: bool(getattr(c, name) == _NONE[name])
    found = _CLAUSE.fullmatch(clause)
    if found is None:
        raise InputError(f"--where: '{clause}' is no constraint; write tp <= 8, no recompute or schedule = 1f1b.")
    name, sign, value = found[1], found[2].replace("==", "="), found[3]
    if name in WORDS:
        if sign not in ("=", "!="):
            raise InputError(f"--where: '{clause}': {name} has names, not numbers; compare it by = or !=.")
        if value not in WORDS[name]:
            raise InputError(f"--where: '{clause}': {unknown(name, value, WORDS[name])}")
        return lambda c: bool(_SIGNS[sign](getattr(c, name), value))
    if name not in NUMBERS:
        raise InputError(f"--where: '{clause}': {unknown('decision', name, (*NUMBERS, *WORDS))}")
    if not value.isdecimal():
        raise InputError(f"--where: '{clause}': {name} is a number, not {value}; write one as {name} {sign} 2.")
    return lambda c: bool(_SIGNS[sign](getattr(c, name), int(value)))


def read_batches(text: str) -> list[int]:
    """Return the batches of a text: some of them, or all powers of two times the first up to the last.

    >>> read_batches("256..1024"), read_batches("96, 128")
    ([256, 512, 1024], [96, 128])
    """
    first, is_range, last = text.partition("..")
    numbers = [part.strip() for part in ([first, last] if is_range else text.split(","))] if text.strip() else []
    if not all(part.isdecimal() and 0 < int(part) <= _MOST_ROWS for part in numbers):
        raise InputError(f"--batch '{text}': give rows of a step from 1 to {_MOST_ROWS:,}, as 256..1024 or 256,384.")
    found = sorted({int(part) for part in numbers})
    if not is_range:
        return found
    if int(first) > int(last):
        raise InputError(f"--batch '{text}': the first is above the last; write {last.strip()}..{first.strip()}.")
    return [found[0] << k for k in range(_MOST_ROWS.bit_length()) if found[0] << k <= found[-1]]


def left(space: Sequence[Choice], constraints: Sequence[tuple[str, Allows]]) -> list[Choice]:
    """Return the plans that satisfy all constraints. Raises InputError for one that leaves none, or that all satisfy
    together with none.
    """
    for words, allows in constraints:
        if not any(map(allows, space)):
            raise InputError(f"--where: no plan of the space satisfies '{words}'; {_values(space, words)}")
    found = [c for c in space if all(allows(c) for _, allows in constraints)]
    if not found:
        every = ", ".join(words for words, _ in constraints)
        raise InputError(f"--where: no plan of the space satisfies '{every}' together; leave one of these out.")
    return found


def _values(space: Sequence[Choice], words: str) -> str:
    """Return the values of the decision of a constraint in a space, in words."""
    name = next((n for n in (*NUMBERS, *WORDS) if re.search(rf"\b{n}\b", words)), "schedule")
    return f"{name} is one of {', '.join(map(str, sorted({getattr(c, name) for c in space})))}."
