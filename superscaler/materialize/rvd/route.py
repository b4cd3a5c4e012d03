"""Transfers between layouts that no single collective does: the cheapest path of several steps."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from superscaler.cluster import Cluster
from superscaler.cluster.seconds import LOCAL_KINDS
from superscaler.ir import provenance as notes
from superscaler.ir.fold import Fold
from superscaler.ir.layout import Layout
from superscaler.ir.mask import Box, extents, intersect
from superscaler.ir.model import width
from superscaler.ir.program import links
from superscaler.materialize.collectives import REASONS
from superscaler.materialize.rvd.paths import Cache, find_path
from superscaler.materialize.rvd.search import Path
from superscaler.materialize.rvd.transitions import Costs, Step
from superscaler.schedule.transfers import Transfer

# The search grows fast with the number of devices; larger groups exchange exact messages.
MOST_DEVICES = 32
# Seconds to start an operation and wait for it, besides the links: an estimate, so that fewer steps are better.
START = 10e-6


@dataclass(frozen=True)
class Steps:
    """The costs of a cluster, with the fixed cost of each step of a path."""

    costs: Costs

    def seconds(self, kind: str, groups: Sequence[Sequence[int]], size: int) -> float:
        # A broadcast runs as messages from its sender to each receiver, and each message crosses the network.
        if kind == "broadcast":
            kind, groups = "messages", [(sender, to) for sender, *receivers in groups for to in receivers]
        return self.costs.seconds(kind, groups, size) + (0.0 if kind in LOCAL_KINDS else START)


@dataclass(frozen=True)
class Places(Steps):
    """The costs of a cluster whose servers have one NIC, or one for each device: they depend on the server of a device
    only.
    """

    devices_per_server: int

    def place(self, device: int) -> int:
        return device // self.devices_per_server


def priced(costs: Costs) -> Steps:
    """Return the costs of paths."""
    if isinstance(costs, Cluster) and costs.links.nics in (None, 1, costs.devices_per_server):
        return Places(costs, costs.devices_per_server)
    return Steps(costs)


@dataclass(frozen=True, slots=True)
class Route:
    """A path, in which the tensor is the box `whole`."""

    path: Path
    whole: Box

    def boxes(self, layout: Layout) -> dict[int, Box]:
        """Return the box of each device of a layout."""
        sizes = [n // k for n, k in zip(extents(self.whole), layout.shape[2], strict=True)]
        return {
            int(layout.devices[at]): tuple(
                (lo + k * n, lo + (k + 1) * n) for (lo, _), k, n in zip(self.whole, at[2:], sizes, strict=True)
            )
            for at in np.ndindex(layout.devices.shape)
        }

    def described(self, dtype: str, is_backward: bool) -> notes.Path:
        """Return the path as data, with the bytes that each step puts on links."""
        layouts = [self.path.source, *(step.layout for step in self.path.steps)]
        boxes = [self.boxes(layout) for layout in layouts]
        steps = (
            notes.PathStep(s.kind, s.groups, s.layout, width(dtype) * _elements(s, before, after), s.seconds)
            for s, before, after in zip(self.path.steps, boxes[:-1], boxes[1:], strict=True)
        )
        return notes.Path(is_backward, extents(self.whole), dtype, self.path.source, tuple(steps))


def is_collective(kind: str) -> bool:
    """Return whether a step of a path is one collective per group; else it is local, or messages from the first."""
    return kind in REASONS and kind not in ("broadcast", "rd_gather")


def _elements(step: Step, before: Mapping[int, Box], after: Mapping[int, Box]) -> int:
    """Return the number of elements that a step puts on links."""
    if step.kind in LOCAL_KINDS:
        return 0
    if is_collective(step.kind):
        return sum(prod(extents(before[group[0]])) * links(step.kind, len(group)) for group in step.groups)
    common = (intersect(before[group[0]], after[to]) for group in step.groups for to in group[1:])
    return sum(prod(extents(box)) for box in common if box is not None)


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
    if len({*held, *read}) > MOST_DEVICES or len(held) == len(read) == 1:
        return None
    whole = tuple((min(lo for lo, _ in ends), max(hi for _, hi in ends)) for ends in zip(*held.values(), strict=True))
    source, goal = _layout(held, whole, classes), _layout(read, whole, {})
    if source is None or goal is None:
        return None
    return Route(find_path(source, goal, extents(whole), itemsize, priced(costs), paths), whole)


def _layout(boxes: Mapping[int, Box], whole: Box, classes: Mapping[int, Hashable]) -> Layout | None:
    """Return the layout of boxes that tile `whole` evenly, or None: all boxes have equally many value parts, and these
    equally many devices. Devices of one class hold the same part; without classes all are replicas.
    """
    starts = [sorted({box[slot][0] for box in boxes.values()}) for slot in range(len(whole))]
    shape = [len(some) for some in starts]
    if any((hi - lo) % n for (lo, hi), n in zip(whole, shape, strict=True)):
        return None
    cells: dict[tuple[int, ...], dict[Hashable, list[int]]] = {}
    for device, box in sorted(boxes.items()):
        at = tuple(some.index(lo) for some, (lo, _) in zip(starts, box, strict=True))
        even = tuple(
            (lo + k * ((hi - lo) // n), lo + (k + 1) * ((hi - lo) // n))
            for (lo, hi), k, n in zip(whole, at, shape, strict=True)
        )
        if box != even:
            return None
        cells.setdefault(at, {}).setdefault(classes.get(device), []).append(device)
    counts = {(len(devices), len(cell)) for cell in cells.values() for devices in cell.values()}
    if len(counts) > 1 or len(cells) != np.prod(shape, dtype=int) or not shape:
        return None
    # [cells, value parts, replicas]
    devices = np.array([list(cells[at].values()) for at in np.ndindex(*shape)], dtype=np.int64)
    return Layout(devices.T.reshape(*devices.T.shape[:2], *shape))
