"""Where weights live at rest: with their optimizer op, which by default follows the ops that read the weight."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from superscaler.ir.graph import Op, PTensor
from superscaler.ir.mask import Box, extents
from superscaler.ir.parts import Axis, Grid

Place = tuple[int, Box]


def follow(op: Op, tensor: PTensor, readers: Iterable[Place]) -> Grid:
    """Return the grid of an optimizer op that lives where its weight is read, as (device, box) pairs.

    A device keeps the largest boxes that it reads: devices with boxes of one size share the weight out between them.
    Where these do not tile the weight evenly, every reading device keeps all of it, which is always right.
    """
    kept = _maximal(readers)
    by_size: dict[tuple[int, ...], list[Place]] = {}
    for device, box in kept:
        by_size.setdefault(extents(box), []).append((device, box))
    grids = [_regular(op, tensor, places) for places in by_size.values()]
    found = [grid for grid in grids if grid is not None]
    if len(found) < len(grids):
        devices = sorted({device for device, _ in kept})
        return Grid((Axis(None, (1,) * len(devices)),), np.array(devices))
    if len(found) == 1:
        return found[0]
    return Grid((Axis(None, (1,) * len(found)),), np.full(len(found), -1), dict(enumerate(found)))


def _maximal(readers: Iterable[Place]) -> list[Place]:
    by_device: dict[int, set[Box]] = {}
    for device, box in readers:
        by_device.setdefault(device, set()).add(box)
    return sorted(
        (device, box)
        for device, boxes in by_device.items()
        for box in boxes
        if not any(other != box and _contains(other, box) for other in boxes)
    )


def _contains(outer: Box, box: Box) -> bool:
    return all(a <= lo and hi <= b for (a, b), (lo, hi) in zip(outer, box, strict=True))


def _regular(op: Op, tensor: PTensor, kept: list[Place]) -> Grid | None:
    """Return a grid of splits, then one replica axis, if the boxes are a product of ranges held equally often."""
    owners: dict[Box, list[int]] = {}
    for device, box in kept:
        owners.setdefault(box, []).append(device)
    ranges = [sorted({box[slot] for box in owners}) for slot in range(len(tensor.extents))]
    counts = {len(devices) for devices in owners.values()}
    tiles = all(
        [lo for lo, _ in cuts] == [0, *(hi for _, hi in cuts[:-1])] and cuts[-1][1] == extent
        for cuts, extent in zip(ranges, tensor.extents, strict=True)
    )
    if not tiles or len(counts) != 1 or len(owners) != np.prod([len(cuts) for cuts in ranges], dtype=int):
        return None
    index_of = dict(enumerate(i for i in op.outputs[0].slots if i is not None))
    cut = [slot for slot, cuts in enumerate(ranges) if len(cuts) > 1]
    axes = [Axis(index_of[slot], tuple(hi - lo for lo, hi in ranges[slot])) for slot in cut]
    copies = counts.pop()
    shape = [len(a.sizes) for a in axes]
    devices = np.empty([*shape, copies], dtype=np.int64)
    for where in np.ndindex(*shape):
        place = dict(zip(cut, where, strict=True))
        box = tuple(cuts[place.get(slot, 0)] for slot, cuts in enumerate(ranges))
        devices[where] = owners[box]
    return Grid((*axes, Axis(None, (1,) * copies)), devices)
