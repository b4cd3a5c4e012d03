"""Parts of ops: handles on them for plans, and their portions and places as arrays with a row for each."""

from __future__ import annotations

import itertools
import re
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, pairwise
from math import prod
from typing import Any, overload

import numpy as np

from superscaler.errors import InputError, TransformError, named
from superscaler.ir.grid import Grid, Ints, Mirror
from superscaler.ir.mask import Box
from superscaler.ir.model import Op
from superscaler.ir.op import Index
from superscaler.specs.arguments import missing

Address = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """A light handle on parts of one op: cells of one grid of its tree, in any shape. Indexing works as in numpy.

    After `Split("batch", 4)` and `Split("heads", 2)` of one op, `cells` has shape (4, 2); `parts[0]` has those of batch
    0.
    """

    op: Op
    grid: Grid = field(repr=False)
    prefix: Address
    cells: Ints
    level: int

    def __len__(self) -> int:
        return len(self.cells) if self.cells.ndim else 1

    def __iter__(self) -> Iterator[Parts]:
        return (self[k] for k in range(len(self)))

    def __getitem__(self, key: Any) -> Parts:
        try:
            cells = self.cells[key] if self.cells.ndim else self.cells
        except IndexError:
            shape = " x ".join(map(str, self.cells.shape))
            frame = sys._getframe(1)
            raise InputError(
                f"{frame.f_code.co_filename}:{frame.f_lineno}: {self.op.name} has {shape} parts, and none at "
                f"[{named(key)}]; choose numbers from 0, one for each cut."
            ) from None
        return replace(self, cells=np.asarray(cells))

    def flat(self) -> Parts:
        """Return the same parts in one row."""
        return replace(self, cells=self.cells.reshape(-1))

    @property
    def origin(self) -> Op:
        return self.op

    def paths(self) -> list[Address]:
        """Return the address of each part, which stays valid when the part is transformed further."""
        return [(*self.prefix, (self.level, int(cell))) for cell in self.cells.reshape(-1)]

    def check(self) -> None:
        """Raise TransformError if the parts were replaced by a later `op_trans`."""
        replaced = len(self.grid.axes) != self.level
        cells = self.cells.reshape(-1).tolist() if self.grid.children else []
        nested = [self.grid.children[c] for c in cells if c in self.grid.children]
        if replaced or nested:
            where = self.grid.replaced_at if replaced else nested[0].replaced_at
            raise TransformError(
                f"this part of {self.op.name} was replaced by the op_trans at {where}; use its result."
            )


class Flat(Sequence[Parts]):
    """The parts of several handles in one row. There may be millions, so each is made on demand."""

    def __init__(self, handles: Iterable[Parts]) -> None:
        self.handles = [parts.flat() for parts in handles]
        self.ends = list(accumulate(len(parts) for parts in self.handles))

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def __iter__(self) -> Iterator[Parts]:
        return chain.from_iterable(self.handles)

    @overload
    def __getitem__(self, key: int) -> Parts: ...

    @overload
    def __getitem__(self, key: slice) -> list[Parts]: ...

    def __getitem__(self, key: int | slice) -> Parts | list[Parts]:
        if isinstance(key, slice):
            return [self[k] for k in range(*key.indices(len(self)))]
        try:
            key = range(len(self))[key]
        except (IndexError, TypeError):
            raise missing("part", key, len(self), sys._getframe(1)) from None
        at = bisect_right(self.ends, key)
        return self.handles[at][key - self.ends[at]]


@dataclass(frozen=True, slots=True)
class Block:
    """A repeated part of the model: a module path that ends in an integer (`transformer.h.0`), with its forward ops in
    order.
    """

    path: str
    ops: tuple[Op, ...]

    @property
    def calls(self) -> tuple[tuple[Op, ...], ...]:
        """Return the ops of each call of the module, if a step calls it several times (recycling, shared layers). A
        call begins where the module's first operator recurs.
        """
        places = [(op.module, op.target, op.source) for op in self.ops]
        starts = [k for k, place in enumerate(places) if place == places[0]]
        return tuple(self.ops[a:b] for a, b in pairwise([*starts, len(self.ops)]))


def block_of(module: str) -> str:
    """Return the outermost enclosing module path that ends in an integer, or an empty string.

    >>> block_of("transformer.h.3.attn.c_attn")
    'transformer.h.3'
    """
    found = _BLOCK.match(module)
    return found.group(0) if found else ""


_BLOCK = re.compile(r"^(.*?\.)?\d+(?=\.|$)")


