"""Identifiers of pTensors, and the names that the values of one device are given."""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable

from superscaler.ir.program import ONE, Task, Value
from superscaler.schedule.edges import Key

# What names of values have before and after an identifier, and what emitted code calls its own.
_DERIVED = re.compile(r"_m\d*$|_[ps]\d+$|_work$|__\d+$")
_RESERVED = {str(ONE), "rt", "segments", "range", "_", "m"}


def identifier(tensor: str) -> str:
    """Return a Python identifier for a pTensor.

    >>> identifier("transformer.h.0.ln_1.weight"), identifier("d_model")
    ('transformer_h_0_ln_1_weight', '_d_model')
    """
    name = re.sub(r"\W", "_", tensor)
    return f"_{name}" if name[:1].isdigit() or name.startswith("d_") or keyword.iskeyword(name) else name


def unique_identifiers(tensors: Iterable[str]) -> dict[str, str]:
    """Return a name for each pTensor; those that would be equal, or look like another's part or like what emitted code
    calls its own, get one more letter.

    >>> unique_identifiers(["a.b", "a_b", "x_m0", "one"])
    {'a.b': 'a_b', 'a_b': 'a_b_', 'x_m0': 'x_m0_', 'one': 'one_'}
    """
    found: dict[str, str] = {}
    taken = set(_RESERVED)
    for tensor in tensors:
        name = identifier(tensor)
        while name in taken or _DERIVED.search(name):
            name += "_"
        taken.add(name)
        found[tensor] = name
    return found


def task(segment: int, key: Key) -> Task:
    return Task(segment, *key[1:])


class Names:
    """Numbers the values of one device that are alike: of one tensor, microbatch, part and role."""

    def __init__(self) -> None:
        self._count: Counter[Value] = Counter()

    def fresh(self, like: Value) -> Value:
        """Return the next value of this kind."""
        kind = like if like.number == 1 else like._replace(number=1)
        self._count[kind] += 1
        number = self._count[kind]
        return kind if number == 1 else kind._replace(number=number)
