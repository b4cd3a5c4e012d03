"""Gradients that several groups of devices make and keep: summed within a group, moved in slices, joined from them.

The gradient of a tied embedding is made by the first stage whole and by the last one in slices, in parts of its value
on every data-parallel copy, and both keep it. No single collective does that, but a few steps do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from superscaler.ir.mask import Box
from superscaler.ir.spmd import Fold
from superscaler.materialize.collectives import Match, match_boxes
from superscaler.schedule.transfers import Transfer


@dataclass(frozen=True, slots=True)
class Item:
    """A box of a gradient that devices hold after a step. `of` has per device the item that it is made of, and where
    that is: on the device itself, to which `how` has the collectives, or on another one, which sends it.
    """

    box: Box
    of: Mapping[int, tuple[int, int]]
    how: tuple[Match, ...] = ()


@dataclass(frozen=True, slots=True)
class Reduction:
    """The pieces of a transfer as items, then what is made of them, in order; `reads` has per reader what it adds up:
    pairs of an item and the device that has it.
    """

    items: tuple[Item, ...]
    reads: tuple[tuple[tuple[int, int], ...], ...]

    def level(self, n: int) -> int:
        """Return after how many steps an item is there: those of one level are made at once."""
        return max(0 if m < 0 else 1 + self.level(m) for m, _ in self.items[n].of.values())


def reduction(transfer: Transfer, close: Fold | None, fold: Fold | None) -> Reduction | None:
    """Return how to do a transfer of gradients to updates by collectives, or None where these would not help.

    `close` tells which devices correspond, `fold` of which the transfer has only the compiled places.
    """
    readers_of: dict[int, list[int]] = {}
    for p, r in transfer.links:
        readers_of.setdefault(p, []).append(r)
    steps = _Steps([Item(piece.box, {piece.device: (-1, piece.device)}) for piece in transfer.pieces], close, fold)
    classes: dict[tuple[Box, tuple[int, ...]], dict[int, int]] = {}
    for p, piece in enumerate(transfer.pieces):
        holders = classes.setdefault((piece.box, tuple(readers_of[p])), {})
        if holders.setdefault(piece.device, p) != p:
            return None
    sums = {steps.sum(box, of): set(readers) for (box, readers), of in classes.items()}
    items_of: dict[int, set[int]] = {
        r: {n for n, some in sums.items() if r in some} for r in range(len(transfer.readers))
    }
    by_box: dict[Box, list[int]] = {}
    for r, reader in enumerate(transfer.readers):
        by_box.setdefault(reader.box, []).append(r)
    for box, readers in by_box.items():
        common = [n for n in sums if sums[n].issuperset(readers) and steps.items[n].box != box]
        for group in (
            [r for r in readers if steps.holds(common, transfer.readers[r].device) is held] for held in (True, False)
        ):
            joined = steps.join(common, [transfer.readers[r].device for r in group], box) if common and group else None
            if joined is not None:
                items_of |= {r: items_of[r].difference(common) | {joined} for r in group}
    if len(steps.items) == len(transfer.pieces):
        return None
    devices = [reader.device for reader in transfer.readers]
    reads = tuple(tuple((n, steps.source(n, devices, devices[r])) for n in sorted(items_of[r])) for r in items_of)
    return Reduction(tuple(steps.items), reads)


class _Steps:
    def __init__(self, items: list[Item], close: Fold | None, fold: Fold | None) -> None:
        self.items, self.close, self.fold = items, close, fold

    def _near(self, a: int, b: int) -> int:
        return self.close.closeness(a, b) if self.close else 0

    def _extended(self, boxes: dict[int, Box]) -> dict[int, Box]:
        return self.fold.extend(boxes) if self.fold else boxes

    def _add(self, item: Item) -> int:
        self.items.append(item)
        return len(self.items) - 1

    def holds(self, numbers: Sequence[int], device: int) -> bool:
        return any(device in self.items[n].of for n in numbers)

    def sum(self, box: Box, pieces: Mapping[int, int]) -> int:
        """Return the item that is the sum of one piece per device, on all of these."""
        if len(pieces) == 1:
            return next(iter(pieces.values()))
        group = sorted(self._extended(dict.fromkeys(pieces, box)))
        return self._add(Item(box, {d: (p, d) for d, p in pieces.items()}, (Match("all_reduce", tuple(group)),)))

    def join(self, numbers: Sequence[int], devices: Sequence[int], whole: Box) -> int | None:
        """Return the item of all slices together on `devices`: each gets one slice if it has none, then all join.

        None where these devices are not as many of each slice, or the slices are no even tiling.
        """
        has = {d: max(numbers, key=lambda n: (*self._closest(n, d), -n)) for d in devices}
        lines = {d: {numbers[0]: d} for d in devices if has[d] == numbers[0]}
        for n in numbers[1:]:
            for first, line in lines.items():
                line[n] = max((d for d in devices if has[d] == n), key=lambda d: (self._near(first, d), -d), default=-1)
        used = [d for line in lines.values() for d in line.values()]
        if sorted(used) != sorted(devices):
            return None
        how = []
        for line in lines.values():
            boxes = self._extended({d: self.items[n].box for n, d in line.items()})
            found = match_boxes(boxes, dict.fromkeys(boxes, whole))
            if found is None or found.kind != "all_gather":
                return None
            how.append(found)
        moved = {n: self._moved(n, [d for d in devices if has[d] == n]) for n in numbers}
        return self._add(Item(whole, {d: (moved[has[d]], d) for d in devices}, tuple(how)))

    def _closest(self, n: int, device: int) -> tuple[bool, int]:
        held = self.items[n].of
        return device in held, max(self._near(device, d) for d in held)

    def _moved(self, n: int, devices: Sequence[int]) -> int:
        if all(d in self.items[n].of for d in devices):
            return n
        return self._add(Item(self.items[n].box, {d: (n, self.source(n, devices, d)) for d in devices}))

    def source(self, n: int, devices: Sequence[int], device: int) -> int:
        """Return which device one of several takes an item from: itself, or the closest; equals take turns."""
        owners = sorted(self.items[n].of)
        if device in owners:
            return device
        most = max(self._near(device, owner) for owner in owners)
        owners = [owner for owner in owners if self._near(device, owner) == most]
        others = sorted(d for d in devices if d not in self.items[n].of)
        return owners[others.index(device) % len(owners)]
