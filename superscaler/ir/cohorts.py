"""Cohorts: the devices that run one program, with what differs between them as arrays of one row a device.

Of a folded program they are the bases of the fold, and the data of each device is made as its claim of moving evenly
says; of any other, devices whose code is equal and which communicate with devices whose code is equal.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superscaler.errors import ScheduleError
from superscaler.ir.parts import Ints
from superscaler.ir.program import FIELDS, ROLES, Device, Instruction, Program, Recv, Role, Send, Value, Weight
from superscaler.ir.spmd import Fold, Folded

_COMMUNICATION = (Role.GROUP, Role.PEER)


@dataclass(eq=False)
class Cohort:
    """`samples` are all of its devices, or those at place 0 and at place 1 of each axis of a fold; `places` [devices,
    axes] then tells where each of `devices` is.
    """

    number: int
    devices: Ints
    samples: Sequence[Device]
    places: Ints | None = None
    fold: Fold | None = None

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def code(self) -> Sequence[Instruction]:
        return self.samples[0].instructions

    @property
    def weights(self) -> Sequence[Weight]:
        return self.samples[0].weights

    def data(self, at: int, field: str) -> NDArray[Any]:
        """Return a field of instruction `at` that may differ between devices, as an array with a row per device."""
        values = [getattr(device.instructions[at], field) for device in self.samples]
        role = ROLES[type(self.code[at])][field]
        if self.fold is None or self.places is None or role is Role.MESSAGE:
            return self._rows(values if self.fold is None else values[:1])
        if role is Role.GROUP:
            return self._moved(values[0])
        return self._moved((values[0],))[:, 0] if role is Role.PEER else self._even(values)

    @cached_property
    def at_rest(self) -> dict[Value, tuple[Weight, Ints]]:
        """Return the weights by name, each with its box on every device [devices, slots, 2]."""
        boxes = (box.reshape(len(self), -1, 2) for box in self.of_weights("box"))
        return {weight.name: (weight, box) for weight, box in zip(self.weights, boxes, strict=True)}

    def of_weights(self, field: str) -> list[NDArray[Any]]:
        """Return a field of each weight as an array with a row per device."""
        sides = zip(*(device.weights for device in self.samples), strict=True)
        even = self._rows if self.places is None else self._even
        return [even([getattr(w, field) for w in side]) for side in sides]

    def _rows(self, values: Sequence[Any]) -> NDArray[Any]:
        if len(values) == 1 or all(value == values[0] for value in values[1:]):
            first = _array(values[0])
            return np.broadcast_to(first, (len(self), *first.shape))
        return _array(values)

    def _even(self, values: Sequence[Any]) -> NDArray[Any]:
        assert self.places is not None
        if all(value == values[0] for value in values[1:]):
            return self._rows(values[:1])
        first, *others = map(_array, values)
        if any(other.shape != first.shape for other in others):
            raise ValueError(f"at the places of a fold it has {', '.join(map(str, values))}")
        if first.dtype == bool:
            found = np.broadcast_to(first, (len(self), *first.shape)).copy()
            for axis, other in enumerate(others):
                found[self.places[:, axis] > 0] &= other
            return found
        found = np.broadcast_to(first, (len(self), *first.shape)).copy()
        for axis, other in enumerate(others):
            if not np.array_equal(other, first):
                found += self.places[:, axis].reshape(-1, *[1] * first.ndim) * (other - first)
        return found

    def _moved(self, group: Sequence[int]) -> Ints:
        assert self.fold is not None
        assert self.places is not None
        spanned = self.fold.spanned(group)
        found = np.empty((len(self), len(group)), dtype=np.int64)
        for k, device in enumerate(group):
            base, *own = self.fold.places[device]
            to = [own[axis] if axis in spanned else self.places[:, axis] for axis in range(len(own))]
            found[:, k] = self.fold.devices[(base, *to)]
        return found

    @cached_property
    def row_of(self) -> dict[int, int]:
        return {device: row for row, device in enumerate(self.devices.tolist())}


def cohorts(program: Program) -> list[Cohort]:
    """Return the cohorts of a program, each device in one."""
    devices = program.devices
    if not isinstance(devices, Folded):
        return _alike(devices)
    fold, found = devices.fold, list[Cohort]()
    for base, own in enumerate(fold.devices):
        places = np.indices(own.shape).reshape(own.ndim, -1).T
        samples = [devices.compiled[device] for device in fold.samples(base)]
        _check_alike(samples)
        found.append(Cohort(base, own.reshape(-1), samples, places, fold))
    idle = [rank for rank in range(len(devices)) if rank not in fold.places]
    return [*found, Cohort(len(found), np.array(idle), [devices.idle])] if idle else found


def _check_alike(samples: Sequence[Device]) -> None:
    """Raise ScheduleError unless the places of a fold that are compiled have equal instructions but for their data."""
    first, *others = (([w.name for w in d.weights], [*map(type, d.instructions[:])]) for d in samples)
    for device, other in zip(samples[1:], others, strict=True):
        if other != first:
            one, two = (f"{len(code)} instructions and {len(names)} weights" for names, code in (first, other))
            same = zip_longest(first[1], other[1])
            at = next((f", other ones from instruction {n} on" for n, (a, b) in enumerate(same) if a is not b), "")
            raise ScheduleError(
                f"device {device.rank} has {two}, and device {samples[0].rank}, with which it folds, {one}{at}."
            )


def _alike(devices: Sequence[Device]) -> list[Cohort]:
    """Refine the classes of devices with equal code until the members and peers of each are of equal classes."""
    number: dict[Hashable, int] = {}
    messages = [_messages(device) for device in devices]
    # Where the other end of each message stands in the code of its device.
    other = {(peer, rank, message, not is_send): at for some in messages for rank, at, peer, message, is_send in some}
    meets = {
        device.rank: tuple(other.get((rank, peer, message, is_send), -1) for rank, _, peer, message, is_send in some)
        for device, some in zip(devices, messages, strict=True)
    }
    color = {d.rank: number.setdefault((form(d), meets[d.rank]), len(number)) for d in devices}
    links = {d.rank: list(_links(d)) for d in devices}
    while True:
        number = {}
        refined = {
            rank: number.setdefault(
                (color[rank], *(tuple(color.get(m, -1) for m in link) for link in some)), len(number)
            )
            for rank, some in links.items()
        }
        if len(number) == len(set(color.values())):
            break
        color = refined
    members: dict[int, list[Device]] = {}
    for device in devices:
        members.setdefault(color[device.rank], []).append(device)
    return [Cohort(n, np.array([d.rank for d in some]), some) for n, some in enumerate(members.values())]


def _messages(device: Device) -> list[tuple[int, int, int, int, bool]]:
    """Return the messages of a device: its rank, where in the code, the peer, the number, and whether it sends."""
    code = enumerate(device.instructions)
    return [(device.rank, at, i.peer, i.message, isinstance(i, Send)) for at, i in code if isinstance(i, Send | Recv)]


def _links(device: Device) -> Iterator[tuple[int, ...]]:
    for i in device.instructions:
        for role in _COMMUNICATION:
            for name in FIELDS[type(i), role]:
                value = getattr(i, name)
                yield value if isinstance(value, tuple) else (value,)


def form(device: Device) -> Hashable:
    """Return what is equal for devices that run one program: its text, the shape of its data, which groups are one."""
    form: list[Hashable] = [tuple((w.name, w.tensor, w.trained, w.group, w.host, len(w.box)) for w in device.weights)]
    groups: dict[object, int] = {}
    for i in device.instructions:
        kind = type(i)
        form.append(kind.__name__)
        for name, role in ROLES[kind].items():
            value = getattr(i, name)
            if role is Role.EVEN:
                form.append(_shape(value))
            elif role is Role.GROUP:
                form += [len(value), groups.setdefault(value, len(groups))]
            elif role not in (Role.PEER, Role.MESSAGE, Role.NOTE):
                form.append(value)
    return tuple(form)


def _array(value: Any) -> NDArray[Any]:
    found = np.array(value)
    return found if found.size else found.astype(np.int64)


def _shape(value: Any) -> Hashable:
    return tuple(map(_shape, value)) if isinstance(value, tuple) else ()
