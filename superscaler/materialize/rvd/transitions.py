"""Transitions between layouts: one row per primitive, and its price.

The device array of a layout has one axis per digit; a digit is a prime factor of an axis. A `State` lists the digits in
R, in V and in each D. A collective then moves digits from one of them to another, and its groups are the lines of the
device array along these digits, whatever the rest of the state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from superscaler.ir.grid import Ints
from superscaler.ir.layout import Layout

R, V, D = 0, 1, 2
Shape = tuple[int, ...]
Digits = tuple[int, ...]
State = tuple[Digits, ...]
Groups = tuple[tuple[int, ...], ...]


class Intra(NamedTuple):
    """A collective in groups of one layout: a sub-axis leaves `take` and joins `give`, each R, V or D (any slot)."""

    kind: str
    take: int
    give: int


class Inter(NamedTuple):
    """Messages between two layouts. `fits(before, after, same)`: whether they join these shapes; same: the same
    devices.
    """

    kind: str
    fits: Callable[[Shape, Shape, bool], bool]


INTRA = (
    Intra("all_reduce", V, R),
    Intra("all_gather", D, R),
    Intra("reduce_scatter", V, D),
    Intra("all_to_all", D, D),
    Intra("chunk", R, D),
    Intra("value_chunk", R, V),
)
INTER = (
    Inter("permute", lambda a, b, same: same and a == b),
    Inter("move", lambda a, b, same: not same and a[V:] == b[V:] and a[R] >= b[R]),
    Inter("broadcast", lambda a, b, same: not same and a[V:] == b[V:] and a[R] < b[R]),
    Inter("rd_scatter", lambda a, b, same: not same and a[:D] == b[:D] and _grows(a[D:], b[D:])),
    Inter("rd_gather", lambda a, b, same: not same and a[:D] == b[:D] and _grows(b[D:], a[D:])),
    # If neither device count divides the other, they have few shapes in common.
    Inter("messages", lambda a, b, same: not same and a[V] == b[V] and is_odd(prod(a), prod(b))),
)
# Messages join any two layouts; offered from the source to the goal, so that a path always exists.
LAST = "messages"


def _grows(few: Shape, many: Shape) -> bool:
    """Return whether exactly one slot has more parts, a multiple of the number before."""
    changed = [(a, b) for a, b in zip(few, many, strict=True) if a != b]
    return len(changed) == 1 and changed[0][1] % changed[0][0] == 0


def is_odd(a: int, b: int) -> bool:
    return max(a, b) % min(a, b) != 0


class Costs(Protocol):
    """Closed formulas of a cluster. Hashable; the order of groups, and of members of a collective, changes nothing."""

    def seconds(self, kind: str, groups: Sequence[Sequence[int]], size: int) -> float:
        """Return the time in which all groups together run a collective, `size` the bytes of each device's source.

        In messages the groups are (sender, receiver) pairs and `size` the bytes of the largest message; in broadcast
        they are (sender, receivers...). More groups never take less time. Messages take no less time when they are
        spread less evenly over devices and places.
        """
        ...


@runtime_checkable
class Symmetric(Costs, Protocol):
    """Costs that depend on the place of a device only: renaming the devices of a place, or places, changes nothing."""

    def place(self, device: int) -> Hashable: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive of a path.

    `groups`: device ids in chunk order; (sender, receiver) pairs in messages, (sender, receivers...) in broadcast.
    `take` and `give`: the slots of the tensor that are gathered and scattered, -1 where there is none. `factor`: the
    number of members of a group (1 in messages). `size`: the bytes of each device's source; of the largest message in
    messages. `kept`: in messages, the devices that also use the elements that they hold. A message is the intersection
    of its sender's box in the layout before and its receiver's box in `layout`, the one after. Messages on the same
    elements are summed, and elements without one are zero.
    """

    kind: str
    groups: Groups
    take: int
    give: int
    factor: int
    layout: Layout
    size: int
    seconds: float
    kept: tuple[int, ...] = ()


def leaving(digits: Digits, at: int) -> list[Digits]:
    """Return the digits that may leave an axis: any digits of R or V, the last ones of a D, so that chunks stay
    boxes.
    """
    if at >= D:
        return [digits[k:] for k in range(len(digits))]
    return [c for k in range(len(digits)) for c in itertools.combinations(digits, k + 1)]


