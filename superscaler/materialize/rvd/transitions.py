"""Transitions between layouts: one row per primitive, and the next states of a state.

The device array of a layout has one axis per digit; a digit is a prime factor of an axis. A `State` lists the digits in
R, in V and in each D. A collective moves digits from one of them to another, and its groups are the lines of the device
array along these digits, whatever the rest of the state.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from superscaler.cluster.seconds import LOCAL_KINDS
from superscaler.collectives import ALL, KINDS, ONE, PART, TILE
from superscaler.ir.grid import Ints
from superscaler.ir.layout import Layout

R, V, D = 0, 1, 2
Shape = tuple[int, ...]
Digits = tuple[int, ...]
State = tuple[Digits, ...]
Groups = tuple[tuple[int, ...], ...]


# The axis of a layout along which devices have a whole value, parts of it, or slices.
_AXES = {ALL: R, PART: V, TILE: D}
# Collectives in groups of one layout: a sub-axis leaves the first axis and joins the second, each R, V or D (any slot).
INTRA = (
    *((k.name, _AXES[k.held], _AXES[k.read]) for k in KINDS.values() if ONE not in k.ends),
    ("chunk", R, D),
    ("value_chunk", R, V),
)
COLLECTIVES = tuple(kind for kind, *_ in INTRA if kind not in LOCAL_KINDS)
# The kind of messages between any two layouts: from the source to the goal they are always possible.
MESSAGES = "messages"
# Messages between two layouts, if their shapes fit; `same`: they have the same devices.
INTER: Mapping[str, Callable[[Shape, Shape, bool], bool]] = {
    "permute": lambda a, b, same: same and a == b,
    "move": lambda a, b, same: not same and a[V:] == b[V:] and a[R] >= b[R],
    "broadcast": lambda a, b, same: not same and a[V:] == b[V:] and a[R] < b[R],
    "rd_scatter": lambda a, b, same: not same and a[:D] == b[:D] and all(y % x == 0 for x, y in zip(a, b, strict=True)),
    "rd_gather": lambda a, b, same: not same and a[:D] == b[:D] and all(x % y == 0 for x, y in zip(a, b, strict=True)),
    # If neither device count divides the other, they have few shapes in common.
    MESSAGES: lambda a, b, same: not same and a[V] == b[V] and prod(a) % prod(b) > 0 < prod(b) % prod(a),
}


@cache
def joining(before: Shape, after: Shape, same: bool) -> str:
    """Return the kind of messages that join two shapes, or nothing."""
    return next((kind for kind, fits in INTER.items() if fits(before, after, same)), "")


class Costs(Protocol):
    """Closed formulas of a cluster. Hashable; the order of groups, and of members of a collective, changes nothing.

    More groups never take less time, nor do messages that are spread less evenly over devices and places.
    """

    def seconds(self, kind: str, groups: Sequence[Sequence[int]], size: int) -> float:
        """Return the time in which all groups together run a collective of INTRA, `size` the bytes of each device's
        source; or messages between (sender, receiver) pairs, `size` the bytes of the largest.
        """
        ...


@runtime_checkable
class Symmetric(Costs, Protocol):
    """Costs that depend on the place of a device only: renaming the devices of a place, or places, changes nothing."""

    def place(self, device: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive of a path.

    `groups`: device ids in chunk order; (sender, receiver) pairs in messages. `gather_slot` of the tensor is gathered
    and `scatter_slot` scattered, -1 for none. `size`: the bytes of each device's source; of the largest message in
    messages. `moved`: the elements on links. `kept`: in messages, the devices that also use their own elements. A
    message is the intersection of its sender's box in the layout before and its receiver's box in `layout`, the one
    after. Messages on the same elements are summed, and elements without one are zero.
    """

    kind: str
    groups: Groups
    gather_slot: int
    scatter_slot: int
    layout: Layout
    size: int
    moved: int
    seconds: float
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class Frame:
    """The devices of a layout, one axis per digit, and the state that is the layout itself."""

    devices: Ints
    start: State

    def layout(self, state: State) -> Layout:
        order = [d for digits in state for d in digits]
        return Layout(self.devices.transpose(order).reshape(self.shape(state)))

    def shape(self, state: State) -> Shape:
        return tuple(prod(self.devices.shape[d] for d in digits) for digits in state)

    def groups(self, digits: Digits) -> Groups:
        """Return the lines of the device array along some digits, the slowest first."""
        rest = [d for d in range(self.devices.ndim) if d not in digits]
        lines = self.devices.transpose(rest + list(digits))
        return tuple(map(tuple, lines.reshape(-1, prod(lines.shape[len(rest) :])).tolist()))


def frames(layout: Layout) -> list[Frame]:
    """Return a frame per order of the prime factors of each axis, as 6 is 2 x 3 and 3 x 2."""
    options = [sorted(set(itertools.permutations(_primes(k)))) for k in layout.devices.shape]
    found = []
    for choice in itertools.product(*options):
        numbers = itertools.count()
        start = tuple(tuple(next(numbers) for _ in radices) for radices in choice)
        found.append(Frame(layout.devices.reshape(tuple(itertools.chain(*choice))), start))
    return found


