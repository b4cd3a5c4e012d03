"""Cohorts: devices that run one program on data of their own, so that each program is looked at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superscaler.errors import ScheduleError
from superscaler.groups import group_by
from superscaler.ir.fold import Fold, Folded
from superscaler.ir.grid import Ints
from superscaler.ir.loops import Loop, Rolled, kinds_of, runs_of
from superscaler.ir.program import FIELDS, KEYS, KINDS, ROLES, Device, Instruction, Program, Role, Value, Weight
from superscaler.ir.running.meetings import Message, meetings
from superscaler.remembered import remembered

_COMMUNICATION = (Role.GROUP, Role.PEER)


@dataclass(eq=False)
class Cohort:
    """A class of devices that run one program.

    `samples`: all of its devices, or, in a folded program, those at place 0 and at place 1 of each axis; `places`
    [devices, axes] then has the place of each device.
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
        role = ROLES[type(self.code[at])][field]
        # Of a fold, the first sample has the groups, peers and messages of all.
        is_first = self.fold is not None and role in (Role.GROUP, Role.PEER, Role.MESSAGE)
        codes = [device.instructions for device in self.samples[: 1 if is_first else None]]
        spots = [spot for code in codes if isinstance(code, Rolled) and (spot := code.spot(at))]
        if role in (Role.EVEN, Role.MESSAGE) and len(spots) == len(codes) and len({spot[1:] for spot in spots}) == 1:
            _, _, turn, place = spots[0]
            one = self._data(role, field, tuple([getattr(loop.first[place], field) for loop, *_ in spots]))
            two = self._data(role, field, tuple([getattr(loop.second[place], field) for loop, *_ in spots]))
            if one.shape == two.shape and one.dtype == two.dtype == np.int64:
                return one if one is two else _later(one, two, turn)
        return self._data(role, field, tuple([getattr(code[at], field) for code in codes]))

    def _data(self, role: Role | None, field: str, values: tuple[Any, ...]) -> NDArray[Any]:
        if self.places is None or role is Role.MESSAGE:
            return _rows(field, len(self), values)
        if role is Role.GROUP:
            return self._moved(values[0])
        return self._moved((values[0],))[:, 0] if role is Role.PEER else _even(field, self.places, values)

    @cached_property
    def at_rest(self) -> dict[Value, tuple[Weight, Ints]]:
        """Return the weights by name, each with its box on every device [devices, slots, 2]."""
        boxes = (box.reshape(len(self), -1, 2) for box in self.of_weights("box"))
        return {weight.name: (weight, box) for weight, box in zip(self.weights, boxes, strict=True)}

    def of_weights(self, field: str) -> list[NDArray[Any]]:
        """Return a field of each weight: arrays with a row per device."""
        sides = zip(*(device.weights for device in self.samples), strict=True)
        values = (tuple([getattr(w, field) for w in side]) for side in sides)
        if self.places is None:
            return [_rows(field, len(self), own) for own in values]
        return [_even(field, self.places, own) for own in values]

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], Ints]:
        """The groups made so far: that of each device, by that of the first one."""
        return {}

    def _moved(self, group: tuple[int, ...]) -> Ints:
        if group in self._groups:
            return self._groups[group]
        assert self.fold is not None
        assert self.places is not None
        spanned = self.fold.spanned(group)
        found = np.empty((len(self), len(group)), dtype=np.int64)
        for k, device in enumerate(group):
            base, *own = self.fold.places[device]
            to = [own[axis] if axis in spanned else self.places[:, axis] for axis in range(len(own))]
            found[:, k] = self.fold.devices[(base, *to)]
        self._groups[group] = found
        return found

    @cached_property
    def row_of(self) -> dict[int, int]:
        return {device: row for row, device in enumerate(self.devices.tolist())}


@remembered
def _rows(field: str, count: int, values: tuple[Any, ...]) -> NDArray[Any]:
    """Return the values of `count` devices, or the only one for all, as an array with a row per device.

    Fields of one name have one type, so that flags are no numbers here: True equals 1.
    """
    if len(values) == 1 or all(value == values[0] for value in values[1:]):
        first = _array(values[0])
        return np.broadcast_to(first, (count, *first.shape))
    return _array(values)


@remembered
def _even(field: str, places: Ints, values: tuple[Any, ...]) -> NDArray[Any]:
    """Return the values of devices at places, from those of the samples, as an array with a row per device."""
    if all(value == values[0] for value in values[1:]):
        return _rows(field, len(places), values[:1])
    first, *others = map(_array, values)
    if any(other.shape != first.shape for other in others):
        raise ValueError(f"at the places of a fold it has {', '.join(map(str, values))}")
    found = np.broadcast_to(first, (len(places), *first.shape)).copy()
    for axis, other in enumerate(others):
        if first.dtype == bool:
            found[places[:, axis] > 0] &= other
        elif not np.array_equal(other, first):
            found += places[:, axis].reshape(-1, *[1] * first.ndim) * (other - first)
    return found


