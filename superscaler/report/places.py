"""Devices as data: ranges of their numbers, and groups of these. Words are made last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from superscaler.collectives import KINDS, ONE
from superscaler.ir.grid import HOSTS

# Most groups in a list; of more, only the number and the members together are kept.
MOST = 8
# The first number, the last one, and the step between two.
Range = tuple[int, int, int]


@dataclass(frozen=True)
class Places:
    """Devices, and the hosts of devices. Its text is for people.

    >>> for numbers in ([0, 1, 2, 3], [0, 2, 4, 6], [5, 1], [0, 1, 2, 8, 9]):
    ...     print(Places.of(numbers))
    0 to 3
    0 to 6 by 2
    1, 5
    0 to 2, 8, 9
    >>> Places.of([0, 2, 4, 6]).devices, list(Places.of([9, 0, 1, 2]))
    (((0, 6, 2),), [0, 1, 2, 9])
    """

    devices: tuple[Range, ...] = ()
    hosts: tuple[Range, ...] = ()

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Places:
        """Return devices by number; that of a host is `HOSTS` more than its device's."""
        found = sorted(set(numbers))
        devices, hosts = [d for d in found if d < HOSTS], [d - HOSTS for d in found if d >= HOSTS]
        return cls(tuple(_ranges(devices)), tuple(_ranges(hosts)))

    def __iter__(self) -> Iterator[int]:
        for first, last, step in self.devices:
            yield from range(first, last + 1, step)
        for first, last, step in self.hosts:
            yield from range(first + HOSTS, last + HOSTS + 1, step)

    def shifted(self, by: int) -> Places:
        """Return the places with all numbers lowered by `by`."""
        return Places(*(tuple((a - by, b - by, step) for a, b, step in some) for some in (self.devices, self.hosts)))

    def __str__(self) -> str:
        hosts = f"hosts of {_text(self.hosts)}" if self.hosts else ""
        return ", ".join(filter(None, (_text(self.devices), hosts)))


def _ranges(left: Sequence[int]) -> Iterator[Range]:
    """Yield sorted numbers as ranges, of three numbers or more, or of one."""
    while left:
        step = left[1] - left[0] if len(left) > 1 else 1
        count = next((k for k, d in enumerate(left) if d != left[0] + k * step), len(left))
        count = count if count > 2 else 1
        yield left[0], left[count - 1], step if count > 1 else 1
        left = left[count:]


def _text(ranges: Sequence[Range]) -> str:
    words = (str(a) if a == b else f"{a} to {b}" + (f" by {step}" if step > 1 else "") for a, b, step in ranges)
    return ", ".join(words)


@dataclass(frozen=True)
class Groups:
    """Groups of devices.

    each     the members of each group, or its senders and its receivers; empty if there are many groups
    count    the number of many groups; `all`: their members together
    """

    each: tuple[tuple[Places, ...], ...] = ()
    count: int = 0
    all: Places = Places()

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]], kind: str = "") -> Groups:
        """Return groups, of a collective or message of some `kind`."""
        if len(groups) > MOST:
            return cls(count=len(groups), all=Places.of(d for group in groups for d in group))
        # The number of senders, which are first in a group; -1: all but the last; 0: all members send and receive.
        at = int(kind == "send") if kind not in KINDS else (KINDS[kind].held is ONE) - (KINDS[kind].read is ONE)
        ends = ((group[:at], group[at:]) if at else (group,) for group in groups)
        return cls(tuple(tuple(map(Places.of, sides)) for sides in ends))

    def __bool__(self) -> bool:
        return bool(self.each or self.count)

    def shifted(self, by: int) -> Groups:
        """Return the groups with all numbers of devices lowered by `by`."""
        each = tuple(tuple(side.shifted(by) for side in group) for group in self.each)
        return Groups(each, self.count, self.all.shifted(by))

    def words(self) -> tuple[str, ...]:
        """Return each group in words, or one text for many."""
        if self.count:
            return (f"{self.count} groups in {self.all}",)
        return tuple(" -> ".join(map(str, group)) for group in self.each)


NO_GROUPS = Groups()


def ranges(devices: Iterable[int]) -> str:
    """Return numbers of devices in few words; see `Places`."""
    return str(Places.of(devices))


def devices_text(devices: Sequence[int]) -> str:
    """Return devices with that word.

    >>> devices_text([3]), devices_text([3, 4, 5])
    ('device 3', 'devices 3 to 5')
    """
    return f"device{'s' if len(devices) > 1 else ''} {ranges(devices)}"
