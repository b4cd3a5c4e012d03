"""Joins: the parts that a reader takes its data from, with every element and addend once, from the nearest replica.

`Produced` lists the portions of one pTensor (or of its gradient) that parts produce, `Required` those that parts
require. Two produced rows with the same label hold the same addend of the same elements. Regular grids are joined by
arithmetic on labels, irregular trees by taking one branch at each replication. Source: sections 3.1 and 3.2 of the
paper.
"""

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, pairwise, product
from math import prod

import numpy as np

from superscaler.groups import group_by
from superscaler.ir.fold import Coordinate, Fold
from superscaler.ir.grid import HOSTS, Ints
from superscaler.ir.model import Operand
from superscaler.ir.parts import Rows, Tree


@dataclass(frozen=True, eq=False)
class Required:
    """Boxes `lo`, `hi` [rows, slots] of a pTensor, read on `device` by `microbatch` (-1: none) [rows]. It is compared
    by identity: `Dataflow` makes one for all operands that are cut alike.

    `turns`: the time at which each row is made or read, if not empty; replicas made in time are preferred.
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

    def columns(self, rows: Ints | slice = slice(None)) -> tuple[Ints, Ints, Ints, Ints]:
        return self.lo[rows], self.hi[rows], self.device[rows], self.microbatch[rows]

    @cached_property
    def at(self) -> list[tuple[int, int]]:
        """Return (device, microbatch) for each row."""
        return list(zip(self.device.tolist(), self.microbatch.tolist(), strict=True))

    @cached_property
    def _corners(self) -> list[bytes]:
        both = np.concatenate([self.lo, self.hi], axis=1, dtype=np.int64)
        width, data = both.shape[1] * both.itemsize, both.tobytes()
        return [data[row * width : (row + 1) * width] for row in range(len(both))]

    def corners(self, row: int) -> bytes:
        """Return a key that is equal for rows of equal boxes."""
        return self._corners[row]


@dataclass(frozen=True, eq=False)
class Produced(Required):
    """Boxes that are held. `labels`: rows with equal labels are replicas of one addend. `tree`: the nesting, if
    irregular.

    `fold`: of replicas on other devices, the closest one is read. `all_routes`: below a routing replication all
    branches count (gradients of input `operand`). `all_replicas`: below every replication all branches count.
    """

    labels: Sequence[Hashable]
    tree: Tree | None = None
    all_routes: bool = False
    operand: int = -1
    all_replicas: bool = False
    fold: Fold | None = None

    def replicas(self, rows: Iterable[int]) -> dict[Hashable, list[int]]:
        """Return rows grouped by addend and box: the rows of a group are replicas."""
        return group_by(rows, lambda row: (self.labels[row], self.corners(row)))

    @cached_property
    def whole(self) -> list[int]:
        """Return rows that make the whole tensor together, each element once."""
        nowhere = np.full(1, -1, dtype=np.int64)
        everything = Required(self.lo.min(0, keepdims=True), self.hi.max(0, keepdims=True), nowhere, nowhere)
        return join(self, everything)[0]


def project(rows: Rows, operand: Operand, extents: Sequence[int]) -> tuple[Ints, Ints]:
    """Return the boxes of an operand that parts touch: their own range on its indices, everything elsewhere."""
    lo = np.zeros((len(rows), len(extents)), dtype=np.int64)
    hi = np.tile(np.array(extents, dtype=np.int64), (len(rows), 1))
    for slot, index in enumerate(operand.slots):
        if index is not None:
            lo[:, slot], hi[:, slot] = rows.lo[:, index], rows.hi[:, index]
    return lo, hi


def join(produced: Produced, required: Required) -> list[list[int]]:
    """Return, for each required row, the produced rows that it takes: together its elements with their whole value."""
    if produced.tree is None:
        return _join_labels(produced, required)
    found = []
    for row in range(len(required)):
        late: set[int] = set()
        if produced.turns and required.turns:
            touched = _overlapping(produced, required, row, np.arange(len(produced))).tolist()
            late = {r for r in touched if produced.turns[r] >= required.turns[row]}
        tile = branch(produced.tree, produced, *required.at[row], late)
        found.append(_overlapping(produced, required, row, np.array(tile, dtype=np.int64)).tolist())
    return found


def alternatives(produced: Produced, required: Required) -> list[list[list[int]]]:
    """Return, for each required row, sets of produced rows: the row is complete when it has one row of each set.

    The first row of each set is one that `join` takes.
    """
    taken = join(produced, required)
    if produced.tree is not None:
        found = []
        for row, sources in enumerate(taken):
            hits = set(_overlapping(produced, required, row, np.arange(len(produced))).tolist())
            sets = _clauses(produced.tree, produced, hits, sources)
            found.append([sorted(some, key=lambda r: (r not in sources, r)) for some in sets])
        return found
    same = {row: rows for rows in produced.replicas(range(len(produced))).values() for row in rows}
    return [[[s, *(r for r in same[s] if r != s)] for s in sources] for sources in taken]


Turn = tuple[tuple[int, int], ...]


def share_out(produced: Produced, required: Required, places: Sequence[Turn]) -> list[list[int]]:
    """Return, for each required row, the produced rows that it takes when parts share out the addends of an input.

    `places` has, for each required row, its coordinate and the number of parts, from outer to inner value axis. An
    addend goes to the coordinate of a part on a device and microbatch that hold it, else to that of its microbatch,
    else in turn: of its microbatch where parts are of one. All parts share out the same tiling, so together they read
    every addend once.
    """
    rows = list(range(len(produced))) if produced.tree is None else branch(produced.tree, produced, -1, -1)
    tile = np.array(rows, dtype=np.int64)
    labels = [produced.labels[r] for r in rows] if produced.tree is None else rows
    flat = Produced(*produced.columns(tile), labels)
    found = _join_labels(flat, required)
    near: dict[Hashable, int] = {}
    of_microbatch: dict[Hashable, set[int]] = {}
    for place, at in zip(places, required.at, strict=True):
        for level, (coordinate, parts) in enumerate(place):
            near.setdefault((place[:level], parts, *at), coordinate)
            of_microbatch.setdefault((place[:level], parts, at[1]), set()).add(coordinate)
    addends = list(flat.replicas(range(len(rows))).values())
    here = [[flat.at[r] for r in some] for some in addends]
    if (fold := produced.fold) is not None:
        # Order by fold place first, so that the result does not depend on how devices are numbered.
        for owners in here:
            owners.sort(key=lambda owner: (fold.place(owner[0]), fold.base(owner[0])))
    number = {r: n for n, some in enumerate(addends) for r in some}
    microbatch = [owners[0][1] for owners in here]
    turns: dict[int, count[int]] = defaultdict(count)
    turn = [next(turns[own]) for own in microbatch]

    def taker(above: Turn, parts: int, n: int) -> int:
        close = (near.get((above, parts, *where)) for where in here[n])
        own = of_microbatch.get((above, parts, microbatch[n]), set())
        in_turn = min(own) if len(own) == 1 else (turn[n] if own else n) % parts
        return next((c for c in close if c is not None), in_turn)

    def takes(place: Turn, n: int) -> bool:
        return all(taker(place[:level], parts, n) == at for level, (at, parts) in enumerate(place))

    pairs = zip(places, found, strict=True)
    return [[rows[r] for r in sources if takes(place, number[r])] for place, sources in pairs]


def _overlapping(produced: Produced, required: Required, row: int, rows: Ints) -> Ints:
    common = np.maximum(produced.lo[rows], required.lo[row]) < np.minimum(produced.hi[rows], required.hi[row])
    chosen: Ints = rows[common.all(axis=1)]
    return chosen


def _join_labels(produced: Produced, required: Required) -> list[list[int]]:
    members = list(produced.replicas(range(len(produced))).values())
    first = np.array([m[0] for m in members], dtype=np.int64)
    order = _Index(produced.lo[first], produced.hi[first])
    position = _positions(produced, members)
    by_device = [_by_device(produced, rows) for rows in members]

    def nearest(c: int, row: int, near: tuple[int, int]) -> int:
        rows, of = members[c], by_device[c]
        if produced.turns and required.turns:
            rows = [r for r in rows if produced.turns[r] < required.turns[row]] or rows
            of = _by_device(produced, rows)
        return _nearest(produced, rows, of, near, position)

    # Many rows want the same box.
    box_of = {required.corners(row): row for row in reversed(range(len(required)))}
    boxes = np.array(list(box_of.values()), dtype=np.int64)
    hits = dict(zip(box_of, order.overlapping(required.lo[boxes], required.hi[boxes]), strict=True))
    return [[nearest(c, row, near) for c in hits[required.corners(row)]] for row, near in enumerate(required.at)]


def _by_device(produced: Produced, rows: list[int]) -> dict[int, list[int]]:
    return group_by(rows, lambda row: produced.at[row][0])


# The most pairs of boxes that are compared at once.
MOST_PAIRS = 1 << 20


class _Index:
    """An index of boxes, sorted along the slot with the most cuts, so that a query looks at its neighbourhood only."""

    def __init__(self, lo: Ints, hi: Ints) -> None:
        slots = lo.shape[1] if lo.size else 0
        self.slot = max(range(slots), key=lambda s: len(np.unique(lo[:, s])), default=-1)
        self.order = np.argsort(lo[:, self.slot], kind="stable") if slots else np.arange(len(lo))
        self.lo, self.hi = lo[self.order], hi[self.order]
        self.widest = int((self.hi - self.lo)[:, self.slot].max()) if slots and len(lo) else 0

    def overlapping(self, lo: Ints, hi: Ints) -> list[list[int]]:
        """Return, for each of some boxes [boxes, slots], the indexed ones that it meets."""
        many = max(1, MOST_PAIRS // max(1, len(self.order)))
        return [
            own for at in range(0, len(lo), many) for own in self._overlapping(lo[at : at + many], hi[at : at + many])
        ]

    def _overlapping(self, lo: Ints, hi: Ints) -> list[list[int]]:
        first, size = np.zeros(len(lo), dtype=np.int64), np.full(len(lo), len(self.order))
        if self.slot >= 0:
            starts = self.lo[:, self.slot]
            first = np.searchsorted(starts, lo[:, self.slot] - self.widest, side="right")
            size = np.maximum(np.searchsorted(starts, hi[:, self.slot], side="left") - first, 0)
        # The pairs of a box and an indexed one in its neighbourhood.
        box = np.repeat(np.arange(len(lo)), size)
        at = np.arange(len(box)) + np.repeat(first - (np.cumsum(size) - size), size)
        meets = (np.maximum(self.lo[at], lo[box]) < np.minimum(self.hi[at], hi[box])).all(axis=1)
        box, at = box[meets], self.order[at[meets]]
        found, ends = at[np.lexsort((at, box))].tolist(), np.cumsum(np.bincount(box, minlength=len(lo))).tolist()
        return [found[start:end] for start, end in pairwise([0, *ends])]


def _positions(produced: Produced, members: list[list[int]]) -> dict[int, int]:
    """Return, for each device, its position among replicas: equal positions of readers and holders pair up.

    Replicas elsewhere along a fold axis do not count, so that the result is the same at every place.
    """
    position: dict[int, int] = {}
    fold = produced.fold
    for rows in members:
        devices = dict.fromkeys(produced.device[rows].tolist())
        if devices.keys() <= position.keys():
            continue
        count: dict[Coordinate, int] = {}
        for device in devices if fold is None else sorted(devices, key=fold.base):
            at = () if fold is None else fold.place(device)
            position.setdefault(device, count.get(at, 0))
            count[at] = count.get(at, 0) + 1
    return position


def _nearest(
    produced: Produced,
    rows: list[int],
    by_device: dict[int, list[int]],
    near: tuple[int, int],
    position: dict[int, int],
) -> int:
    """Return the nearest of replicas, which are also given by their device."""
    if len(rows) == 1:
        return rows[0]
    (device, micro), fold = near, produced.fold
    here = by_device.get(device) or by_device.get(device ^ HOSTS) or rows
    same = [r for r in here if produced.at[r][1] == micro] or here
    owners = list(dict.fromkeys(produced.at[r][0] for r in same))
    turn = max(device, 0)
    if fold is not None and len(owners) > 1:
        common = [fold.closeness(device, owner) for owner in owners]
        owners = [owner for owner, much in zip(owners, common, strict=True) if much == max(common)]
        # A read without a device counts each addend once, at the sampled place.
        owners.sort(key=fold.base if device >= 0 else fold.place)
        turn = fold.base(device) if device >= 0 else 0
    owner = owners[position.get(device, turn) % len(owners)]
    return next(r for r in same if produced.at[r][0] == owner)


def branch(tree: Tree, produced: Produced, device: int, micro: int, late: Container[int] = ()) -> list[int]:
    """Return the rows of one branch at each replication: the nearest to (device, micro) without a row in `late`."""
    if not tree.children:
        return [tree.row]
    below = [branch(child, produced, device, micro, late) for child in tree.children]
    if _is_sum(tree, produced):
        return [row for rows in below for row in rows]

    def close(rows: list[int]) -> tuple[bool, float, tuple[float, ...]]:
        # The average, so that many slices elsewhere are not closer than the whole tensor here.
        near = sum((produced.at[r][0] == device) * 2 + (produced.at[r][1] == micro) for r in rows) / len(rows)
        return not any(r in late for r in rows), near, _distance(produced, rows, device)

    return max(below, key=close)


def _distance(produced: Produced, rows: Sequence[int], device: int) -> tuple[float, ...]:
    """Return a sort key: larger means nearer to `device`. A read without a device is ranked by distance to the sampled
    place.
    """
    if produced.fold is None:
        return ()
    if device >= 0:
        return (sum(produced.fold.closeness(device, produced.at[r][0]) for r in rows) / len(rows),)
    return tuple(-at for at in min(produced.fold.place(produced.at[r][0]) for r in rows))


def _is_sum(tree: Tree, produced: Produced) -> bool:
    """Return whether all branches below a node count, not just one."""
    shared = produced.all_routes and produced.operand in tree.partial_inputs
    counted = tree.is_replica and (produced.all_replicas or (produced.all_routes and tree.mirror == "route"))
    return counted or not (tree.is_replica or shared)


# Branches of n parts in r replicas make n^r sets; with more than these, only the branch that was taken counts.
MOST_SETS = 64


def _clauses(tree: Tree, produced: Produced, hits: Container[int], taken: Sequence[int]) -> list[frozenset[int]]:
    if not tree.children:
        return [frozenset((tree.row,))] if tree.row in hits else []
    below = [_clauses(child, produced, hits, taken) for child in tree.children]
    if _is_sum(tree, produced):
        return [some for sets in below for some in sets]
    if prod(map(len, below)) > MOST_SETS:
        within = frozenset[int]().union(*(some for sets in below for some in sets))
        return [frozenset((row,)) for row in taken if row in within]
    return [frozenset[int]().union(*sets) for sets in product(*below)]
