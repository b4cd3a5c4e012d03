"""Which parts a reader takes its data from: elements once, every addend once, the nearest replica of each.

`Held` is what parts hold of one pTensor (or of its gradient), `Wanted` what others read. Two held rows with the same
label hold the same addend of the same elements. This is the join of sections 3.1 and 3.2 of the paper, for regular
grids by arithmetic on labels, for irregular trees by taking one branch at each replication.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np

from superscaler.ir.graph import Operand
from superscaler.ir.parts import Ints, Rows, Tree
from superscaler.ir.spmd import Fold, Place


@dataclass(frozen=True)
class Wanted:
    """Boxes `lo`, `hi` [rows, slots] of a pTensor, read on `device` by `microbatch` (-1: none) [rows].

    `turns`, if not empty, says when each row is made or read: a replica that is made in time is preferred.
    """

    lo: Ints
    hi: Ints
    device: Ints
    microbatch: Ints
    turns: Sequence[float] = field(default=(), kw_only=True)

    def __len__(self) -> int:
        return len(self.device)

    def box(self, row: int) -> tuple[tuple[int, int], ...]:
        return tuple(zip(self.lo[row].tolist(), self.hi[row].tolist(), strict=True))

    def key(self) -> tuple[bytes, ...]:
        return self.lo.tobytes(), self.hi.tobytes(), self.device.tobytes(), self.microbatch.tobytes()


@dataclass(frozen=True)
class Held(Wanted):
    """What is held: `labels` say which rows are replicas of one addend; `tree` is the nesting where it is irregular.

    A `fold` tells which devices are close: of replicas elsewhere, the closest one is read.
    `all_routes`: below a routing replication all branches count (gradients of input `operand`), not one of them;
    `all_replicas`: below every replication.
    """

    labels: Sequence[Hashable]
    tree: Tree | None = None
    all_routes: bool = False
    operand: int = -1
    all_replicas: bool = False
    fold: Fold | None = None


def project(rows: Rows, operand: Operand, extents: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the boxes that parts touch of an operand: their own range on its indices, everything elsewhere."""
    lo = np.zeros((len(rows), len(extents)), dtype=np.int64)
    hi = np.tile(np.array(extents, dtype=np.int64), (len(rows), 1))
    for slot, index in enumerate(operand.slots):
        if index is not None:
            lo[:, slot], hi[:, slot] = rows.lo[:, index], rows.hi[:, index]
    return lo, hi


def join(held: Held, wanted: Wanted) -> list[list[int]]:
    """Return for each wanted row the held rows that it takes: together its elements with their whole value."""
    if held.tree is None:
        return _join_labels(held, wanted, list(range(len(held))))
    found = []
    for row in range(len(wanted)):
        near = int(wanted.device[row]), int(wanted.microbatch[row])
        late: set[int] = set()
        if held.turns and wanted.turns:
            touched = _overlapping(held, wanted, row, np.arange(len(held))).tolist()
            late = {r for r in touched if held.turns[r] >= wanted.turns[row]}
        tile = branch(held.tree, held, *near, late)
        found.append(_overlapping(held, wanted, row, np.array(tile, dtype=np.int64)).tolist())
    return found


def alternatives(held: Held, wanted: Wanted) -> list[list[list[int]]]:
    """Return for each wanted row sets of held rows: it has all it reads exactly when it has one of each.

    First in each is one that `join` takes.
    """
    taken = join(held, wanted)
    if held.tree is not None:
        found = []
        for row, sources in enumerate(taken):
            hits = set(_overlapping(held, wanted, row, np.arange(len(held))).tolist())
            sets = _clauses(held.tree, held, hits, sources)
            found.append([sorted(some, key=lambda r: (r not in sources, r)) for some in sets])
        return found
    replicas: dict[Hashable, list[int]] = {}
    labels = [(held.labels[row], held.lo[row].tobytes(), held.hi[row].tobytes()) for row in range(len(held))]
    for row, label in enumerate(labels):
        replicas.setdefault(label, []).append(row)
    return [[[s, *(r for r in replicas[labels[s]] if r != s)] for s in sources] for sources in taken]


Turn = tuple[tuple[int, int], ...]


