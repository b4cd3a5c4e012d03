"""Boxes of elements and addends, of all devices of a cohort at once, and whether they cover a region once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superscaler.ir.grid import Ints
from superscaler.remembered import Arrays, remembered


@dataclass(frozen=True, eq=False)
class Boxes(Arrays):
    """Boxes of each device of a cohort: `shapes` [1 or devices, boxes, columns, 2], moved on device n by `at[n]` of
    `at` [devices, columns].

    Usually one row of shapes serves all devices, so the work does not grow with their number.
    """

    at: Ints
    shapes: Ints

    @staticmethod
    @remembered
    def of(boxes: Ints) -> Boxes:
        """Return boxes [devices, boxes, columns, 2]."""
        at = boxes[:, 0, :, 0] if boxes.shape[1] else np.zeros((len(boxes), boxes.shape[2]), dtype=np.int64)
        shapes = boxes - at[:, None, :, None]
        return Boxes(at, shapes[:1] if (shapes == shapes[:1]).all() else shapes)

    def __len__(self) -> int:
        return int(self.shapes.shape[1])

    @property
    def whole(self) -> Ints:
        return self.shapes + self.at[:, None, :, None]

    @remembered
    def rows(self, rows: NDArray[Any]) -> Boxes:
        return Boxes(self.at[rows], self.shapes if len(self.shapes) == 1 else self.shapes[rows])

    def near(self, region: Ints) -> Ints:
        """Return a box [devices, columns, 2] in the coordinates of the shapes: [1 or devices, columns, 2]."""
        found: Ints = region - self.at[:, : region.shape[1], None]
        return found[:1] if len(self.shapes) == 1 and (found == found[:1]).all() else found


def joined(parts: Sequence[Boxes]) -> Boxes:
    """Return the boxes of all parts; boxes that together make one box on all devices are joined."""
    return parts[0] if len(parts) == 1 else _all_joined(*parts)


@remembered
def _all_joined(*parts: Boxes) -> Boxes:
    at = parts[0].at
    moved = np.stack([part.at for part in parts], axis=1) - at[:, None]
    if (moved == moved[:1]).all():
        moved = moved[:1]
    shapes = np.concatenate(_with_equal_rows([part.shapes for part in parts]), axis=1)
    return _packed(at, _merged(shapes + np.repeat(moved, list(map(len, parts)), axis=1)[..., None]))


def _with_equal_rows(rows: Sequence[Ints]) -> Sequence[Ints]:
    """Return arrays broadcast to the number of rows of the longest."""
    counts = set(map(len, rows))
    return rows if len(counts) == 1 else [np.broadcast_to(some, (max(counts), *some.shape[1:])) for some in rows]


def _packed(at: Ints, shapes: Ints) -> Boxes:
    found = Boxes(at, shapes)
    return found if len(shapes) == 1 else Boxes.of(found.whole)


def _merged(boxes: Ints) -> Ints:
    if boxes.shape[1] < 2:
        return boxes
    if len(boxes) > 1 or boxes.dtype != np.int64:
        return _merge(boxes)
    return _merged_bytes(boxes.tobytes(), boxes.shape)


@lru_cache(1 << 12)
def _merged_bytes(boxes: bytes, shape: tuple[int, ...]) -> Ints:
    # Layers and microbatches repeat a few shapes.
    return _merge(np.frombuffer(boxes, dtype=np.int64).reshape(shape))


def _merge(boxes: Ints) -> Ints:
    while boxes.shape[1] > 1:
        before = boxes.shape[1]
        for axis in np.flatnonzero((boxes[0] != boxes[0, :1]).any(axis=(0, 2))).tolist():
            boxes = _joined(boxes, axis)
        if boxes.shape[1] == before:
            return _without_empty(boxes)
    return boxes


def _joined(boxes: Ints, axis: int) -> Ints:
    """Join boxes that follow each other along an axis and are equal on all others."""
    first = boxes[0]
    others = np.delete(first, axis, axis=1).reshape(len(first), -1)
    order = np.lexsort((first[:, axis, 0], *others.T))
    ordered = boxes[:, order]
    a, b = ordered[:, :-1], ordered[:, 1:]
    same = (a == b).all(axis=3)
    same[:, :, axis] = a[:, :, axis, 1] == b[:, :, axis, 0]
    follows = same.all(axis=(0, 2))
    if not follows.any():
        return boxes
    starts = np.flatnonzero(np.concatenate([[True], ~follows]))
    ends = np.concatenate([starts[1:], [len(order)]]) - 1
    found: Ints = ordered[:, starts].copy()
    found[:, :, axis, 1] = ordered[:, ends][:, :, axis, 1]
    return found


def _without_empty(boxes: Ints) -> Ints:
    kept = (boxes[..., 0] < boxes[..., 1]).all(axis=2).any(axis=0)
    return boxes if kept.all() else boxes[:, kept]


@remembered
def clipped(boxes: Boxes, box: Ints) -> Boxes:
    """Return the boxes inside a box [devices, columns, 2] of their first columns, without boxes that are empty
    everywhere.
    """
    shapes, region = _with_equal_rows([boxes.shapes, boxes.near(box)[:, None]])
    found, count = shapes.copy(), region.shape[2]
    found[:, :, :count, 0] = np.maximum(found[:, :, :count, 0], region[..., 0])
    found[:, :, :count, 1] = np.minimum(found[:, :, :count, 1], region[..., 1])
    found[..., 1] = found.max(axis=-1)
    return _packed(boxes.at, _without_empty(found))


@remembered
def is_tiled(boxes: Boxes, region: Ints) -> NDArray[np.bool_]:
    """Return, for each device, whether boxes inside a region [devices, columns, 2] cover each point of it once."""
    shapes, near = _with_equal_rows([_merged(boxes.shapes), boxes.near(region)])
    if shapes.shape[1] == 1:
        found = (shapes[:, 0] == near).all(axis=(1, 2))
    else:
        found = np.array([_tiles(*each) for each in zip(shapes, near, strict=True)])
    return np.broadcast_to(found, len(region))


def _tiles(boxes: Ints, region: Ints) -> bool:
    boxes = boxes[(boxes[..., 0] < boxes[..., 1]).all(axis=1)]
    boxes = _merged(boxes[None])[0] if len(boxes) else boxes
    if (region[:, 0] >= region[:, 1]).any():
        return not len(boxes)
    if len(boxes) < 2:
        return len(boxes) == 1 and np.array_equal(boxes[0], region)
    sizes = (boxes[..., 1] - boxes[..., 0]).astype(object).prod(axis=1).sum()
    if sizes != (region[:, 1] - region[:, 0]).astype(object).prod():
        return False
    order = np.argsort(boxes[:, 0, 0], kind="stable") if boxes.shape[1] else np.arange(len(boxes))
    boxes = boxes[order]
    for n in range(len(boxes) - 1):
        rest = boxes[n + 1 :]
        common = np.maximum(rest[..., 0], boxes[n, :, 0]) < np.minimum(rest[..., 1], boxes[n, :, 1])
        if common.all(axis=1).any():
            return False
    return True


@remembered
def is_tiled_everywhere(boxes: Boxes, region: Ints) -> bool:
    return bool(is_tiled(boxes, region).all())


@remembered
def one_each(box: Ints, *more: Ints) -> Boxes:
    """Return one box of each device, [devices, slots, 2]; `more` appends slots."""
    return Boxes.of(np.concatenate([box, *more], axis=1)[:, None])


@remembered
def region_of(box: Ints, sizes: tuple[int, ...]) -> Ints:
    """Return boxes [devices, slots, 2] with more columns, whole ones of these sizes."""
    rest = np.zeros((len(box), len(sizes), 2), dtype=np.int64)
    rest[..., 1] = sizes
    return np.concatenate([box, rest], axis=1)


@remembered
def taken(box: Ints, rows: Ints) -> Ints:
    """Return rows of boxes."""
    found: Ints = box[rows]
    return found


@remembered
def lengths_of(box: Ints) -> tuple[int, ...]:
    """Return the sizes of boxes [devices, slots, 2] along each slot, equal on all devices."""
    return tuple((box[0, :, 1] - box[0, :, 0]).tolist())


def first_fault(boxes: Ints, region: Ints) -> tuple[Ints, int]:
    """Return the first cell of a region [columns, 2] that boxes [boxes, columns, 2] do not cover once, and how often
    they do.
    """
    cuts = [
        np.unique(np.clip(np.concatenate([boxes[:, c].reshape(-1), region[c]]), *region[c])) for c in range(len(region))
    ]
    for lower in product(*(range(max(len(cut) - 1, 1)) for cut in cuts)):
        cell = np.array([cut[[at, min(at + 1, len(cut) - 1)]] for cut, at in zip(cuts, lower, strict=True)])
        cell = cell.reshape(len(region), 2)
        covers = (boxes[..., 0] <= cell[:, 0]) & (boxes[..., 1] >= cell[:, 1])
        if (count := int(covers.all(axis=1).sum())) != 1:
            return cell, count
    return region, 1
