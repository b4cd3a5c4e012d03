"""The links of a cluster by class."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from math import log


@dataclass(frozen=True, slots=True)
class Link:
    """A link: `alpha`, the seconds of a message beside its bytes; `bandwidth`, bytes per second, one way."""

    alpha: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Links:
    """Speeds of links. A server has `nics` NICs, its devices in equal shares; None is one for each device.

    device    a copy inside a device
    pair      a message between two devices of a server
    intra     bytes that each device of a server sends in a collective (the bus bandwidth of nccl-tests)
    network   one NIC
    host      a copy between a device and its host, while all devices of the server copy
    steps     seconds of a byte in collectives beside those of the bandwidth, by the bytes that a device sends in a step
              inside a server, or could send in the time of a step between servers
    curves    measured seconds beside those of the links, by kind of collective and bytes of a device's source
    starts    measured seconds of the compute stream to start one, by kind and bytes of a device's source
    """

    device: Link
    pair: Link
    intra: Link
    network: Link
    nics: int | None
    host: Link = Link(10e-6, 25e9)
    steps: Mapping[int, float] = field(default_factory=dict, hash=False)
    curves: Mapping[str, Mapping[int, float]] = field(default_factory=dict, hash=False)
    starts: Mapping[str, Link] = field(default_factory=dict, hash=False)

    def start(self, kind: str, size: float) -> float:
        """Return the seconds of a device to start a collective, without computation; 0 if not measured."""
        link = self.starts.get(kind)
        return link.alpha + size / link.bandwidth if link else 0.0

    def curve(self, kind: str, size: float) -> float:
        """Return the factor of a collective's time over that of the links, interpolated along log(size)."""
        return _between(self.curves.get(kind, {}), size)

    def step(self, size: float) -> float:
        """Return the factor of the seconds of a byte in steps of a size, interpolated along log(size)."""
        return _between(self.steps, size)

    def nic(self, device: int, per_server: int) -> tuple[int, float]:
        """Return the number of a device's NIC, and the bytes per second of its NICs if it has several."""
        nics = per_server if self.nics is None else self.nics
        server, place = divmod(device, per_server)
        if nics >= per_server:
            return device, self.network.bandwidth * nics / per_server
        return server * per_server + place * nics // per_server, self.network.bandwidth


def _between(points: Mapping[int, float], size: float) -> float:
    """Return the number at a size, interpolated along log(size); 1 where there are none."""
    found = sorted(points.items())
    if not found or size >= found[-1][0]:
        return found[-1][1] if found else 1.0
    for (low, first), (high, last) in pairwise(found):
        if low < size <= high:
            return first + (last - first) * log(size / low) / log(high / low)
    return found[0][1]


# Processes on this machine, on any device that torch finds: nothing is known about these beforehand.
LOCAL = "local"
