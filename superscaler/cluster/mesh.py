"""`Mesh`: devices along named axes, so that a plan says what each axis cuts and never counts devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod
from typing import Any

from superscaler.cluster.links import LOCAL
from superscaler.errors import InputError, divisors, named, unknown
from superscaler.specs.arguments import checked_class, fits


@checked_class
@dataclass(frozen=True, slots=True)
class Mesh:
    """Devices, or their numbers, along named axes, the outer axis first. One size may be -1: what the others leave.

    Raises InputError, with both numbers, unless the product of the sizes is the number of devices.

    >>> mesh = Mesh({"pp": 2, "dp": -1}, range(6))
    >>> str(mesh), mesh.sizes["dp"], mesh.at(pp=1).devices
    ('pp=2,dp=3', 3, (3, 4, 5))
    """

    sizes: Mapping[str, int]
    devices: Sequence[Any]

    def __post_init__(self) -> None:
        sizes, devices = dict(self.sizes), tuple(self.devices)
        free = [name for name, size in sizes.items() if fits(size, int) and size == -1]
        wrong = [name for name, size in sizes.items() if not fits(size, int) or size < 1]
        if wrong[1:] or wrong != free:
            raise InputError(f"mesh {self}: every size must be at least 1, and one may be -1: what the others leave.")
        taken = prod(size for size in sizes.values() if size > 0)
        if free and len(devices) % taken:
            raise InputError(
                f"mesh {self}: {taken} does not divide the {len(devices)} devices; choose {divisors(len(devices))}."
            )
        sizes.update(dict.fromkeys(free, len(devices) // taken))
        if prod(sizes.values()) != len(devices):
            raise InputError(
                f"mesh {self} needs {taken} devices, but there are {len(devices)}; make the two numbers equal."
            )
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "devices", devices)

    def at(self, **places: int) -> Mesh:
        """Return the mesh of the other axes at some places, from 0. Raises InputError for an unknown axis or place."""
        if wrong := [place for place in places.values() if not fits(place, int)]:
            raise InputError(f"mesh {self} has no place {named(wrong[0])}; a place is a number from 0, as dp=0.")
        for name, place in places.items():
            if name not in self.sizes:
                raise InputError(f"mesh {self}: {unknown('axis', name, self.sizes)}")
            if not 0 <= place < self.sizes[name]:
                raise InputError(f"mesh {self} has places 0 to {self.sizes[name] - 1} along {name}, but not {place}.")
        wheres = (dict(zip(self.sizes, where, strict=True)) for where in product(*map(range, self.sizes.values())))
        chosen = [d for where, d in zip(wheres, self.devices, strict=True) if where | places == where]
        return Mesh({name: size for name, size in self.sizes.items() if name not in places}, chosen)

    def by_server(self, name: str) -> tuple[int, ...]:
        """Return the sizes of the cuts that make an axis, one cut after the other: of local devices by server, then
        inside of each, so that sums are made there first (as NCCL does); one number for others.

        >>> from superscaler.cluster import Cluster
        >>> mesh = Cluster.of("lab", "local", servers=2, devices_per_server=4).mesh(dp=4, tp=2)
        >>> mesh.by_server("dp"), mesh.by_server("tp")
        ((2, 2), (2,))
        """
        line = self.at(**dict.fromkeys(self.sizes.keys() - {name}, 0)).devices
        servers = [device.server if getattr(device, "kind", "") == LOCAL else 0 for device in line]
        counts = [len(list(some)) for _, some in groupby(servers)]
        is_nested = len(set(counts)) == 1 and 1 < len(counts) < len(line)
        return (len(counts), counts[0]) if is_nested else (len(line),)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.sizes.items())
