"""Transfers between layouts that need several collectives: the cheapest path of steps."""

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from superscaler.cluster import Cluster
from superscaler.cluster.seconds import LOCAL_KINDS
from superscaler.ir import layout as notes
from superscaler.ir.fold import Fold
from superscaler.ir.layout import Layout
from superscaler.ir.mask import Box, extents
from superscaler.ir.model import width
from superscaler.materialize.rvd.search import Cache, Path, find_path
from superscaler.materialize.rvd.spread import spread
from superscaler.materialize.rvd.transitions import Costs
from superscaler.schedule.transfers import Transfer

# The search grows fast with the number of devices; larger groups exchange exact messages, if no closed form fits.
MOST_DEVICES = 32
# So many devices take a closed form where one fits, without a search.
MANY_DEVICES = 16
# Seconds to start an operation and wait for it, besides the links: an estimate, so that fewer steps are better.
START = 10e-6


@dataclass(frozen=True)
class Steps:
    """The costs of a cluster, with the fixed cost of each step of a path."""

    costs: Costs

    def seconds(self, kind: str, groups: Sequence[Sequence[int]], size: int) -> float:
        return self.costs.seconds(kind, groups, size) + (0.0 if kind in LOCAL_KINDS else START)


@dataclass(frozen=True)
class ServerCosts(Steps):
    """Costs that depend on the server of a device only: its servers have one NIC, or one for each device."""

    devices_per_server: int

    def place(self, device: int) -> int:
        return device // self.devices_per_server


def priced(costs: Costs) -> Steps:
    """Return the costs of paths."""
    if isinstance(costs, Cluster) and costs.links.nics in (None, 1, costs.devices_per_server):
        return ServerCosts(costs, costs.devices_per_server)
    return Steps(costs)


@dataclass(frozen=True, slots=True)
class Route:
    """A path, in which the tensor is the box `whole`."""

    path: Path
    whole: Box

    def boxes(self, layout: Layout) -> dict[int, Box]:
        """Return the box of each device of a layout."""
        tiles = _tiles(self.whole, layout.shape[2])
        return dict(zip(layout.devices.ravel().tolist(), itertools.cycle(tiles), strict=False))

    def described(self, dtype: str, is_backward: bool) -> notes.Path:
        """Return the path as data, with the bytes that each step puts on links."""
        steps = (notes.PathStep(s.kind, s.groups, s.layout, width(dtype) * s.moved, s.seconds) for s in self.path.steps)
        return notes.Path(is_backward, extents(self.whole), dtype, self.path.source, tuple(steps))


def route(transfer: Transfer, fold: Fold | None, costs: Costs, itemsize: int, paths: Cache) -> Route | None:
    """Return the cheapest path of a transfer whose readers all need the whole tensor. None if its ends are no layouts
    (uneven, or several pieces on a device). With a fold the transfer shows the sampled places only.
    """
    held = {piece.device: piece.box for piece in transfer.pieces}
    read = {reader.device: reader.box for reader in transfer.readers}
    is_whole = transfer.is_joint or bool(transfer.classes)
    if not is_whole or len(held) != len(transfer.pieces) or len(read) != len(transfer.readers):
        return None
    numbers = transfer.classes or range(len(transfer.pieces))
    classes: dict[int, Hashable] = dict(zip(held, numbers, strict=True))
    if fold is not None and fold.spanned([*held, *read]):
        held, read, classes = fold.extend(held), fold.extend(read), fold.extend_classes(classes)
    if len(held) == len(read) == 1:
        return None
    whole = tuple((min(lo for lo, _ in ends), max(hi for _, hi in ends)) for ends in zip(*held.values(), strict=True))
    source, goal = _layout(held, whole, classes), _layout(read, whole, {})
    if source is None or goal is None:
        return None
    count, sizes, prices = len({*held, *read}), extents(whole), priced(costs)
    path = spread(source, goal, sizes, itemsize, prices) if count > MANY_DEVICES else None
    if path is None and count <= MOST_DEVICES:
        path = find_path(source, goal, sizes, itemsize, prices, paths)
    return None if path is None else Route(path, whole)


def _layout(boxes: Mapping[int, Box], whole: Box, classes: Mapping[int, Hashable]) -> Layout | None:
    """Return the layout of boxes that tile `whole` evenly, None for other boxes.

    An even tiling has as many value parts in each box, and as many devices in each value part. Devices of one class
    hold the same part; without classes all are replicas.
    """
    cells: dict[Box, dict[Hashable, list[int]]] = {}
    for device, box in sorted(boxes.items()):
        cells.setdefault(box, {}).setdefault(classes.get(device), []).append(device)
    shape = [len({box[slot] for box in cells}) for slot in range(len(whole))]
    is_even = all((hi - lo) % k == 0 for (lo, hi), k in zip(whole, shape, strict=True))
    tiles = _tiles(whole, shape)
    counts = {(len(devices), len(cell)) for cell in cells.values() for devices in cell.values()}
    if not is_even or len(counts) > 1 or set(tiles) != cells.keys() or not shape:
        return None
    # [cells, value parts, replicas]
    devices = np.array([list(cells[box].values()) for box in tiles], dtype=np.int64)
    return Layout(devices.T.reshape(*devices.T.shape[:2], *shape))


def _tiles(whole: Box, parts: Sequence[int]) -> list[Box]:
    """Return the boxes of a box that is cut into equal parts; the last slot is fastest."""
    each = [
        [(lo + (hi - lo) // k * i, lo + (hi - lo) // k * (i + 1)) for i in range(k)]
        for (lo, hi), k in zip(whole, parts, strict=True)
    ]
    return list(itertools.product(*each))
