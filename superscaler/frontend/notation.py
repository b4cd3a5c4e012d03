"""The notation of op rules: `b.. k+, n k -> b.. n` names each dim of the tensor operands and of the results.

A letter is an index. `+` marks it summed, `^` frozen; one that is neither and stands in every result is spatial, any
other one is frozen. `b..` stands for all remaining dims, aligned at the right; a dim of size 1 is broadcast. `(h d)` is
a dim that is a product, major to minor; the sizes of its letters come from elsewhere. `_` is a dim with an index of
its own that cannot be cut; in an operand it is read whole. Operands that a call leaves out are left out at the end.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from superscaler.ir.graph import Mark

Shape = tuple[int, ...]
Dim = tuple[str, ...] | None
_TOKEN = re.compile(r"\(([^)]*)\)|(\S+)")


@dataclass(frozen=True, slots=True)
class Signature:
    """The letters of each dim of each operand (None: read whole) and result, and their sizes and marks."""

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    sizes: Mapping[str, int]
    marks: Mapping[str, Mark]


@lru_cache(maxsize=4096)
def _tokens(side: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """Return per operand its tokens, each the words of one dim."""
    operands = [part.strip() for part in side.split(",")]
    return tuple(tuple(tuple((m[1] if m[2] is None else m[2]).split()) for m in _TOKEN.finditer(o)) for o in operands)


def resolve(
    notation: str, inputs: Sequence[Shape], outputs: Sequence[Shape], sizes: Mapping[str, int] | None = None
) -> Signature | None:
    """Return the signature of a call with these shapes, or None where the notation does not fit them."""
    left, right = (_tokens(side.strip()) for side in notation.split("->"))
    if len(inputs) > len(left) or len(outputs) != len(right):
        return None
    found = _Sizes(dict(sizes or {}))
    sides = []
    for shapes, patterns, prefix in ((inputs, left, ""), (outputs, right, "_")):
        rows = [_operand(shape, p, f"{prefix}{n}") for n, (shape, p) in enumerate(zip(shapes, patterns, strict=False))]
        sides.append(rows)
    if any(row is None for rows in sides for row in rows):
        return None
    pairs = [[row for row in rows if row is not None] for rows in sides]
    if not all(found.learn(size, dim) for rows in pairs for row in rows for size, dim in row):
        return None
    if not all(found.fits(size, dim) for rows in pairs for row in rows for size, dim in row):
        return None
    ins, outs = (tuple(tuple(found.strip(size, dim) for size, dim in row) for row in rows) for rows in pairs)
    return Signature(ins, outs, found.sizes, _marks(notation, ins, outs))


def frozen(inputs: Sequence[Shape], outputs: Sequence[Shape]) -> Signature:
    """Return the signature of an op without a rule: everything is read whole, no index can be cut."""
    ins = ", ".join(" ".join("_" for _ in shape) for shape in inputs)
    outs = ", ".join(" ".join("_" for _ in shape) for shape in outputs)
    signature = resolve(f"{ins} -> {outs}", inputs, outputs)
    assert signature is not None
    return signature


def _operand(shape: Shape, pattern: Sequence[tuple[str, ...]], number: str) -> list[tuple[int, Dim]] | None:
    """Return (size, letters) of each dim of an operand; None where the number of dims does not fit."""
    stretch = [k for k, words in enumerate(pattern) if words and words[0].rstrip("+^").endswith("..")]
    extra = len(shape) - len(pattern) + len(stretch)
    if (not stretch and extra) or extra < 0:
        return None
    dims: list[Dim] = []
    for words in pattern:
        if words and words[0].rstrip("+^").endswith(".."):
            stem = words[0].rstrip("+^")
            dims += [(f"{stem}{extra - k}",) for k in range(extra)]
        elif words == ("_",):
            dims.append((f"_{number}.{len(dims)}",) if number.startswith("_") else None)
        else:
            dims.append(tuple(word.rstrip("+^") for word in words))
    return list(zip(shape, dims, strict=True))


class _Sizes:
    """The sizes of letters, learned from dims that are one letter; a dim of size 1 says nothing."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes

    def learn(self, size: int, dim: Dim) -> bool:
        if dim is None or len(dim) != 1 or size == 1:
            return True
        return self.sizes.setdefault(dim[0], size) == size

    def fits(self, size: int, dim: Dim) -> bool:
        return dim is None or size == 1 or prod(self.sizes.get(letter, 1) for letter in dim) == size

    def strip(self, size: int, dim: Dim) -> Dim:
        """Leave out letters of size 1, and all of a dim of size 1, which is broadcast or has no slot."""
        if dim is None or size == 1:
            return None if dim is None else ()
        return tuple(letter for letter in dim if self.sizes.get(letter, 1) > 1)


def _marks(notation: str, inputs: tuple[tuple[Dim, ...], ...], outputs: tuple[tuple[Dim, ...], ...]) -> dict[str, Mark]:
    written = {word.rstrip("+^"): word[-1] for word in re.split(r"[\s,()]+|->", notation) if word[-1:] in ("+", "^")}
    results = [{letter for dim in output for letter in dim or ()} for output in outputs]
    marks: dict[str, Mark] = {}
    for letter in dict.fromkeys(w for row in (*outputs, *inputs) for dim in row for w in dim or ()):
        stem = letter.rstrip("0123456789") if ".." in letter else letter
        sign = written.get(stem, "")
        if sign == "+" and not any(letter in result for result in results):
            marks[letter] = "summed"
        elif sign or letter.startswith("_") or not all(letter in result for result in results):
            marks[letter] = "frozen"
        else:
            marks[letter] = "spatial"
    return marks