def share_out(held: Held, wanted: Wanted, places: Sequence[Turn]) -> list[list[int]]:
    """Return for each wanted row the held rows that it takes when parts of a value share out the addends of an input.

    `places` has per wanted row, from outer to inner value axis, its coordinate and the number of parts. An addend goes
    to the coordinate of a part on a device and microbatch that hold it, or to one in turn. All parts share out the
    same tiling, so together they read every addend once.
    """
    rows = list(range(len(held))) if held.tree is None else branch(held.tree, held, -1, -1)
    tile = np.array(rows, dtype=np.int64)
    labels = [held.labels[r] for r in rows] if held.tree is None else rows
    flat = Held(held.lo[tile], held.hi[tile], held.device[tile], held.microbatch[tile], labels)
    found = _join_labels(flat, wanted, list(range(len(rows))))
    near: dict[Hashable, int] = {}
    for r, place in enumerate(places):
        for level, (coordinate, count) in enumerate(place):
            near.setdefault((place[:level], count, int(wanted.device[r]), int(wanted.microbatch[r])), coordinate)
    addends = [(label, flat.lo[r].tobytes(), flat.hi[r].tobytes()) for r, label in enumerate(labels)]
    here: dict[Hashable, list[tuple[int, int]]] = {}
    for r, addend in enumerate(addends):
        here.setdefault(addend, []).append((int(flat.device[r]), int(flat.microbatch[r])))
    if (fold := held.fold) is not None:
        # The place that tells of all decides, so that it does not depend on how devices are numbered.
        for owners in here.values():
            owners.sort(key=lambda owner: (fold.place(owner[0]), fold.base(owner[0])))
    order = {addend: n for n, addend in enumerate(here)}

    def takes(place: Turn, addend: Hashable) -> bool:
        for level, (coordinate, count) in enumerate(place):
            close = (near.get((place[:level], count, *where)) for where in here[addend])
            if next((c for c in close if c is not None), order[addend] % count) != coordinate:
                return False
        return True

    return [
        [rows[r] for r in sources if takes(place, addends[r])] for place, sources in zip(places, found, strict=True)
    ]


def _overlapping(held: Held, wanted: Wanted, row: int, rows: Ints) -> Ints:
    common = np.maximum(held.lo[rows], wanted.lo[row]) < np.minimum(held.hi[rows], wanted.hi[row])
    chosen: Ints = rows[common.all(axis=1)]
    return chosen


def _join_labels(held: Held, wanted: Wanted, rows: list[int]) -> list[list[int]]:
    classes: dict[Hashable, list[int]] = {}
    for row in rows:
        classes.setdefault((held.labels[row], held.lo[row].tobytes(), held.hi[row].tobytes()), []).append(row)
    members = list(classes.values())
    first = np.array([m[0] for m in members], dtype=np.int64)
    order = _Index(held.lo[first], held.hi[first])
    position = _positions(held, members)
    devices, micros = held.device.tolist(), held.microbatch.tolist()

    def in_time(rows: list[int], row: int) -> list[int]:
        if not held.turns or not wanted.turns:
            return rows
        return [r for r in rows if held.turns[r] < wanted.turns[row]] or rows

    found = []
    for row in range(len(wanted)):
        device, micro = int(wanted.device[row]), int(wanted.microbatch[row])
        hits = order.overlapping(wanted.lo[row], wanted.hi[row])
        found.append(
            [_nearest(in_time(members[c], row), devices, micros, device, micro, position, held.fold) for c in hits]
        )
    return found


class _Index:
    """Boxes sorted along the slot that is cut most often, so that a query looks only at its neighbourhood."""

    def __init__(self, lo: Ints, hi: Ints) -> None:
        slots = lo.shape[1] if lo.size else 0
        self.slot = max(range(slots), key=lambda s: len(np.unique(lo[:, s])), default=-1)
        self.order = np.argsort(lo[:, self.slot], kind="stable") if slots else np.arange(len(lo))
        self.lo, self.hi = lo[self.order], hi[self.order]
        self.widest = int((self.hi - self.lo)[:, self.slot].max()) if slots and len(lo) else 0

    def overlapping(self, lo: Ints, hi: Ints) -> list[int]:
        a, b = 0, len(self.order)
        if self.slot >= 0:
            starts = self.lo[:, self.slot]
            a = int(np.searchsorted(starts, lo[self.slot] - self.widest, side="right"))
            b = int(np.searchsorted(starts, hi[self.slot], side="left"))
        common = (np.maximum(self.lo[a:b], lo) < np.minimum(self.hi[a:b], hi)).all(axis=1)
        return sorted(self.order[a:b][common].tolist())


