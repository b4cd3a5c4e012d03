"""Layouts as arrays with one axis per prime factor, and their shapes, coded so that links inside and between places
differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, prod

import numpy as np

from superscaler.ir.grid import Ints
from superscaler.ir.layout import Layout
from superscaler.materialize.rvd.transitions import D, Digits, Groups, Shape, State, V

# (number of sets, sorted members of each).
Partition = tuple[int, bytes]
# More than the digits of any one axis.
_INTER_PLACE = 16
# Each digit between places multiplies the number of shapes by six.
_MOST_INTER_PLACE = 3


@dataclass(frozen=True)
class Frame:
    """The devices of a layout, one axis per digit, and the state that is the layout itself.

    `radix_codes`: for each digit, its factor in the shape of a state: its radix, or a power of the radix if it leads
    from place to place. A coded shape thus determines how much of each axis lies between places.
    """

    devices: Ints
    start: State
    radix_codes: Shape

    def coded(self, state: State) -> Shape:
        return tuple([_product(self.radix_codes, digits) for digits in state])

    def layout(self, state: State) -> Layout:
        order = [d for digits in state for d in digits]
        return Layout(self.devices.transpose(order).reshape([self.radix(digits) for digits in state]))

    def radix(self, digits: Iterable[int]) -> int:
        return prod(self.devices.shape[d] for d in digits)

    def groups(self, digits: Digits) -> Groups:
        """Return the lines of the device array along some digits, the slowest first."""
        rest = [d for d in range(self.devices.ndim) if d not in digits]
        lines = self.devices.transpose(rest + list(digits)).reshape(-1, self.radix(digits))
        return tuple(map(tuple, lines.tolist()))

    @cached_property
    def subsets(self) -> dict[int, list[frozenset[int]]]:
        """Return all sets of digits by the product of their codes."""
        found: dict[int, list[frozenset[int]]] = {}
        for digits in _subsets(self.devices.ndim):
            found.setdefault(_product(self.radix_codes, digits), []).append(frozenset(digits))
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

    Digits between places get codes only if all frames of both layouts allow it.
    """
    both = [list(_frames(layout)) for layout in (source, goal)]
    if place is None:
        return both[0], both[1]
    is_same = set(source.devices.flat) == set(goal.devices.flat)
    sides = [both[0] + both[1]] if is_same else both
    found = [frame for side in sides for frame in _with_place_codes(side, place)]
    return found[: len(both[0])], found[len(both[0]) :]


def _with_place_codes(side: list[Frame], place: Callable[[int], Hashable]) -> list[Frame]:
    """Return frames with codes for the digits between places, if these are the same in all frames."""
    numbers: dict[Hashable, int] = {}
    names = {d: numbers.setdefault(place(d), len(numbers)) for d in sorted(side[0].devices.reshape(-1).tolist())}
    known = [_between(frame, names) for frame in side]
    order = sorted(known[0].values())
    # These digits and the places determine each other.
    is_clean = all(len(set(itertools.chain(*digit))) == sum(map(len, digit)) for digit in order)
    is_clean &= prod(map(len, order)) == len(numbers) and all(sorted(far.values()) == order for far in known)
    if not is_clean or len(order) > _MOST_INTER_PLACE:
        return side
    return [
        replace(
            frame,
            radix_codes=tuple(
                _code(r, order.index(far[d])) if d in far else r for d, r in enumerate(frame.radix_codes)
            ),
        )
        for frame, far in zip(side, known, strict=True)
    ]


def _code(radix: int, number: int) -> int:
    """Return the code of a digit between places."""
    return int(radix ** (_INTER_PLACE << number))


def _frames(layout: Layout) -> Iterator[Frame]:
    options = [sorted(set(itertools.permutations(_primes(k)))) for k in layout.devices.shape]
    for choice in itertools.product(*options):
        numbers = itertools.count()
        start = tuple(tuple(next(numbers) for _ in radices) for radices in choice)
        codes = tuple(itertools.chain(*choice))
        yield Frame(layout.devices.reshape(codes), start, codes)


def _between(frame: Frame, names: dict[int, int]) -> dict[int, tuple[tuple[int, ...], ...]]:
    """Return, for the digits along which the place changes, the places at each value of them."""
    shape: Shape = frame.devices.shape
    places = np.array([names[d] for d in frame.devices.reshape(-1).tolist()]).reshape(shape)
    return {
        d: tuple(tuple(np.unique(places.take(k, axis=d)).tolist()) for k in range(r))
        for d, r in enumerate(shape)
        if (places != places.take([0], axis=d)).any()
    }


@cache
def _exponents(code: int) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
    """Return (prime, digits inside places, the numbers of its digits between places) of a code."""
    primes = _primes(code)
    found = []
    for p in sorted(set(primes)):
        far, near = divmod(primes.count(p), _INTER_PLACE)
        found.append((p, near, tuple(k for k in range(far.bit_length()) if far >> k & 1)))
    return tuple(found)


@cache
def plain(shape: Shape) -> Shape:
    """Return a shape without the difference between digits inside and between places."""
    return tuple(prod(p ** (near + len(far)) for p, near, far in _exponents(code)) for code in shape)


@cache
def parts(shape: Shape) -> int:
    """Return the number of D parts of a coded shape."""
    return prod(plain(shape)[D:])


@cache
def factors(code: int) -> tuple[tuple[int, int], ...]:
    """Return (code, radix) of the sub-axes of an axis that have more than one part."""
    each = [
        [
            p ** (k + sum(_INTER_PLACE << digit for digit in some))
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
    """Return the number of devices, over all places, that must read from another place between two states of all
    places.

    A place holds some parts before and reads some parts after. Their common portion shrinks by a digit between places
    that is in two different slots, that leaves a slot for none, or that V lacks.
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
    """Return the coded shapes of a plain one, whose codes multiply to `total`."""
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
