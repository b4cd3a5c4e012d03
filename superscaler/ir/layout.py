"""Layouts: how one tensor lies on devices, R(i)V(j)D(k1..kn), with the device order. One line that parses back."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import numpy as np

from superscaler.errors import InputError
from superscaler.ir.graph import Operand
from superscaler.ir.parts import Grid, Ints

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

    def __str__(self) -> str:
        replicas, values, dims = self.shape
        return f"R({replicas})V({values})D({','.join(map(str, dims))}) @ {json.dumps(self.devices.tolist())}"

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


def layout_of(grid: Grid, operand: Operand, output: bool) -> Layout | None:
    """Return the layout of an operand over a regular grid, microbatches left out; None for irregular grids.

    An axis that cuts an index of the operand is a D axis; any other cut makes value parts of an output, and replicas
    of an input.
    """
    if grid.children:
        return None
    devices, axes = grid.devices, list(grid.axes)
    for at in [k for k, axis in enumerate(axes) if axis.is_microbatch][::-1]:
        devices, axes = np.asarray(devices.take(0, axis=at)), axes[:at] + axes[at + 1 :]
    places: list[list[int]] = [[] for _ in range(2 + len(operand.slots))]
    for at, axis in enumerate(axes):
        if axis.index is not None and axis.index in operand.slots:
            places[2 + operand.slots.index(axis.index)].append(at)
        else:
            places[1 if axis.index is not None and output else 0].append(at)
    order = [at for group in places for at in group]
    shape = [int(np.prod([len(axes[at].sizes) for at in group], dtype=int)) for group in places]
    return Layout(devices.transpose(order).reshape(shape))
