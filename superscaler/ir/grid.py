"""Grids of parts: the cuts and places of an op, kept as axes and arrays, never as objects.

A `Grid` nests its axes from outer to inner. A split axis cuts an index of the op into `sizes`; a replica axis repeats
everything below it. A cell that was transformed separately holds a child grid, so the parts of an op are the leaves of
a small tree, and the regular case is one array of devices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from superscaler.errors import TransformError
from superscaler.ir.mask import Box
from superscaler.ir.model import Index, Op

Ints = NDArray[np.int64]
Mirror = Literal["copy", "route"]
Share = tuple[tuple[int, ...], int, int]
UNASSIGNED = -1
# The host of device d, its share of the memory of the server's CPU, has the number d + HOSTS; it is the process of d
# that works there. A power of two above all numbers of devices: d ^ HOSTS is the other one of both, d % HOSTS device d.
HOSTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Axis:
    """One level of a grid: `index` is cut into `sizes`, or (index None) everything is replicated `len(sizes)` times.

    `partial_inputs`: the replicas share out the addends of these inputs; each reads some of them, and their results add
    up to the value. `name`: the mesh axis along which `op_assign` places the parts, in order or at the places `at`
    (one: all). Axes are compared without `name` and `at`: the devices of placed parts are known.
    """

    index: int | None
    sizes: tuple[int, ...]
    mirror: Mirror = "copy"
    is_microbatch: bool = False
    partial_inputs: tuple[int, ...] = ()
    name: str = field(default="", compare=False, repr=False)
    at: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @property
    def is_stage(self) -> bool:
        """Return whether it leaves parts whole, at one place of a mesh."""
        return self.index is None and len(self.at) == len(self.sizes) == 1


@dataclass(slots=True)
class Grid:
    """The parts of an op, or of one cell of another grid.

    `devices` has one axis per entry of `axes`, and is never written to. If all parts along an axis are on one device,
    it has stride 0 there and costs nothing.
    """

    axes: tuple[Axis, ...] = ()
    devices: Ints = field(default_factory=lambda: np.array(UNASSIGNED))
    children: dict[int, Grid] = field(default_factory=dict)
    replaced_at: str = ""

    def copy(self) -> Grid:
        children = {cell: child.copy() for cell, child in self.children.items()}
        return Grid(self.axes, self.devices, children, self.replaced_at)

    def __len__(self) -> int:
        cells = prod(len(a.sizes) for a in self.axes)
        return cells - len(self.children) + sum(map(len, self.children.values()))

    def signature(self) -> tuple[object, ...]:
        """Return a hashable value that is equal only for equal grids."""
        children = tuple((cell, child.signature()) for cell, child in sorted(self.children.items()))
        return (self.axes, self.devices.strides, self.once.tobytes(), children)

    @property
    def once(self) -> Ints:
        """Return the devices, with length 1 along axes of stride 0."""
        return self.devices[tuple(slice(0, 1 if stride == 0 else None) for stride in self.devices.strides)]

    @property
    def slim(self) -> Ints:
        """Return the devices, with length 1 along axes on which all devices are equal."""
        devices = self.once
        for axis in range(devices.ndim):
            first = devices.take([0], axis)
            devices = first if (devices == first).all() else devices
        return devices

    def place(self, cells: Ints, devices: Ints) -> None:
        """Put cells on devices, an array that broadcasts against them. Raises ValueError if it does not."""
        if covers(cells, self.devices.size):
            self.devices = np.broadcast_to(devices, cells.shape).reshape(self.devices.shape)
        else:
            # In C order, so that the flat view writes into this array, whatever the strides of a broadcast were.
            changed = np.array(self.devices, order="C")
            changed.reshape(-1)[cells] = devices
            self.devices = changed

    @property
    def is_touched(self) -> bool:
        """Return whether a verb has cut or placed anything."""
        return bool(self.axes or self.children) or int(self.devices) != UNASSIGNED

    def only(self, places: Places, outer: tuple[Axis, ...] = ()) -> Grid:
        """Return the grid with only some places of its axes: `places(outer axes, grid)` gives a row for each axis of a
        grid. The axes lose their places on a mesh.
        """
        kept, devices = places(outer, self), self.devices
        for at, some in enumerate(kept):
            # A range is a slice, which keeps stride 0.
            whole = range(min(some, default=0), max(some, default=-1) + 1)
            chosen = slice(whole.start, whole.stop) if list(some) == list(whole) else list(some)
            devices = devices[(*(slice(None),) * at, chosen)]
        pairs = zip(self.axes, kept, strict=True)
        axes = (
            Axis(a.index, tuple(a.sizes[k] for k in some), a.mirror, a.is_microbatch, a.partial_inputs)
            for a, some in pairs
        )
        children: dict[int, Grid] = {}
        if self.children:
            cells = np.arange(self.devices.size).reshape(self.devices.shape)[np.ix_(*kept)].reshape(-1)
            own = ((at, self.children.get(cell)) for at, cell in enumerate(cells.tolist()))
            children = {at: child.only(places, (*outer, *self.axes)) for at, child in own if child is not None}
        return Grid(tuple(axes), devices, children, self.replaced_at)

    def on_hosts(self) -> Grid:
        """Return the same parts, each on the host of its device."""
        children = {cell: child.on_hosts() for cell, child in self.children.items()}
        return Grid(self.axes, np.broadcast_to(self.once | HOSTS, self.devices.shape), children, self.replaced_at)

    def used(self) -> set[int]:
        """Return the devices of all parts, UNASSIGNED among them if some have none."""
        if not self.children:
            return set(np.unique(self.once).tolist())
        own = np.delete(self.devices.reshape(-1), list(self.children))
        return set(own.tolist()).union(*(child.used() for child in self.children.values()))


# (axes above a grid, the grid) -> the chosen places of its axes.
Places = Callable[[tuple[Axis, ...], Grid], Sequence[Sequence[int]]]


def place_name(device: int) -> str:
    """Return a device, or a host, as text.

    >>> place_name(3), place_name(3 + HOSTS)
    ('device 3', 'the host of device 3')
    """
    return f"device {device}" if device < HOSTS else f"the host of device {device - HOSTS}"


def read_by(grid: Grid, slots: Sequence[int | None]) -> Grid:
    """Return the grid whose indices are the slots of an operand: the portions that the parts of a grid read, on their
    devices.
    """
    slot_of, devices = {index: slot for slot, index in enumerate(slots) if index is not None}, grid.devices
    own = [
        replace(a, index=slot_of[a.index], partial_inputs=()) if a.index in slot_of else _replicas(a) for a in grid.axes
    ]
    if grid.children:
        children = {cell: read_by(child, slots) for cell, child in grid.children.items()}
        return Grid(tuple(own), devices, children)
    # Parts on one device that read the same portion share one copy.
    kept = [a.index is not None or bool((devices != devices.take([0], at)).any()) for at, a in enumerate(own)]
    once = tuple(slice(None) if k else 0 for k in kept)
    return Grid(tuple(a for a, k in zip(own, kept, strict=True) if k), devices[once])


def cuts_of(grid: Grid, slots: Sequence[int | None]) -> tuple[Axis, ...]:
    """Return the axes of a grid that cut an operand, as cuts of its slots, and its stages; nothing for an irregular
    grid.

    Replicas stay if they share a mesh axis with a cut: both together are along it.
    """
    slot_of = {index: slot for slot, index in enumerate(slots) if index is not None}
    names = {a.name for a in grid.axes if a.index in slot_of and a.name}
    kept = [a for a in grid.axes if a.index in slot_of or a.is_stage or a.name in names]
    own = (replace(a, index=slot_of[a.index]) if a.index in slot_of else _replicas(a) for a in kept)
    return () if grid.children else tuple(own)


def _replicas(axis: Axis) -> Axis:
    return Axis(None, (1,) * len(axis.sizes), name=axis.name, at=axis.at)


def covers(cells: Ints, count: int) -> bool:
    """Return whether these are all cells of a grid, in order."""
    return cells.size == count and np.array_equal(cells.reshape(-1), np.arange(count))


@dataclass(frozen=True)
class Rows:
    """The parts of an op as arrays with one row a part: `lo`, `hi` [rows, indices], the rest [rows].

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

    def addends(self, operand: int | None = None) -> list[Hashable]:
        """Return a label per part: parts with equal labels compute equal values, or (of an input) equal addends of its
        gradient.

        The parts of a value compute different values, but equal gradients of the inputs that they share out.
        """
        if not self.has_shares:
            return list(self.boxes)
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
