"""Names: of values on a device and of the works of segments, which parse back, and of tensors, ops and modules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import blake2b
from itertools import takewhile
from typing import NamedTuple


class Value(NamedTuple):
    """A name on a device, such as `d_h_m2_work__3`: a tensor with identifier `name`, its gradient, or the handle of the
    communication that brings it. `number` counts values that are otherwise equal.
    """

    name: str
    is_gradient: bool = False
    microbatch: int = -1
    part: int = 0
    slice: int = 0
    is_handle: bool = False
    number: int = 1

    def __str__(self) -> str:
        return self.spelled(str(self.microbatch))

    def spelled(self, microbatch: str) -> str:
        """Return the name with another text for the number of its microbatch."""
        kept = f"_m{microbatch}" if self.microbatch >= 0 else ""
        kept += (f"_p{self.part}" if self.part else "") + (f"_s{self.slice}" if self.slice else "")
        kept += ("_work" if self.is_handle else "") + (f"__{self.number}" if self.number > 1 else "")
        return f"{'d_' if self.is_gradient else ''}{self.name}{kept}"

    @staticmethod
    def parse(text: str) -> Value:
        """Read a name. Identifiers of tensors never look like the prefixes and suffixes of a name.

        >>> Value.parse("d_h_m2_work__3")
        Value(name='h', is_gradient=True, microbatch=2, part=0, slice=0, is_handle=True, number=3)
        """
        found = _VALUE.match(text)
        assert found is not None, text
        gradient, name, microbatch, part, piece, handle, number = found.groups()
        return Value(
            name, bool(gradient), int(microbatch or -1), int(part or 0), int(piece or 0), bool(handle), int(number or 1)
        )


def family(value: Value) -> Value:
    """Return a value in the first microbatch; a value of all microbatches is a family of its own."""
    return value if value.microbatch < 0 else value._replace(microbatch=0)


def unlike_gradient(name: str) -> str:
    """Return a name that does not begin as that of a gradient, also with a suffix: `_d_model`, and `_d` for `d`."""
    return f"_{name}" if f"{name}_".startswith("d_") else name


_LATER = re.compile(r"\+\d+$")
_VALUE = re.compile(r"^(d_)?(.+?)(?:_m(\d+))?(?:_p(\d+))?(?:_s(\d+))?(_work)?(?:__(\d+))?$")
# The gradient of the loss.
ONE = Value("one")
# Names that emitted code itself uses: `m` and `l` count microbatches and layers in loops.
RESERVED = frozenset({str(ONE), "rt", "segments", "range", "reversed", "_", "m", "l"})


class Task(NamedTuple):
    """One part of a segment: the work of a Forward and of its Backward."""

    segment: int
    microbatch: int = -1
    part: int = 0

    def __str__(self) -> str:
        """Return the name of the task.

        >>> str(Task(3)), str(Task(3, 0, 1))
        ('s3', 's3_m0_p1')
        """
        return self.spelled(str(self.microbatch))

    def spelled(self, microbatch: str) -> str:
        """Return the name with another text for the number of its microbatch."""
        kept = (f"_m{microbatch}" if self.microbatch >= 0 else "") + (f"_p{self.part}" if self.part else "")
        return f"s{self.segment}{kept}"

    @staticmethod
    def parse(text: str) -> Task:
        """Read the name of a task.

        >>> Task.parse("s3_m0_p1")
        Task(segment=3, microbatch=0, part=1)
        """
        found = re.fullmatch(r"s(\d+)(?:_m(\d+))?(?:_p(\d+))?", text)
        assert found is not None, text
        segment, microbatch, part = found.groups()
        return Task(int(segment), int(microbatch or -1), int(part or 0))


def unique(name: str, taken: set[str]) -> str:
    """Return a name that is not taken, numbered from 2 on if it is, and take it.

    >>> taken = {"x"}
    >>> unique("x", taken), unique("x", taken), unique("y", taken)
    ('x_2', 'x_3', 'y')
    """
    found, n = name, 1
    while found in taken:
        n += 1
        found = f"{name}_{n}"
    taken.add(found)
    return found


def later(name: str, iteration: int) -> str:
    """Return the name of a tensor or op in an iteration of a step.

    >>> later("h", 0), later("h", 2)
    ('h', 'h+2')
    """
    return f"{name}+{iteration}" if iteration else name


def first(name: str) -> str:
    """Return the name of a tensor or op in the first iteration.

    >>> first("h"), first("h+2")
    ('h', 'h')
    """
    return _LATER.sub("", name)


def draw_number(op: str) -> int:
    """Return the seed number of an op's random numbers: it depends on the op's name only.

    >>> draw_number("dropout_1") == draw_number("dropout_1") != draw_number("dropout_2")
    True
    """
    return int.from_bytes(blake2b(op.encode(), digest_size=6).digest(), "big")


def common_module(modules: Iterable[str]) -> str:
    """Return the module path that all of these share. Empty paths do not count.

    >>> common_module(["h.0.attn.c_attn", "h.0.ln_1", "", "h.0"])
    'h.0'
    """
    levels = zip(*(module.split(".") for module in modules if module), strict=False)
    return ".".join(names[0] for names in takewhile(lambda names: len(set(names)) == 1, levels))
