"""Transitions between layouts: one row per primitive, what it costs to tell apart, and the devices that it joins.

A layout is seen through a `Frame`: its device array with one axis per digit, a digit being a prime factor of an axis.
A `State` says which digits are in R, in V and in each D, so that a collective is a move of digits from one of them to
another, and its groups are the lines of the device array along these digits, whatever the rest of the state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, prod
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from superscaler.ir.layout import Layout
from superscaler.ir.parts import Ints

R, V, D = 0, 1, 2
Shape = tuple[int, ...]
Digits = tuple[int, ...]
State = tuple[Digits, ...]
Groups = tuple[tuple[int, ...], ...]
# How many sets, and the sorted members of each.
Partition = tuple[int, bytes]


class Intra(NamedTuple):
    """A collective in groups of one layout: a sub-axis leaves `take` and joins `give`, each R, V or D (any slot)."""

    kind: str
    take: int
    give: int


class Inter(NamedTuple):
    """Messages between two layouts; `fits(before, after, same)` tells which shapes it joins, same: the same devices."""

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
    # Device counts of which neither divides the other have few shapes in common.
    Inter("messages", lambda a, b, same: not same and a[V] == b[V] and is_odd(prod(a), prod(b))),
)
# From any layout to any other; offered from the source to the goal, so that there always is a path.
LAST = "messages"
# More than the digits of any one axis.
_FAR = 16
# The shapes are six times as many for each digit between places.
_MOST_FAR = 3


def _grows(few: Shape, many: Shape) -> bool:
    """Return whether one slot, and no other, has a multiple of its parts."""
    changed = [(a, b) for a, b in zip(few, many, strict=True) if a != b]
    return len(changed) == 1 and changed[0][1] % changed[0][0] == 0


def is_odd(a: int, b: int) -> bool:
    return max(a, b) % min(a, b) != 0


class Costs(Protocol):
    """Closed formulas of a cluster. Hashable; the order of groups, and of members of a collective, changes nothing."""

    def seconds(self, kind: str, groups: Sequence[Sequence[int]], size: int) -> float:
        """Return the time in which all groups at once run a collective, `size` the bytes of each device's source.

        In messages the groups are (sender, receiver) pairs and `size` the bytes of the largest message; in broadcast
        they are (sender, receivers...). Groups added never make it less, nor does it help messages to be spread less
        evenly over devices and places.
        """
        ...


@runtime_checkable
class Symmetric(Costs, Protocol):
    """Costs that see of a device only its place: renaming the devices of a place, or places, changes nothing."""

    def place(self, device: int) -> Hashable: ...


@dataclass(frozen=True, slots=True)
class Step:
    """One primitive of a path.

    `groups` are device ids in chunk order; (sender, receiver) pairs in messages, (sender, receivers...) in broadcast.
    `take` and `give` are the slots of the tensor that are gathered and scattered, -1 where there is none. `factor` is
    the number of members of a group (1 in messages). `size` is the bytes of each device's source; of the largest
    message in messages. `kept` are the devices that also use, in messages, what they hold. A message is what the box of
    its sender in the layout before and the box of its receiver in `layout`, the one after, have in common; messages on
    the same elements are summed, and elements without one are zero.
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