@remembered
def _later(one: Ints, two: Ints, turn: int) -> Ints:
    """Return numbers of a later repetition of a loop, from those of its first two."""
    return one + turn * (two - one)


def cohorts(program: Program) -> list[Cohort]:
    """Return the cohorts of a program, each device in one."""
    devices = program.devices
    if not isinstance(devices, Folded):
        return _refined(devices)
    fold, found = devices.fold, list[Cohort]()
    places = np.indices(fold.widths).reshape(len(fold.widths), -1).T
    for number, (ranks, samples) in enumerate(devices.groups):
        _check_alike(samples)
        is_idle = number == len(fold.devices)
        found.append(Cohort(number, np.array(ranks), samples, *(() if is_idle else (places, fold))))
    return found


def alone(program: Program) -> list[Cohort]:
    """Return a cohort of each device."""
    return [Cohort(number, np.array([device.rank]), [device]) for number, device in enumerate(program.devices)]


def _check_alike(samples: Sequence[Device]) -> None:
    """Raise ScheduleError unless the compiled devices of a fold have the same weights and kinds of instructions."""
    first, *others = (([w.name for w in d.weights], list(kinds_of(d.instructions))) for d in samples)
    for device, other in zip(samples[1:], others, strict=True):
        if other != first:
            one, two = (f"{len(code)} instructions and {len(names)} weights" for names, code in (first, other))
            same = zip_longest(first[1], other[1])
            at = next((f", other ones from instruction {n} on" for n, (a, b) in enumerate(same) if a is not b), "")
            raise ScheduleError(
                f"device {device.rank} has {two}, and device {samples[0].rank}, with which it folds, {one}{at}."
            )


def _refined(devices: Sequence[Device]) -> list[Cohort]:
    """Refine the classes of devices with equal code until the members and peers of each are of equal classes."""
    number: dict[Hashable, int] = {}
    messages = {d.rank: [m for m in meetings(d.instructions, d.rank) if isinstance(m[2], Message)] for d in devices}
    # The position of each end of a message in the code of its device.
    places = {(key, i.is_send): at for some in messages.values() for at, i, key in some}
    meets = {rank: tuple(places.get((key, not i.is_send), -1) for _, i, key in some) for rank, some in messages.items()}
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
    members = group_by(devices, lambda device: color[device.rank]).values()
    return [Cohort(n, np.array([d.rank for d in some]), some) for n, some in enumerate(members)]


def _links(device: Device) -> Iterator[tuple[int, ...]]:
    for i in device.instructions:
        for role in _COMMUNICATION:
            for name in FIELDS[type(i), role]:
                value = getattr(i, name)
                yield value if isinstance(value, tuple) else (value,)


def alike(devices: Sequence[Device]) -> list[list[int]]:
    """Return the numbers of devices that run one program."""
    # Most that differ have code of other lengths.
    lengths = [tuple(map(len, runs_of(device.instructions))) for device in devices]
    some = group_by(range(len(devices)), lengths.__getitem__).values()
    return [own for of in some for own in (group_by(of, lambda n: form(devices[n])).values() if len(of) > 1 else [of])]


def form(device: Device) -> Hashable:
    """Return a key of a device, equal for devices that run one program: its text, its loops, the shapes of its data,
    and the equalities between groups.
    """
    form: list[Hashable] = [tuple((w.name, w.tensor, w.trained, w.group, w.host, len(w.box)) for w in device.weights)]
    groups: dict[object, int] = {}
    runs = runs_of(device.instructions)
    form += [(len(run), run.count if isinstance(run, Loop) else 1) for run in runs]
    # Two repetitions determine all.
    for i in (i for run in runs for i in ((*run.first, *run.second) if isinstance(run, Loop) else run)):
        kind: type = type(i)
        form += (kind, _KEPT[kind](i))
        form += (_shape(getattr(i, name)) for name in FIELDS[kind, Role.EVEN])
        for value in (getattr(i, name) for name in FIELDS[kind, Role.GROUP]):
            form += (len(value), groups.setdefault(value, len(groups)))
    return tuple(form)


# The fields that are equal on all devices that run a program.
_KEPT = {kind: attrgetter(*(name for role in (None, *KEYS) for name in FIELDS[kind, role])) for kind in KINDS}


def _array(value: Any) -> NDArray[Any]:
    found = np.array(value)
    return found if found.size else found.astype(np.int64)


def _shape(value: Any) -> Hashable:
    return tuple(map(_shape, value)) if isinstance(value, tuple) else ()
