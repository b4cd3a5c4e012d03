"""Transfers between layouts that no single collective does: the cheapest path of several steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from superscaler.ir.fold import Fold
from superscaler.ir.layout import Layout
from superscaler.ir.mask import Box, extents
from superscaler.materialize.paths import Cache, find_path
from superscaler.materialize.search import Path
from superscaler.materialize.transitions import Costs
from superscaler.schedule.transfers import Transfer

# The search grows fast with the number of devices; larger groups exchange exact messages.
MOST_DEVICES = 32


# Seconds of starting an operation and waiting for it, beside the links: an estimate, so that fewer steps are better.
START = 10e-6


@dataclass(frozen=True)
class Steps:
    """The costs of a cluster with what each step of a path costs by itself."""

    costs: Costs

    def seconds(self, kind: str, groups: Sequence[Sequence[int]], size: int) -> float:
        # A broadcast is run as messages from its sender to each receiver, of which each crosses the network.
        if kind == "broadcast":
            kind, groups = "messages", [(sender, to) for sender, *receivers in groups for to in receivers]
        return self.costs.seconds(kind, groups, size) + (0.0 if kind in ("chunk", "value_chunk") else START)


@dataclass(frozen=True, slots=True)
class Route:
    """A path, in which the tensor is the box `whole`."""

    path: Path
    whole: Box

    def boxes(self, layout: Layout) -> dict[int, Box]:
        """Return what each device of a layout has."""
        sizes = [n // k for n, k in zip(extents(self.whole), layout.shape[2], strict=True)]
        return {
            int(layout.devices[at]): tuple(
                (lo + k * n, lo + (k + 1) * n) for (lo, _), k, n in zip(self.whole, at[2:], sizes, strict=True)
            )
            for at in np.ndindex(layout.devices.shape)
        }


def route(transfer: Transfer, fold: Fold | None, costs: Costs, itemsize: int, paths: Cache) -> Route | None:
    """Return the cheapest path of a joint transfer, or None where its ends are no layouts: uneven, or several pieces on
    a device. With a fold the transfer shows only the compiled places.
    """
    held = {piece.device: piece.box for piece in transfer.pieces}
    read = {reader.device: reader.box for reader in transfer.readers}
    if not transfer.is_joint or len(held) != len(transfer.pieces) or len(read) != len(transfer.readers):
        return None
    if fold is not None and fold.spanned([*held, *read]):
        held, read = fold.extend(held), fold.extend(read)
    if len({*held, *read}) > MOST_DEVICES or len(held) == len(read) == 1:
        return None
    whole = tuple((min(lo for lo, _ in ends), max(hi for _, hi in ends)) for ends in zip(*held.values(), strict=True))
    source, goal = _layout(held, whole, 1), _layout(read, whole, 0)
    if source is None or goal is None:
        return None
    return Route(find_path(source, goal, extents(whole), itemsize, Steps(costs), paths), whole)


def _layout(boxes: Mapping[int, Box], whole: Box, many: int) -> Layout | None:
    """Return the layout of boxes that tile `whole` evenly, each on as many devices; axis `many` tells these apart."""
    starts = [sorted({box[slot][0] for box in boxes.values()}) for slot in range(len(whole))]
    shape = [len(some) for some in starts]
    cells: dict[tuple[int, ...], list[int]] = {}
    for device, box in sorted(boxes.items()):
        at = tuple(some.index(lo) for some, (lo, _) in zip(starts, box, strict=True))
        even = tuple(
            (lo + k * ((hi - lo) // n), lo + (k + 1) * ((hi - lo) // n))
            for (lo, hi), k, n in zip(whole, at, shape, strict=True)
        )
        if box != even:
            return None
        cells.setdefault(at, []).append(device)
    counts = {len(devices) for devices in cells.values()}
    if len(counts) > 1 or len(cells) != np.prod(shape, dtype=int) or len(whole) == 0:
        return None
    devices = np.array([cells[at] for at in np.ndindex(*shape)], dtype=np.int64)
    return Layout(np.expand_dims(devices.T.reshape(-1, *shape), 1 - many))