@dataclass(frozen=True)
class Frame:
    """The devices of a layout, one axis per digit, and the state that is the layout itself.

    `codes` is what each digit multiplies the shape of a state by: its radix, or, where it leads from place to place, a
    power of it. So a coded shape says how much of each axis lies between places.
    """

    devices: Ints
    start: State
    codes: Shape

    def coded(self, state: State) -> Shape:
        return tuple([_product(self.codes, digits) for digits in state])

    def layout(self, state: State) -> Layout:
        order = [d for digits in state for d in digits]
        return Layout(self.devices.transpose(order).reshape([self.radix(digits) for digits in state]))

    def radix(self, digits: Iterable[int]) -> int:
        return prod(self.devices.shape[d] for d in digits)

    def groups(self, digits: Digits) -> Groups:
        """Return the lines of the device array along some digits, the first of them the slowest."""
        rest = [d for d in range(self.devices.ndim) if d not in digits]
        lines = self.devices.transpose(rest + list(digits)).reshape(-1, self.radix(digits))
        return tuple(map(tuple, lines.tolist()))

    @cached_property
    def subsets(self) -> dict[int, list[frozenset[int]]]:
        """All sets of digits by the product of their codes."""
        found: dict[int, list[frozenset[int]]] = {}
        for digits in _subsets(self.devices.ndim):
            found.setdefault(_product(self.codes, digits), []).append(frozenset(digits))
        return found

    def cuts(self) -> Iterator[tuple[tuple[Partition, Partition], tuple[int, int]]]:
        """Yield the partitions of the devices into cells and into value parts of cells, with (D parts, V parts)."""
        found = {frozenset(digits): self._partition(digits) for digits in _subsets(self.devices.ndim)}
        for outer, cells in found.items():
            for inner, parts in found.items():
                if outer <= inner:
                    yield (cells, parts), (self.radix(outer), self.radix(inner - outer))

    def _partition(self, digits: Digits) -> Partition:
        rest = [d for d in range(self.devices.ndim) if d not in digits]
        lines = np.sort(self.devices.transpose([*digits, *rest]).reshape(self.radix(digits), -1), axis=1)
        return len(lines), lines[np.argsort(lines[:, 0])].tobytes()


def _subsets(n: int) -> list[Digits]:
    return [c for k in range(n + 1) for c in itertools.combinations(range(n), k)]


@cache
def _product(codes: Shape, digits: Digits) -> int:
    return prod(codes[d] for d in digits)


def frames(source: Layout, goal: Layout, place: Callable[[int], Hashable] | None) -> tuple[list[Frame], list[Frame]]:
    """Return the frames of both layouts: one per order of the prime factors of each axis, as 6 is 2 x 3 and 3 x 2.

    Digits lead from place to place, or not, if that is so for all digits of all frames of both.
    """
    both = [list(_frames(layout)) for layout in (source, goal)]
    if place is None:
        return both[0], both[1]
    is_same = set(source.devices.flat) == set(goal.devices.flat)
    sides = [both[0] + both[1]] if is_same else both
    found = [frame for side in sides for frame in _told_apart(side, place)]
    return found[: len(both[0])], found[len(both[0]) :]


def _told_apart(side: list[Frame], place: Callable[[int], Hashable]) -> list[Frame]:
    """Return frames with codes for the digits between places, if these are the same in all frames."""
    numbers: dict[Hashable, int] = {}
    names = {d: numbers.setdefault(place(d), len(numbers)) for d in sorted(side[0].devices.reshape(-1).tolist())}
    known = [_between(frame, names) for frame in side]
    order = sorted(known[0].values())
    # Each place is one choice of values of these digits, and the other way round.
    is_clean = all(len(set(itertools.chain(*digit))) == sum(map(len, digit)) for digit in order)
    is_clean &= prod(map(len, order)) == len(numbers) and all(sorted(far.values()) == order for far in known)
    if not is_clean or len(order) > _MOST_FAR:
        return side
    return [
        replace(
            frame,
            codes=tuple(r ** (_FAR << order.index(far[d])) if d in far else r for d, r in enumerate(frame.codes)),
        )
        for frame, far in zip(side, known, strict=True)
    ]


def _frames(layout: Layout) -> Iterator[Frame]:
    options = [sorted(set(itertools.permutations(_primes(k)))) for k in layout.devices.shape]
    for choice in itertools.product(*options):
        numbers = itertools.count()
        start = tuple(tuple(next(numbers) for _ in radices) for radices in choice)
        codes = tuple(itertools.chain(*choice))
        yield Frame(layout.devices.reshape(codes), start, codes)


