"""Grids of parts: the cuts and places of an op, kept as axes and arrays, never as objects.

A `Grid` nests its axes from outer to inner. A split axis cuts an index of the op into `sizes`; a replica axis repeats
everything below it. A cell that was transformed separately holds a child grid, so the parts of an op are the leaves of
a small tree, and the regular case is one array of devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Mirror = Literal["copy", "route"]
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
        return (self.axes, self.devices.strides, self.unbroadcast.tobytes(), children)

    @property
    def unbroadcast(self) -> Ints:
        """Return the devices, with length 1 along axes of stride 0."""
        return self.devices[tuple(slice(0, 1 if stride == 0 else None) for stride in self.devices.strides)]

    @property
    def distinct(self) -> Ints:
        """Return the devices, with length 1 along axes on which all devices are equal."""
        devices = self.unbroadcast
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
        return Grid(
            self.axes, np.broadcast_to(self.unbroadcast | HOSTS, self.devices.shape), children, self.replaced_at
        )

    def ends(self) -> tuple[int, int]:
        """Return the least and the largest number of a part's device."""
        if not self.children:
            return int(self.unbroadcast.min()), int(self.unbroadcast.max())
        used = self.used()
        return min(used), max(used)

    def used(self) -> set[int]:
        """Return the devices of all parts, UNASSIGNED among them if some have none."""
        if not self.children:
            return set(np.unique(self.unbroadcast).tolist())
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
