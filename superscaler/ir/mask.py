"""Masks: the portion of a pTensor read or written by a part, in one line that parses back."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from superscaler.errors import InputError

Range = tuple[int, int]
Box = tuple[Range, ...]
_TEXT = re.compile(r"^(?P<tensor>[\w.]+)\[(?P<box>[^\]]*)\](?:\{(?P<value>[^}]*)\})?$")


@dataclass(frozen=True, slots=True)
class Mask:
    """Elements `box` (a range per slot) of `tensor`; `value` the ranges of the summed indices, by index number.

    Empty `value` means the whole value.

    >>> str(Mask("h", ((0, 4), (0, 512)), ((2, (0, 8)),)))
    'h[0:4, 0:512]{2=0:8}'
    >>> Mask.parse("h[0:4, 0:512]{2=0:8}").box
    ((0, 4), (0, 512))
    """

    tensor: str
    box: Box
    value: tuple[tuple[int, Range], ...] = ()

    def __str__(self) -> str:
        box = ", ".join(f"{lo}:{hi}" for lo, hi in self.box)
        value = ", ".join(f"{i}={lo}:{hi}" for i, (lo, hi) in self.value)
        return f"{self.tensor}[{box}]" + (f"{{{value}}}" if value else "")

    @staticmethod
    def parse(text: str) -> Mask:
        found = _TEXT.match(text.strip())
        if found is None:
            raise InputError(f"'{text}' is not a mask; write it as tensor[0:4, 0:512] or tensor[0:4]{{2=0:8}}.")
        ranges = tuple(_range(part) for part in found["box"].split(",") if part.strip())
        pairs = [part.split("=") for part in (found["value"] or "").split(",") if part.strip()]
        return Mask(found["tensor"], ranges, tuple((int(i), _range(r)) for i, r in pairs))


def _range(text: str) -> Range:
    lo, hi = text.split(":")
    return int(lo), int(hi)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common box of two boxes over the same slots, or None if they share no element."""
    both = tuple((max(p, q), min(r, s)) for (p, r), (q, s) in zip(a, b, strict=True))
    return None if any(lo >= hi for lo, hi in both) else both


def inside(box: Box, outer: Box) -> Box:
    """Return `box` in coordinates that start at the corner of `outer`."""
    return tuple((lo - start, hi - start) for (lo, hi), (start, _) in zip(box, outer, strict=True))


@lru_cache(1 << 14)
def extents(box: Box) -> tuple[int, ...]:
    return tuple(hi - lo for lo, hi in box)
