"""Folds: many devices that run one program on other data, determined by a few sampled devices.

Along a fold axis all data move evenly: a slice moves by the same step from each place to the next. So the data of the
device at place 0, and of one at place 1 of each axis, determine the data of all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import numpy as np

from superscaler.ir.grid import HOSTS, Ints
from superscaler.ir.instructions.fields import Move, evenly, mover, moving
from superscaler.ir.mask import Box
from superscaler.ir.program import Device, Role, Weight

# The number of places along a fold axis that are compiled: place 0 and place 1.
KEPT = 2
# The roles of the fields that differ between places.
_MOVED = (Role.EVEN, Role.GROUP, Role.PEER)
T = TypeVar("T")
Coordinate = tuple[int, ...]


class Unfoldable(Exception):
    """A plan differs between places of a fold axis. `parts`: the places of axes into which that one is divided, if the
    plan may be alike along each of these.
    """

    def __init__(self, axis: int, parts: tuple[int, ...] = ()) -> None:
        super().__init__(f"fold axis {axis}")
        self.axis, self.parts = axis, parts


@dataclass(frozen=True)
class Fold:
    """The devices of a plan as [bases, n1, .., nk]: all of `devices[b]` run the program of `devices[b, 0, .., 0]`."""

    devices: Ints

    @property
    def widths(self) -> tuple[int, ...]:
        return self.devices.shape[1:]

    @cached_property
    def places(self) -> Mapping[int, Coordinate]:
        """Return the base of each device and its place along each fold axis; those of its host are the same."""
        where = map(tuple, np.indices(self.devices.shape).reshape(self.devices.ndim, -1).T.tolist())
        found = dict(zip(self.devices.reshape(-1).tolist(), where, strict=True))
        return found | {device + HOSTS: at for device, at in found.items()}

    def base(self, device: int) -> int:
        """Return the base of a device: the number of its program."""
        return self.places[device][0]

    def place(self, device: int) -> Coordinate:
        """Return a device's place along each fold axis."""
        return self.places[device][1:]

    def without(self, axis: int) -> Fold:
        """Return the fold without one of its axes, whose places become bases of their own."""
        moved = np.moveaxis(self.devices, 1 + axis, 1)
        return Fold(moved.reshape(-1, *moved.shape[2:]))

    def divided(self, axis: int, parts: Sequence[int]) -> Fold:
        """Return the fold with several axes in place of one: [.., 8, ..] -> [.., 4, 2, ..]."""
        outer, inner = self.devices.shape[: 1 + axis], self.devices.shape[2 + axis :]
        return Fold(self.devices.reshape(*outer, *parts, *inner))

    def closeness(self, a: int, b: int) -> int:
        """Return the number of fold axes along which two devices are at the same place."""
        if a not in self.places or b not in self.places:
            return 0
        return sum(x == y for x, y in zip(self.place(a), self.place(b), strict=True))

    def everywhere(self, devices: Sequence[int]) -> list[tuple[int, ...]]:
        """Return, for each place, the devices that correspond to `devices` at place 0."""
        spanned = self.spanned(devices)
        places = np.ndindex(*(1 if axis in spanned else n for axis, n in enumerate(self.widths)))
        return [self.move(devices, place) for place in places]

    def spanned(self, devices: Sequence[int]) -> Sequence[int]:
        """Return the axes along which these devices are at different places."""
        key = tuple(devices)
        if key not in self._spans:
            places = [self.place(d) for d in devices]
            self._spans[key] = [a for a in range(len(self.widths)) if len({place[a] for place in places}) > 1]
        return self._spans[key]

    @cached_property
    def _spans(self) -> dict[tuple[int, ...], list[int]]:
        return {}

    @cached_property
    def _lines(self) -> dict[tuple[int, int], list[int]]:
        """Return, for each axis and device at place 0, the line of devices along that axis."""
        found: dict[tuple[int, int], list[int]] = {}
        for axis in range(len(self.widths)):
            lines = np.moveaxis(self.devices, 1 + axis, -1).reshape(-1, self.widths[axis]).tolist()
            found |= {(axis, line[0]): line for line in lines}
        return found

    def copies(self, devices: Sequence[int]) -> int:
        """Return the number of times that sampled devices repeat a joint action along the fold; 0 if another place
        counts it.
        """
        spanned, first = self.spanned(devices), self.place(devices[0])
        others = [axis for axis in range(len(self.widths)) if axis not in spanned]
        return 0 if any(first[axis] for axis in others) else prod(self.widths[a] for a in others)

    def move(self, devices: Sequence[int], place: Coordinate) -> tuple[int, ...]:
        """Return the devices that correspond, at `place`, to `devices` at place 0."""
        spanned = self.spanned(devices)
        found = []
        for device in devices:
            base, *own = self.places[device]
            to = [own[axis] if axis in spanned else place[axis] for axis in range(len(own))]
            found.append(int(self.devices[(base, *to)]))
        return tuple(found)

    def mover(self, role: Role | None, samples: Sequence[Any]) -> Move | None:
        """Return a field as a function of the place, from those of sampled devices; None if it is equal everywhere."""
        match role:
            case Role.EVEN:
                return mover(samples)
            case Role.GROUP:
                return lambda *place: self.move(samples[0], place)
            case Role.PEER:
                return lambda *place: self.move(samples[:1], place)[0]
        return None

    @cached_property
    def sampled(self) -> frozenset[int]:
        """Return the sampled devices, whose code determines the code of all."""
        return frozenset(d for base in range(len(self.devices)) for d in self.samples(base))

    def samples(self, base: int) -> list[int]:
        """Return the sampled devices of a base: at place 0, then at place 1 of each axis."""
        zero = [0] * len(self.widths)
        ones = [[int(a == axis) for a in range(len(zero))] for axis in range(len(zero))]
        return [int(self.devices[(base, *place)]) for place in (zero, *ones)]

    def extend(self, boxes: dict[int, Box]) -> dict[int, Box]:
        """Return the boxes of whole lines of devices from those at the sampled places.

        Raises Unfoldable if one place has a box and the other has none.
        """
        return self._extend(boxes, lambda first, second, at: evenly([first, second], (at,)))

    def extend_classes(self, classes: dict[int, Hashable]) -> dict[int, Hashable]:
        """Return the replica classes of whole lines of devices: along a line all are equal, or all are different.

        Raises Unfoldable if the sampled places do not determine them.
        """
        found = self._extend(classes, lambda first, second, at: (first, second, at))
        pairs = {(classes[device], found[device]) for device in classes}
        if len({a for a, _ in pairs}) < len(pairs) or len({b for _, b in pairs}) < len(pairs):
            raise Unfoldable(self.spanned(tuple(classes))[0])
        return found

    def _extend(self, boxes: dict[int, T], predict: Callable[[T, T, int], T]) -> dict[int, T]:
        for axis in self.spanned(tuple(boxes)):
            lines = [self._lines[axis, device] for device in boxes if (axis, device) in self._lines]
            if any(line[1] not in boxes for line in lines) or len(lines) * KEPT != len(boxes):
                raise Unfoldable(axis)
            found: dict[int, T] = {}
            for line in lines:
                first, second = boxes[line[0]], boxes[line[1]]
                if first == second:
                    found |= dict.fromkeys(line, first)
                else:
                    found |= {device: predict(first, second, at) for at, device in enumerate(line)}
            boxes = found
        return boxes