def rows_under(grid: Grid, path: Address) -> tuple[int, int]:
    """Return the range of rows of a part's address."""
    if not path:
        return 0, len(grid)
    (level, cell), rest = path[0], path[1:]
    width = prod(len(a.sizes) for a in grid.axes[level:])
    first = cell * width

    def count(cells: range) -> int:
        return sum(len(grid.children[c]) if c in grid.children else 1 for c in cells)

    before = count(range(first))
    lo, hi = rows_under(grid.children[cell], rest) if rest else (0, count(range(first, first + width)))
    return before + lo, before + hi


Share = tuple[tuple[int, ...], int, int]


@dataclass(frozen=True, eq=False)
class Rows:
    """The parts of an op as arrays with one row a part: `lo`, `hi` [rows, indices], the rest [rows]. They are compared
    by identity: ops that are cut and placed alike, as those of layers, share them in a schedule.

    `microbatch`: -1 for none; nested ones are counted in turn. `ordinal`: distinguishes the parts of one device and
    microbatch. `branch`: equal for parts below the same replicas of all replica axes. `shares`: for each part, the
    value axes above it as (inputs, coordinate, number of parts).
    """

    lo: Ints
    hi: Ints
    device: Ints
    microbatch: Ints
    branch: Ints
    ordinal: Ints
    routes: bool
    regular: bool
    tree: Tree
    shares: tuple[tuple[Share, ...], ...]

    def __len__(self) -> int:
        return len(self.device)

    @cached_property
    def keys(self) -> list[tuple[int, int, int]]:
        """Return (device, microbatch, ordinal) of each part: its address in the schedule."""
        return list(zip(self.device.tolist(), self.microbatch.tolist(), self.ordinal.tolist(), strict=True))

    @cached_property
    def boxes(self) -> list[tuple[int, ...]]:
        """Return the box of each part over all indices, flattened and hashable."""
        return [tuple(row) for row in np.concatenate([self.lo, self.hi], axis=1).tolist()]

    def box(self, row: int) -> Box:
        return tuple(zip(self.lo[row].tolist(), self.hi[row].tolist(), strict=True))

    @cached_property
    def has_shares(self) -> bool:
        return any(self.shares)

    def is_shared(self, operand: int) -> bool:
        """Return whether some parts share out the addends of an input."""
        return self.has_shares and any(operand in group for shares in self.shares for group, _, _ in shares)

    def share(self, row: int, operand: int) -> tuple[tuple[int, int], ...]:
        """Return a part's place among those that share out an input: (coordinate, number), outer axis first."""
        return tuple((at, count) for group, at, count in self.shares[row] if operand in group)

    def addends(self, operand: int | None = None) -> Sequence[Hashable]:
        """Return a label per part: parts with equal labels compute equal values, or (of an input) equal addends of its
        gradient.

        The parts of a value compute different values, but equal gradients of the inputs that they share out.
        """
        if not self.has_shares:
            return self.boxes
        kept = ([s for s in shares if operand is None or operand not in s[0]] for shares in self.shares)
        return [(box, *shares) for box, shares in zip(self.boxes, kept, strict=True)]


@dataclass(frozen=True, slots=True)
class Tree:
    """The nesting of the rows: a leaf holds `row`; a split's children tile it, a replica's children repeat it.

    The children of a node with `partial_inputs` add up to it; for the gradients of those inputs they are replicas.
    """

    row: int = -1
    is_replica: bool = False
    mirror: Mirror = "copy"
    children: tuple[Tree, ...] = ()
    partial_inputs: tuple[int, ...] = ()


def expand(op: Op, grid: Grid) -> Rows:
    """Return the rows of a grid. Grids without children take a few array operations, whatever their size."""
    full = [(0, i.size) for i in op.indices]
    if grid.children:
        *columns, paths, above = zip(*_walk(grid, full, -1, ()), strict=True)
        number = {path: k for k, path in enumerate(dict.fromkeys(paths))}
        lo, hi, device, micro, branch = (np.array(c, dtype=np.int64) for c in (*columns, [number[p] for p in paths]))
        lo, hi = (side.reshape(len(paths), len(full)) for side in (lo, hi))
        tree, shares = _tree(grid, itertools.count()), tuple(above)
    else:
        lo, hi, device, micro, branch = flat_cells(grid, full, -1)
        tree, shares = Tree(), tuple(_shares(grid))
    for k, index in enumerate(op.indices):
        if index.follows is not None:
            lo[:, k], hi[:, k] = following(op, index, lo, hi)
    seen: Counter[tuple[int, int]] = Counter()
    ordinal = np.zeros(len(device), dtype=np.int64)
    for row, key in enumerate(zip(device.tolist(), micro.tolist(), strict=True)):
        ordinal[row] = seen[key]
        seen[key] += 1
    return Rows(lo, hi, device, micro, branch, ordinal, _routes(grid), not grid.children, tree, shares)


