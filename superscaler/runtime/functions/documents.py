"""Documents that lie one after the other in a row, and the rectangles of scores inside of them.

A query sees keys of its own document only. So the scores that count are rectangles: runs of queries of a document, each
with a run of keys of the same one. The runs are read from the numbers of the documents when an attention runs, since a
packing changes with each batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import lru_cache
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from superscaler.groups import collect
from superscaler.runtime.functions.tracing import setting

Range = tuple[int, int]
# A run of queries: its first, its end, the place of the first in the sequence, and the number of its document.
Run = tuple[int, int, int, int]
# The scores of a kernel that takes as long as its start: fewer and larger kernels are preferred to smaller areas.
LEAST_SCORES = 1024
# The lengths of documents in each row where there are no data to look at; none: a row is one document.
_PACKING: ContextVar[tuple[int, ...]] = ContextVar("superscaler_packing", default=())


class Place(NamedTuple):
    """Where queries and keys lie in the sequence: for each stretch of queries its first number and place, and its
    length; and the place of the first key.
    """

    stretches: tuple[tuple[int, int, int], ...]
    first_key: int = 0


class Documents(NamedTuple):
    """The numbers of the documents of queries (..., L, 1) and of keys (..., 1, S), and the places of each block."""

    mine: Tensor
    theirs: Tensor
    places: tuple[Place, ...]

    @property
    def mask(self) -> Tensor:
        """Return the keys of each query's document."""
        return self.mine == self.theirs


class Rectangle(NamedTuple):
    """Scores of some rows of a batch: queries that see keys, "all" or, of as many keys as queries, those "before"."""

    rows: Range
    queries: Range
    keys: Range
    sees: str

    @property
    def area(self) -> int:
        """Return the number of scores of a row that count."""
        count = self.queries[1] - self.queries[0]
        return count * (count + 1) // 2 if self.sees == "before" else count * (self.keys[1] - self.keys[0])


