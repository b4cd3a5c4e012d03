"""Layouts: a tensor on devices as R(i)V(j)D(k1..kn), with the device order, in one line that parses back; and the
provenance of communication: the reason of each transfer, and its path through layouts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from math import prod

import numpy as np

from superscaler.errors import InputError
from superscaler.ir.grid import Grid, Ints
from superscaler.ir.model import Operand

_TEXT = re.compile(r"^R\((\d+)\)V\((\d+)\)D\(([\d,]*)\) @ (\[.*\]|\d+)$")


@dataclass(frozen=True, eq=False)
class Layout:
    """Device ids of shape (R, V, D1..Dn): replicas, value parts, parts of each slot of the tensor.

    >>> str(Layout(np.array([[[[0, 1]], [[2, 3]]]])))
    'R(1)V(2)D(1,2) @ [[[[0, 1]], [[2, 3]]]]'
    >>> Layout.parse("R(1)V(2)D(1,2) @ [[0, 1], [2, 3]]").devices.shape
    (1, 2, 1, 2)
    """

    devices: Ints

    @property
    def shape(self) -> tuple[int, int, tuple[int, ...]]:
        return self.devices.shape[0], self.devices.shape[1], tuple(self.devices.shape[2:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and np.array_equal(self.devices, other.devices)

    def __hash__(self) -> int:
        return hash((self.devices.shape, self.devices.tobytes()))

    @property
    def counts(self) -> str:
        """Return the layout in words, without the devices."""
        replicas, values, dims = self.shape
        return f"R({replicas})V({values})D({','.join(map(str, dims))})"

    def __str__(self) -> str:
        return f"{self.counts} @ {json.dumps(self.devices.tolist())}"

    @staticmethod
    def parse(text: str) -> Layout:
        """Read a layout; the device list may be nested in any way. Raises InputError if the counts disagree."""
        found = _TEXT.match(text.strip())
        if found is None:
            raise InputError(f"'{text}' is not a layout; write it as R(1)V(2)D(1,2) @ [[0, 1], [2, 3]].")
        shape = (int(found[1]), int(found[2]), *(int(k) for k in found[3].split(",") if k))
        ids = np.array(json.loads(found[4]), dtype=np.int64).reshape(-1)
        if ids.size != np.prod(shape):
            raise InputError(f"'{text}' names {ids.size} devices, but its shape needs {np.prod(shape)}.")
        return Layout(ids.reshape(shape))


def layout_of(grid: Grid, operand: Operand, output: bool, is_gradient: bool = False) -> Layout | None:
    """Return the layout of an operand, or of its gradient, over a regular grid; None for irregular ones.

    Microbatches are left out, and so are axes along which all parts are on one device. An axis that cuts an index of
    the operand is a D axis; any other cut makes value parts of an output and replicas of an input. The gradient of an
    input counts as an output. Gradients of routing replicas are value parts at both ends.
    """
    if grid.children:
        return None
    devices = grid.distinct
    places: list[list[int]] = [[] for _ in range(2 + len(operand.slots))]
    for at, axis in enumerate(grid.axes):
        if axis.is_microbatch:
            devices = devices.take([0], axis=at)
        is_cut = axis.index is not None and axis.index in operand.slots
        is_value = output and (axis.index is not None or bool(axis.partial_inputs))
        is_value |= is_gradient and axis.mirror == "route"
        places[2 + operand.slots.index(axis.index) if is_cut else int(is_value)].append(at)
    order = [at for group in places for at in group]
    shape = [prod(devices.shape[at] for at in group) for group in places]
    return Layout(devices.transpose(order).reshape(shape))


@dataclass(frozen=True, slots=True)
class PathStep:
    """A step of a path: it makes `layout`, puts `moved` bytes on links, and was predicted to take `seconds`."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    layout: Layout
    moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Path:
    """The path of `count` tensors (or gradients) of `sizes` per slot from one layout to another, in several steps."""

    is_backward: bool
    sizes: tuple[int, ...]
    dtype: str
    source: Layout
    steps: tuple[PathStep, ...]
    tensors: tuple[str, ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Provenance:
    """The reason for the way of a tensor, or of its gradient (`is_backward`), and its path if that has several steps.

    `number` orders the starts of communication on all devices.
    """

    tensor: str
    is_backward: bool
    reason: str
    path: Path | None = None
    number: int = field(default=0, compare=False)