def _primes(k: int) -> tuple[int, ...]:
    p = next((p for p in range(2, k + 1) if k % p == 0), 0)
    return (p, *_primes(k // p)) if p else ()


class Move(NamedTuple):
    """A collective along digits that leave `gather_axis` for `scatter_axis`. `parts`: of the tensor, at its source."""

    kind: str
    gather_axis: int
    scatter_axis: int
    digits: Digits
    parts: int
    before: State
    after: State


@lru_cache(maxsize=1 << 12)
def moves(state: State, radices: Shape, sizes: Shape, is_back: bool) -> list[Move]:
    """Return the collectives from a state, or (`is_back`) those to it from states with equal parts."""
    axes, found = {R: [R], V: [V], D: list(range(D, len(state)))}, []
    joined = ((kind, x, y) for kind, gather, scatter in INTRA for x in axes[gather] for y in axes[scatter] if x != y)
    for kind, gather, scatter in joined:
        x, y = (scatter, gather) if is_back else (gather, scatter)
        for digits in _leaving(state[x], x) if state[x] else ():
            if y >= D and sizes[y - D] % prod(radices[d] for d in state[y] + digits):
                continue
            # The digits of a D keep their order; those of R and V have none.
            for ordered in itertools.permutations(digits) if x < D <= y else (digits,):
                before, after = (state, _moved(state, x, y, ordered))[:: -1 if is_back else 1]
                parts = prod(radices[d] for slot in before[D:] for d in slot)
                found.append(Move(kind, gather, scatter, ordered, parts, before, after))
    return found


def _leaving(digits: Digits, axis: int) -> list[Digits]:
    """Return the digits that may leave an axis: any of R or V, the last ones of a D, so that chunks stay boxes."""
    if axis >= D:
        return [digits[k:] for k in range(len(digits))]
    return [some for k in range(len(digits)) for some in itertools.combinations(digits, k + 1)]


def _moved(state: State, gather: int, scatter: int, digits: Digits) -> State:
    after = list(state)
    after[gather] = tuple(d for d in state[gather] if d not in digits)
    after[scatter] = state[scatter] + digits if scatter >= D else tuple(sorted(state[scatter] + digits))
    return tuple(after)


def same_cells(devices: Ints) -> bytes:
    """Return a key, equal for layouts (of equal shape and devices) that differ in the order of R and of V only."""
    ordered = np.sort(devices, axis=R)
    if devices.shape[V] > 1:
        ordered = np.take_along_axis(ordered, np.argsort(ordered[:1], axis=V), axis=V)
    return ordered.tobytes()


def messages(kind: str, before: Layout, after: Layout, sizes: Shape, itemsize: int, costs: Costs) -> Step:
    """Return the messages from one layout to another, between (sender, receiver) pairs.

    A device keeps the elements that it both holds and reads. Others come from a replica in the reader's place if
    possible, from the sender with the least load so far. Value parts keep their number if both sides have equally many,
    and stay on their devices as far as possible; otherwise they are summed into fewer, or the additional ones are zero.
    """
    place = costs.place if isinstance(costs, Symmetric) else int
    load, pairs, kept, largest = Counter[int](), dict[tuple[int, int], None](), dict[int, None](), 0
    overlaps = [_overlaps(a, b, n) for a, b, n in zip(before.shape[2], after.shape[2], sizes, strict=True)]
    for cells in itertools.product(*overlaps):
        size = prod(n for _, _, n in cells)
        cell: Any = (slice(None), slice(None), *(i for i, _, _ in cells))
        other: Any = (slice(None), slice(None), *(j for _, j, _ in cells))
        for held, read in _matched(before.devices[cell].T.tolist(), after.devices[other].T.tolist()):
            kept.update(dict.fromkeys(sorted(set(held).intersection(read))))
            for device in (d for d in read if d not in held):
                sender = min(held, key=lambda d: (place(d) != place(device), load[d], d))
                load[sender] += size
                pairs[sender, device] = None
                largest = max(largest, size)
    seconds = costs.seconds(MESSAGES, tuple(pairs), largest * itemsize) if pairs else 0.0
    return Step(kind, tuple(pairs), -1, -1, after, largest * itemsize, load.total(), seconds, tuple(kept))


def _overlaps(few: int, many: int, size: int) -> list[tuple[int, int, int]]:
    """Return (part before, part after, elements in common) of one slot."""
    a, b = size // few, size // many
    common = ((i, j, min((i + 1) * a, (j + 1) * b) - max(i * a, j * b)) for i in range(few) for j in range(many))
    return [each for each in common if each[2] > 0]


def _matched(held: list[list[int]], read: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Return pairs of value parts of a cell, those with most devices in common first."""
    if len(held) != len(read):
        return [(part, read[i % len(read)]) for i, part in enumerate(held)]
    found: dict[int, int] = {}
    common = lambda ij: len(set(held[ij[0]]).intersection(read[ij[1]]))  # noqa: E731
    for i, j in sorted(itertools.product(range(len(held)), repeat=2), key=common, reverse=True):
        if i not in found and j not in found.values():
            found[i] = j
    return [(held[i], read[j]) for i, j in found.items()]