def documents(
    mine: Tensor, theirs: Tensor, box: Sequence[Range] = (), sizes: Sequence[int] = (), step: int = 0, chunks: int = 0
) -> Documents:
    """Return the documents of the queries in `box` of a sequence of `sizes`; by default of all. With `chunks`, each
    chunk of queries is a block that reads the keys of the chunk `step` before it.
    """
    own, whole = tuple(tuple(r) for r in box), tuple(sizes)
    if not chunks:
        return Documents(mine, theirs, (Place(_stretches(own, whole) if own else ((0, 0, mine.shape[-2]),)),))
    size = whole[0] // chunks
    numbers = range(own[0][0] // size, own[0][1] // size)
    return Documents(mine, theirs, tuple(Place(((0, n * size, size),), (n - step) % chunks * size) for n in numbers))


@lru_cache(maxsize=256)
def _stretches(box: tuple[Range, ...], sizes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return the stretches of the elements of a box, in whose dims they are numbered major to minor."""
    if len(box) == 1:
        return ((0, box[0][0], box[0][1] - box[0][0]),)
    places = numbers_of(box, sizes)
    starts = [0, *(n for n, (a, b) in enumerate(pairwise(places), 1) if b != a + 1), len(places)]
    return tuple((low, places[low], high - low) for low, high in pairwise(starts))


def numbers_of(box: Sequence[Range], extents: Sequence[int]) -> list[int]:
    """Return the numbers of the elements of a box."""
    found = [0]
    for (low, high), size in zip(box, extents, strict=True):
        found = [number * size + k for number in found for k in range(low, high)]
    return found


def rectangles(some: Documents, rows: int, is_causal: bool) -> list[Rectangle] | None:
    """Return the rectangles of a block with so many rows; None if the full square with a mask takes no longer.

    `is_causal`: a query sees no key behind its place.
    """
    (place,), found = some.places, list[Rectangle]()
    queries, keys = some.mine.shape[-2], some.theirs.shape[-1]
    packed = [tuple(_pairs(*runs, place, is_causal)) for runs in zip(*_runs(some, place), strict=True)]
    for pairs, group in groupby(range(len(packed)), lambda n: packed[n]):
        numbers = list(group)
        own = (0, rows) if len(packed) == 1 else (numbers[0], numbers[-1] + 1)
        found += (Rectangle(own, *pair) for pair in pairs)
    needed = sum((r.rows[1] - r.rows[0]) * r.area + LEAST_SCORES for r in found)
    return found if needed <= max(rows * queries * keys, LEAST_SCORES) else None


def _runs(some: Documents, place: Place) -> tuple[list[tuple[Run, ...]], list[tuple[Run, ...]]]:
    """Return for each row the runs of queries, and of keys."""
    count = some.theirs.shape[-1]
    if type(some.mine) is not Tensor:
        ends = place.first_key + count, max(at + size for _, at, size in place.stretches)
        lengths = list(_ends(max(ends)))
        return [_given(lengths, place.stretches)], [_given(lengths, ((0, place.first_key, count),))]
    mine, theirs = some.mine.reshape(-1, some.mine.shape[-2]), some.theirs.reshape(-1, count)
    ours, others = _of(mine, place.stretches), _of(theirs, ((0, place.first_key, count),))
    most = max(len(ours), len(others))
    return ours * (most // len(ours)), others * (most // len(others))


def _of(numbers: Tensor, stretches: Sequence[tuple[int, int, int]]) -> list[tuple[Run, ...]]:
    """Return the runs of equal numbers (rows, length) in each row. A stretch begins a run."""
    is_first = torch.ones_like(numbers, dtype=torch.bool)
    torch.ne(numbers[:, 1:], numbers[:, :-1], out=is_first[:, 1:])
    for low, _, _ in stretches:
        is_first[:, low] = True
    row, at = is_first.nonzero(as_tuple=True)
    # One transfer from a GPU.
    starts = torch.stack((row, at, numbers[row, at].to(torch.int64))).t().tolist()
    found = [list[Run]() for _ in range(len(numbers))]
    behind = [*((n, low) for n, low, _ in starts[1:]), (-1, 0)]
    for (n, low, name), (next_row, end) in zip(starts, behind, strict=True):
        high = end if next_row == n else numbers.shape[1]
        found[n].append((low, high, _place(low, stretches), name))
    return [tuple(runs) for runs in found]


def _place(low: int, stretches: Sequence[tuple[int, int, int]]) -> int:
    """Return the place in the sequence of an element."""
    return next(at + low - first for first, at, size in reversed(stretches) if first <= low)


def _given(ends: Sequence[int], stretches: Sequence[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Return the runs of documents with these ends, in stretches of them."""
    found = list[Run]()
    for first, at, size in stretches:
        for name, (low, high) in enumerate(pairwise((0, *ends))):
            low, high = max(low, at), min(high, at + size)
            if low < high:
                found.append((first + low - at, first + high - at, low, name))
    return tuple(found)


def _ends(length: int) -> Iterator[int]:
    """Yield the ends of the documents of a packing, which repeats, in a sequence of so many tokens."""
    end, lengths = 0, _PACKING.get() or (length,)
    while end < length:
        for size in lengths:
            end += size
            yield end


def _pairs(
    queries: Iterable[Run], keys: Iterable[Run], place: Place, is_causal: bool
) -> Iterator[tuple[Range, Range, str]]:
    """Yield the queries and keys of a row that are of one document, and how they see each other."""
    known = collect((name, (start, end)) for start, end, _, name in keys)
    for low, high, at, name in queries:
        for start, end in known.get(name, ()):
            if is_causal:
                yield from _visible(low, high, start, end, at - low - place.first_key)
            else:
                yield (low, high), (start, end), "all"


def _visible(low: int, high: int, start: int, end: int, shift: int) -> Iterator[tuple[Range, Range, str]]:
    """Yield the parts of a rectangle that a causal mask leaves: query i sees the keys up to i + `shift`."""
    if start < min(end, low + shift):
        yield (low, high), (start, min(end, low + shift)), "all"
    first, last = max(start, low + shift), min(end, high + shift)
    if first < last:
        yield (first - shift, last - shift), (first, last), "before"
        if last - shift < high:
            yield (last - shift, high), (first, last), "all"


def given_packing() -> tuple[int, ...]:
    """Return the lengths of documents where there are no data to look at."""
    return _PACKING.get()


def packing(lengths: Sequence[int]) -> AbstractContextManager[None]:
    """Run the block with documents of these lengths in each row, again and again, where there are no data."""
    return setting(_PACKING, tuple(lengths))
