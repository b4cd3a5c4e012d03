"""The links of a cluster by class, with known numbers for those of the presets."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    curves    measured seconds beside those of the links, by kind of collective and bytes of a device's source
    starts    measured seconds of the compute stream to start one, by kind and bytes of a device's source
    """

    device: Link
    pair: Link
    intra: Link
    network: Link
    nics: int | None
    host: Link = Link(10e-6, 25e9)
    curves: Mapping[str, Mapping[int, float]] = field(default_factory=dict, hash=False)
    starts: Mapping[str, Link] = field(default_factory=dict, hash=False)

    def start(self, kind: str, size: float) -> float:
        """Return the seconds of a device to start a collective, without computation; 0 if not measured."""
        link = self.starts.get(kind)
        return link.alpha + size / link.bandwidth if link else 0.0

    def curve(self, kind: str, size: float) -> float:
        """Return the factor of a collective's time over that of the links, interpolated along log(size)."""
        points = sorted(self.curves.get(kind, {}).items())
        if not points or size >= points[-1][0]:
            return points[-1][1] if points else 1.0
        for (low, first), (high, last) in pairwise(points):
            if low < size <= high:
                return first + (last - first) * log(size / low) / log(high / low)
        return points[0][1]

    def nic(self, device: int, per_server: int) -> tuple[int, float]:
        """Return the number of a device's NIC, and the bytes per second of its NICs if it has several."""
        nics = per_server if self.nics is None else self.nics
        server, place = divmod(device, per_server)
        if nics >= per_server:
            return device, self.network.bandwidth * nics / per_server
        return server * per_server + place * nics // per_server, self.network.bandwidth


# Processes on this machine, on any device that torch finds: nothing is known about these beforehand.
LOCAL = "local"

# Seconds and bytes per second. What NCCL's own cost model says is from src/graph/topo.h and src/graph/tuning.cc of
# NVIDIA/nccl: an NVLink carries 20.0 GB/s of data one way on V100 and A100 and 20.6 on H100 (25 on the data sheets),
# 100 Gbit/s of network 12 GB/s (12.5 on the wire); a step of a ring takes 1.9 us over NVLink and 4.0 us over a network
# (protocol LL128), the latter with 1.0 us for posting it. A copy reads and writes each byte, so that its bandwidth is
# half of the memory's. The 2 us of a copy are an estimate of a kernel launch.
# A copy to the host takes 16 lanes of PCIe, of which about 80 % are data (an estimate, as are its 10 us): generation 3
# has 15.75 GB/s one way, 4 and 5 each twice that of the one before (PCI-SIG).
_NVLINK, _NETWORK, _COPY, _HOST = 1.9e-6, 5.0e-6, 2.0e-6, 10e-6
_HOPPER = 18 * 20.6e9  # 450 GB/s on the data sheet; 370 is what rings reach (NVIDIA/nccl-tests issue 212).
_NVSWITCH = Link(_NVLINK, _HOPPER)
_NVLINK_5 = Link(_NVLINK, 18 * 40.1e9)
_H100 = Links(Link(_COPY, 3350e9 / 2), _NVSWITCH, _NVSWITCH, Link(_NETWORK, 48e9), None, Link(_HOST, 50e9))

LINKS: Mapping[str, Links] = {
    # Memory 900 GB/s, 6 NVLinks (300 GB/s both ways): V100 data sheet, SXM2. A pair is joined by 2 of the 6 (derived:
    # the hybrid cube mesh of DGX-1 and its like has 1 or 2, and 2 on a ring). One InfiniBand NIC of 100 Gbit/s a
    # server, as in the paper's experiments.
    "v100": Links(
        device=Link(_COPY, 900e9 / 2),
        pair=Link(_NVLINK, 2 * 20e9),
        intra=Link(_NVLINK, 6 * 20e9),
        network=Link(_NETWORK, 12e9),
        nics=1,
        host=Link(_HOST, 12.5e9),
    ),
    # Memory 2,039 GB/s, 12 NVLinks (600 GB/s both ways) to a switch: A100 data sheet, SXM 80 GB. The 240 are derived;
    # nccl-tests show 200 to 235 (NVIDIA/nccl-tests issues 149 and 178). HDR 200 Gbit/s per GPU: DGX A100 data sheet.
    "a100": Links(
        device=Link(_COPY, 2039e9 / 2),
        pair=Link(_NVLINK, 12 * 20e9),
        intra=Link(_NVLINK, 12 * 20e9),
        network=Link(_NETWORK, 24e9),
        nics=None,
        host=Link(_HOST, 25e9),
    ),
    # Memory 3,350 GB/s, 18 NVLinks (900 GB/s both ways) to a switch: H100 data sheet, SXM. NDR 400 Gbit/s per GPU: DGX
    # H100 data sheet; 46 to 48 GB/s are expected of it (NVIDIA/nccl-tests issue 290).
    "h100": _H100,
    # As H100, but for the memory: 4,800 GB/s on the data sheet, of which a copy reaches 4,300 (measured).
    "h200": replace(_H100, device=Link(_COPY, 4300e9 / 2)),
    # NVLink 5, 18 links: NCCL counts 40.1 GB/s each (src/graph/topo.h), the data sheet 50. NIC and host as H100: DGX
    # B200 data sheet. A copy reaches 6,000 GB/s of 7,700 (newmind.ai, 2025).
    "b200": replace(_H100, device=Link(_COPY, 6000e9 / 2), pair=_NVLINK_5, intra=_NVLINK_5),
    # Two processes over gloo on two cores of a server CPU, measured by `superscaler doctor --measure` and rounded. The
    # network is an estimate: 10 Gbit/s Ethernet. Device and host are the same memory.
    "local": Links(
        device=Link(3e-6, 30e9),
        pair=Link(200e-6, 2.5e9),
        intra=Link(150e-6, 3e9),
        network=Link(200e-6, 1.25e9),
        nics=1,
        host=Link(3e-6, 30e9),
    ),
}