@dataclass(frozen=True, eq=False)
class Folded(Sequence[Device]):
    """The devices of a folded program, each made on demand.

    `compiled`: the sampled devices. `idle`: the code of a device without any part.
    """

    fold: Fold
    compiled: Mapping[int, Device]
    idle: Device
    world: int

    def __len__(self) -> int:
        return self.world

    def __getitem__(self, rank: Any) -> Any:
        if isinstance(rank, slice):
            return tuple(self[k] for k in range(*rank.indices(self.world)))
        if not -self.world <= rank < self.world:
            raise IndexError(rank)
        return self._device(rank % self.world)

    def __iter__(self) -> Iterator[Device]:
        return (self._device(rank) for rank in range(self.world))

    @cached_property
    def groups(self) -> list[tuple[list[int], list[Device]]]:
        """Return the devices of each base with its sampled ones, and the devices without any part with an idle one."""
        fold = self.fold
        found = [
            (ranks.reshape(-1).tolist(), [self.compiled[d] for d in fold.samples(base)])
            for base, ranks in enumerate(fold.devices)
        ]
        idle = [rank for rank in range(self.world) if rank not in fold.places]
        return [*found, (idle, [self.idle])] if idle else found

    def changed(self, change: Callable[[Device], Device]) -> Folded:
        """Return the devices with other compiled ones."""
        compiled = {rank: change(device) for rank, device in self.compiled.items()}
        return replace(self, compiled=compiled, idle=change(self.idle))

    def _device(self, rank: int) -> Device:
        if rank not in self.fold.places:
            return replace(self.idle, rank=rank)
        code = self._moved(rank, [d.instructions for d in self._samples(rank)])
        return Device(rank, self.weights(rank), tuple(code))

    def weights(self, rank: int) -> tuple[Weight, ...]:
        """Return the weights of a device, without making its code."""
        if rank not in self.fold.places:
            return self.idle.weights
        return tuple(self._moved(rank, [d.weights for d in self._samples(rank)]))

    def _samples(self, rank: int) -> list[Device]:
        return [self.compiled[d] for d in self.fold.samples(self.fold.base(rank))]

    def _moved(self, rank: int, samples: Sequence[Sequence[T]]) -> Iterator[T]:
        """Yield the instructions or weights of a device, from those of the sampled ones."""
        place = self.fold.place(rank)
        return (moving(some, _MOVED, self.fold.mover)(*place) for some in zip(*samples, strict=True))