def orders(digits: Digits, take: int, give: int) -> Iterator[Digits]:
    """Yield the orders in which digits may join an axis: those of a D keep theirs, those of R and V have none."""
    return itertools.permutations(digits) if take < D <= give else iter((digits,))


def moved(state: State, take: int, give: int, digits: Digits) -> State:
    after = list(state)
    after[take] = tuple(d for d in state[take] if d not in digits)
    after[give] = state[give] + digits if give >= D else tuple(sorted(state[give] + digits))
    return tuple(after)


@cache
def slots(ndim: int) -> list[tuple[str, int, int]]:
    """Return (kind, axis, axis) for each intra-group primitive and each pair of axes that it joins, in a layout with
    `ndim` axes.
    """
    axes = {R: [R], V: [V], D: list(range(D, ndim))}
    return [(row.kind, x, y) for row in INTRA for x in axes[row.take] for y in axes[row.give] if x != y]


def same_cells(devices: Ints) -> bytes:
    """Return a key, equal for layouts (of equal shape and devices) that differ in the order of R and of V only."""
    ordered = np.sort(devices, axis=R)
    if devices.shape[V] > 1:
        ordered = np.take_along_axis(ordered, np.argsort(ordered[:1], axis=V), axis=V)
    return ordered.tobytes()


def messages(
    before: Layout, after: Layout, sizes: Shape, place: Callable[[int], Hashable]
) -> tuple[Groups, tuple[int, ...], int]:
    """Return the (sender, receiver) pairs that change one layout to another, the devices that keep their elements, and
    the most elements of a message.

    A device that holds the elements that it reads keeps them. Others read from a replica in their own place if
    possible, from the one that sent the least so far. Value parts keep their number where both sides have equally many,
    and stay on their devices as far as possible; otherwise they are summed into fewer, or the additional ones are zero.
    """
    load: dict[int, int] = dict.fromkeys(before.devices.reshape(-1).tolist(), 0)
    pairs, kept, largest = dict[tuple[int, int], None](), dict[int, None](), 0
    overlaps = [_overlaps(a, b, n) for a, b, n in zip(before.shape[2], after.shape[2], sizes, strict=True)]
    for cells in itertools.product(*overlaps):
        size = prod(n for _, _, n in cells)
        held_by, read_by = _cell(before, [i for i, _, _ in cells]), _cell(after, [j for _, j, _ in cells])
        for held, read in _matched(held_by, read_by):
            keeping = set(held).intersection(read)
            kept.update(dict.fromkeys(sorted(keeping)))
            for device in read:
                if device in keeping:
                    continue
                sender = min(held, key=lambda d: (place(d) != place(device), load[d], d))
                load[sender] += size
                pairs[sender, device] = None
                largest = max(largest, size)
    return tuple(pairs), tuple(kept), largest


def _cell(layout: Layout, at: Sequence[int]) -> list[list[int]]:
    """Return the replicas of each value part of a cell."""
    devices = layout.devices
    for k in at:
        devices = devices[:, :, k]
    found: list[list[int]] = devices.T.tolist()
    return found


def stars(pairs: Groups) -> Groups:
    """Return (sender, receivers...) for each sender of (sender, receiver) pairs."""
    found: dict[int, list[int]] = {}
    for sender, receiver in pairs:
        found.setdefault(sender, [sender]).append(receiver)
    return tuple(map(tuple, found.values()))


def _overlaps(few: int, many: int, size: int) -> list[tuple[int, int, int]]:
    """Return (part before, part after, elements in common) of one slot."""
    a, b = size // few, size // many
    return [
        (i, j, min((i + 1) * a, (j + 1) * b) - max(i * a, j * b))
        for i in range(few)
        for j in range(i * a // b, -(-(i + 1) * a // b))
    ]


def _matched(held: list[list[int]], read: list[list[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Pair the value parts of a cell, those with most devices in common first."""
    if len(held) != len(read):
        yield from ((part, read[i % len(read)]) for i, part in enumerate(held))
        return
    common = lambda ij: len(set(held[ij[0]]).intersection(read[ij[1]]))  # noqa: E731
    left = sorted(itertools.product(range(len(held)), repeat=2), key=common, reverse=True)
    while left:
        i, j = left[0]
        yield held[i], read[j]
        left = [(a, b) for a, b in left if a != i and b != j]