def _between(frame: Frame, names: dict[int, int]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return, for the digits along which the place changes, the places at each value of them."""
    places = np.array([names[d] for d in frame.devices.reshape(-1).tolist()]).reshape(frame.devices.shape)
    return {
        d: tuple(tuple(np.unique(places.take(k, axis=d)).tolist()) for k in range(r))
        for d, r in enumerate(places.shape)
        if (places != places.take([0], axis=d)).any()
    }


@cache
def _exponents(code: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Return (prime, digits inside places, the numbers of its digits between places) of a code."""
    primes = _primes(code)
    found = []
    for p in sorted(set(primes)):
        far, near = divmod(primes.count(p), _FAR)
        found.append((p, near, tuple(k for k in range(far.bit_length()) if far >> k & 1)))
    return tuple(found)


@cache
def plain(shape: Shape) -> Shape:
    """Return a shape without the difference between digits inside and between places."""
    return tuple(prod(p ** (near + len(far)) for p, near, far in _exponents(code)) for code in shape)


@cache
def parts(shape: Shape) -> int:
    """Return how many D parts a coded shape has."""
    return prod(plain(shape)[D:])


@cache
def factors(code: int) -> tuple[tuple[int, int], ...]:
    """Return (code, radix) of the sub-axes, of more than one part, of an axis."""
    each = [
        [
            p ** (k + sum(_FAR << digit for digit in some))
            for k in range(near + 1)
            for n in range(len(far) + 1)
            for some in itertools.combinations(far, n)
        ]
        for p, near, far in _exponents(code)
    ]
    found = sorted(prod(some) for some in itertools.product(*each))
    return tuple((some, plain((some,))[0]) for some in found[1:])


@cache
def arriving(before: Shape, after: Shape, devices: int) -> int:
    """Return how many devices, all places together, must read from another place between two states of all places.

    What a place has of both the parts before and the parts after shrinks by a digit between places that is in two
    different slots, that was in a slot and is in none, or that is missed in V.
    """
    held, read = (_homes(shape) for shape in (before, after))
    values = [prod(p for (p, _), axis in homes.items() if axis == V) for homes in (held, read)]
    common = values[1] / max(values)
    for digit, axis in held.items():
        if axis >= D and axis != read[digit]:
            common /= digit[0]
    return ceil(devices * (1 - common) - 1e-9)


def _homes(shape: Shape) -> dict[tuple[int, int], int]:
    """Return the axis of each (prime, number) of the digits between places."""
    return {(p, k): axis for axis, code in enumerate(shape) for p, _, far in _exponents(code) for k in far}


def coded(shape: Shape, total: int) -> list[Shape]:
    """Return the coded shapes that a plain one may stand for, whose codes multiply to `total`."""
    if not shape:
        return [()] if total == 1 else []
    some = [code for code, radix in ((1, 1), *factors(total)) if radix == shape[0]]
    return [(code, *rest) for code in some for rest in coded(shape[1:], total // code)]


def _primes(k: int) -> tuple[int, ...]:
    found, p = [], 2
    while k > 1:
        while k % p == 0:
            found.append(p)
            k //= p
        p += 1
    return tuple(found)


def leaving(digits: Digits, at: int) -> list[Digits]:
    """Return what may leave an axis: any digits of R or V, the last ones of a D, so that chunks stay boxes."""
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
    """Return each intra-group primitive with each pair of axes, of a layout with `ndim` axes, that it joins."""
    axes = {R: [R], V: [V], D: list(range(D, ndim))}
    return [(row.kind, x, y) for row in INTRA for x in axes[row.take] for y in axes[row.give] if x != y]


def same_cells(devices: Ints) -> bytes:
    """Return what is equal for layouts (of equal shape and devices) that differ in the order of R and of V only."""
    ordered = np.sort(devices, axis=R)
    if devices.shape[V] > 1:
        ordered = np.take_along_axis(ordered, np.argsort(ordered[:1], axis=V), axis=V)
    return ordered.tobytes()


def messages(
    before: Layout, after: Layout, sizes: Shape, place: Callable[[int], Hashable]
) -> tuple[Groups, tuple[int, ...], int]:
    """Return (sender, receiver) pairs that make one layout of another, the devices that keep, the largest in elements.

    A device that holds what it reads keeps it; others read from a replica in their own place if there is one, from the
    one that sent the least so far. Value parts keep their number where both sides have as many, and stay where they are
    as far as may be; otherwise they are summed into fewer, or the further ones are zero.
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