def _positions(held: Held, members: list[list[int]]) -> dict[int, int]:
    """Return for each device its place among the replicas that it belongs to: equal places pair up.

    Replicas elsewhere along a fold axis do not count, so that it is the same everywhere.
    """
    position: dict[int, int] = {}
    fold = held.fold
    for rows in members:
        devices = list(dict.fromkeys(held.device[rows].tolist()))
        count: dict[Place, int] = {}
        for device in devices if fold is None else sorted(devices, key=fold.base):
            at = () if fold is None else fold.place(device)
            position.setdefault(device, count.get(at, 0))
            count[at] = count.get(at, 0) + 1
    return position


def _nearest(
    rows: list[int],
    devices: list[int],
    micros: list[int],
    device: int,
    micro: int,
    position: dict[int, int],
    fold: Fold | None,
) -> int:
    if len(rows) == 1:
        return rows[0]
    here = [r for r in rows if devices[r] == device] or rows
    same = [r for r in here if micros[r] == micro] or here
    owners = list(dict.fromkeys(devices[r] for r in same))
    turn = max(device, 0)
    if fold is not None and len(owners) > 1:
        common = [fold.closeness(device, owner) for owner in owners]
        owners = [owner for owner, much in zip(owners, common, strict=True) if much == max(common)]
        # Read nowhere, to count each once: at the place that tells of all.
        owners.sort(key=fold.base if device >= 0 else fold.place)
        turn = fold.base(device) if device >= 0 else 0
    owner = owners[position.get(device, turn) % len(owners)]
    return next(r for r in same if devices[r] == owner)


def branch(tree: Tree, held: Held, device: int, micro: int, late: Container[int] = ()) -> list[int]:
    """Return the rows of one branch at each replication, the nearest to (device, micro) without a row in `late`."""
    if not tree.children:
        return [tree.row]
    below = [branch(child, held, device, micro, late) for child in tree.children]
    if _is_sum(tree, held):
        return [row for rows in below for row in rows]

    def close(rows: list[int]) -> tuple[bool, float, tuple[float, ...]]:
        # On average, so that many slices elsewhere are not closer than the whole that is here.
        near = sum(int(held.device[r] == device) * 2 + int(held.microbatch[r] == micro) for r in rows) / len(rows)
        return not any(r in late for r in rows), near, _distance(held, rows, device)

    return max(below, key=close)


def _distance(held: Held, rows: Sequence[int], device: int) -> tuple[float, ...]:
    """Return what is larger the closer the devices of rows are: to the place that tells of all for a read nowhere."""
    if held.fold is None:
        return ()
    if device >= 0:
        return (sum(held.fold.closeness(device, int(held.device[r])) for r in rows) / len(rows),)
    return tuple(-at for at in min(held.fold.place(int(held.device[r])) for r in rows))


def _is_sum(tree: Tree, held: Held) -> bool:
    """Tell whether all branches below a node count, not one of them."""
    shared = held.all_routes and held.operand in tree.value
    counted = tree.is_replica and (held.all_replicas or (held.all_routes and tree.mirror == "route"))
    return counted or not (tree.is_replica or shared)


# Branches of n parts in r replicas make n to the power of r sets; beyond these the branch that was taken stays.
MOST_SETS = 64


def _clauses(tree: Tree, held: Held, hits: Container[int], taken: Sequence[int]) -> list[frozenset[int]]:
    if not tree.children:
        return [frozenset((tree.row,))] if tree.row in hits else []
    below = [_clauses(child, held, hits, taken) for child in tree.children]
    if _is_sum(tree, held):
        return [some for sets in below for some in sets]
    if prod(map(len, below)) > MOST_SETS:
        within = frozenset[int]().union(*(some for sets in below for some in sets))
        return [frozenset((row,)) for row in taken if row in within]
    return [frozenset[int]().union(*sets) for sets in product(*below)]