def following(op: Op, index: Index, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """Return the ranges of an index that follows another one.

    Raises TransformError unless each part has one chunk of the other index, or all of it, if it is cut into chunks.
    """
    assert index.follows is not None
    first, step, chunks = index.follows
    if not chunks:
        return np.zeros_like(hi[:, first]), hi[:, first]
    one, mine = op.indices[first].size // chunks, index.size // chunks
    start = (lo[:, first] // one - step) % chunks * mine
    size = hi[:, first] - lo[:, first]
    is_one = (size == one) & (lo[:, first] % one == 0)
    wrong = ~is_one & (size < op.indices[first].size)
    if wrong.any():
        part = f"{lo[wrong][0, first]}:{hi[wrong][0, first]}"
        raise TransformError(
            f"{op.name} is cut to {part} of {op.indices[first].factor}, but it computes chunks of {one}; cut it into "
            f"{chunks} equal parts, or leave it whole."
        )
    return np.where(is_one, start, 0), np.where(is_one, start + mine, index.size)


def _shares(grid: Grid) -> list[tuple[Share, ...]]:
    """Return the value axes of this grid for each cell, ignoring children."""
    shape = tuple(len(a.sizes) for a in grid.axes)
    axes = [(at, axis) for at, axis in enumerate(grid.axes) if axis.partial_inputs]
    if not axes:
        return [()] * prod(shape)
    return [tuple((axis.partial_inputs, cell[at], len(axis.sizes)) for at, axis in axes) for cell in np.ndindex(*shape)]


def _routes(grid: Grid) -> bool:
    here = any(a.index is None and not a.partial_inputs and a.mirror == "route" for a in grid.axes)
    return here or any(_routes(child) for child in grid.children.values())


def flat_cells(grid: Grid, box: Sequence[tuple[int, int]], micro: int) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """Return lo, hi, device, microbatch and branch of all cells, ignoring children."""
    shape = tuple(len(a.sizes) for a in grid.axes)
    cells = prod(shape)
    where = np.indices(shape).reshape(len(shape), cells)
    lo, hi = (np.tile(np.array([b[end] for b in box], dtype=np.int64), (cells, 1)) for end in (0, 1))
    microbatch = np.full(cells, micro, dtype=np.int64)
    branch = np.zeros(cells, dtype=np.int64)
    for axis, coordinate in zip(grid.axes, where, strict=True):
        if axis.index is None and not axis.partial_inputs:
            branch = branch * len(axis.sizes) + coordinate
        elif axis.index is not None:
            ends = np.cumsum(axis.sizes)
            start = lo[:, axis.index].copy()
            lo[:, axis.index] = start + (ends - axis.sizes)[coordinate]
            hi[:, axis.index] = start + ends[coordinate]
        if axis.is_microbatch:
            microbatch = np.maximum(microbatch, 0) * len(axis.sizes) + coordinate
    return lo, hi, grid.devices.reshape(-1).astype(np.int64), microbatch, branch


Leaf = tuple[list[int], list[int], int, int, tuple[object, ...], tuple[Share, ...]]


def _walk(
    grid: Grid, box: Sequence[tuple[int, int]], micro: int, path: tuple[object, ...], above: tuple[Share, ...] = ()
) -> Iterator[Leaf]:
    """Yield the leaves of a grid with children, in row order."""
    mine = _shares(grid)
    lo, hi, device, microbatch, branch = flat_cells(grid, box, micro)
    columns = (column.tolist() for column in (lo, hi, device, microbatch, branch))
    for cell, (first, last, own, part, label) in enumerate(zip(*columns, strict=True)):
        here, shares = (*path, label), (*above, *mine[cell])
        if cell in grid.children:
            inner = list(zip(first, last, strict=True))
            yield from _walk(grid.children[cell], inner, part, (*here, cell), shares)
        else:
            yield first, last, own, part, here, shares


def _tree(grid: Grid, rows: Iterator[int], level: int = 0, cell: int = 0) -> Tree:
    if level == len(grid.axes):
        child = grid.children.get(cell)
        return Tree(row=next(rows)) if child is None else _tree(child, rows)
    axis = grid.axes[level]
    width = len(axis.sizes)
    children = tuple(_tree(grid, rows, level + 1, cell * width + k) for k in range(width))
    is_replica = axis.index is None and not axis.partial_inputs
    return Tree(is_replica=is_replica, mirror=axis.mirror, children=children, partial_inputs=axis.partial_inputs)
