"""`Cluster`: the devices of a plan, and their text form."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from superscaler.cluster.devices import DeviceKind, Preset
from superscaler.cluster.known import PRESETS
from superscaler.cluster.links import LOCAL, Links
from superscaler.cluster.mesh import Mesh
from superscaler.cluster.seconds import COLLECTIVES, Topology, Way, least, lines, steps, ways
from superscaler.errors import InputError, unknown
from superscaler.specs.arguments import Numbered, checked
from superscaler.specs.file_errors import reading
from superscaler.specs.options import FULL, HALVES

_NUMBER = re.compile(r"[0-9]{1,9}")
_SHAPE = re.compile(r"([0-9]{1,9})x([0-9]{1,9})")
# More devices than any machine has: each is an object, so a typing error must not fill the memory.
_MOST = 1_000_000
_FORMS = "write local:N, PRESET:SERVERSxDEVICES (as v100:4x8), or the path of a YAML file"


@dataclass(frozen=True, slots=True)
class Device:
    """A worker. `kind`: the name of a preset, or `local`. `is_host`: its host, not itself."""

    id: int
    server: int
    kind: str
    is_host: bool = False

    @property
    def host(self) -> Device:
        """The device's share of the memory of its server's CPU, which the device's own process fills and empties."""
        return replace(self, is_host=True)


class Devices(Numbered[Device]):
    """Devices by number."""

    __slots__ = ()
    NOUN = "device"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Servers with equally many devices each, numbered server by server. `Cluster.parse(str(c)) == c`.

    `links` have seconds and bytes a second. Texts of `parse`: "local:4", "v100:4x8", a YAML file (docs/clusters.md).

    >>> cluster = Cluster.parse("v100:4x8")
    >>> cluster.servers, len(cluster.devices), cluster.devices[8].server
    (4, 32, 1)
    """

    name: str
    devices: Devices = field(hash=False)
    devices_per_server: int
    links: Links
    # Facts about the devices; None for local devices without a file.
    device_kind: DeviceKind | None

    @classmethod
    def local(cls, n: int) -> Cluster:
        """Return `n` devices of this machine.

        >>> str(Cluster.local(4))
        'local:4'
        """
        return cls.of(LOCAL, LOCAL, 1, n)

    @classmethod
    @checked
    def preset(cls, name: str, servers: int, devices_per_server: int) -> Cluster:
        """Return a cluster of a known kind of device. Raises InputError for an unknown preset or a number below 1.

        >>> str(Cluster.preset("v100", servers=4, devices_per_server=8))
        'v100:4x8'
        """
        if name not in PRESETS:
            raise InputError(unknown("preset", name, PRESETS))
        return cls.of(name, name, servers, devices_per_server)

    @classmethod
    def of(
        cls,
        name: str,
        kind: str,
        servers: int,
        devices_per_server: int,
        links: Links | None = None,
        device_kind: DeviceKind | None = None,
    ) -> Cluster:
        """Return a cluster under a name of its own. `kind`, the name of a preset or `local`, provides what is None.

        Raises InputError for an unknown preset, a number below 1, or NICs and devices that do not divide.
        """
        if kind not in PRESETS:
            raise InputError(f"cluster '{name}': {unknown('preset', kind, PRESETS)}")
        if not name or not name.isprintable():
            raise InputError(f"a cluster cannot be called {name!r}; give a name of printable characters.")
        if not isinstance(servers, int) or not isinstance(devices_per_server, int):
            raise InputError(
                f"cluster '{name}' would have {servers!r} servers with {devices_per_server!r} devices each; "
                "both must be whole numbers."
            )
        if servers < 1 or devices_per_server < 1:
            raise InputError(
                f"cluster '{name}' would have {servers} servers with {devices_per_server} devices each; "
                "both numbers must be 1 or more."
            )
        if servers * devices_per_server > _MOST:
            raise InputError(
                f"cluster '{name}' would have {servers * devices_per_server} devices; at most {_MOST} fit."
            )
        links = links or PRESETS[kind].links
        if links.nics and links.nics % devices_per_server and devices_per_server % links.nics:
            raise InputError(
                f"cluster '{name}' would share {links.nics} NICs among the {devices_per_server} devices of a server; "
                "one number must divide the other."
            )
        devices = Devices(Device(i, i // devices_per_server, kind) for i in range(servers * devices_per_server))
        return cls(name, devices, devices_per_server, links, device_kind or PRESETS[kind].device)

    @classmethod
    @checked
    def parse(cls, spec: str) -> Cluster:
        """Return the cluster of `local:4`, `v100:4x8`, a YAML file or a line of YAML. Raises InputError."""
        if spec.endswith((".yaml", ".yml")):
            return _from_file(Path(spec))
        if spec.startswith("{"):
            return _from_yaml(spec, "the cluster")
        name, _, size = spec.partition(":")
        if name == LOCAL:
            if not _NUMBER.fullmatch(size):
                raise InputError(f"cluster '{spec}' has no number of processes; write local:N, as local:4.")
            return cls.local(int(size))
        if name not in PRESETS:
            raise InputError(f"{unknown('cluster', name, PRESETS)} Or {_FORMS}.")
        found = _SHAPE.fullmatch(size)
        if found is None:
            raise InputError(f"cluster '{spec}' has no servers x devices; write {name}:SERVERSxDEVICES, as {name}:4x8.")
        return cls.preset(name, int(found[1]), int(found[2]))

    def mesh(self, **sizes: int) -> Mesh:
        """Return all devices along named axes, the outer first, as `cluster.mesh(dp=2, tp=4)`. See `Mesh`."""
        return Mesh(sizes, self.devices)

    @property
    def hosts(self) -> Devices:
        """Return the host of each device."""
        return Devices(device.host for device in self.devices)

    @property
    def kind(self) -> str:
        """The name of the preset, or `local`."""
        return next(iter(self.devices)).kind

    @property
    def servers(self) -> int:
        """Return the number of servers."""
        return len(self.devices) // self.devices_per_server

    @property
    def precision(self) -> str:
        """The precision of models on this cluster, unless one is asked for: that of the fastest products of its GPUs.

        >>> Cluster.parse("a100:1x8").precision, Cluster.parse("v100:1x8").precision, Cluster.parse("local:8").precision
        ('bf16', 'fp16', 'fp32')
        """
        kind = self.device_kind
        if kind is None or (self.kind == LOCAL and not (kind.speeds and kind.speeds.units)):
            return FULL
        return next((name for name, dtype in HALVES.items() if dtype in kind.flops), FULL)

    @property
    def is_local(self) -> bool:
        """Whether this machine alone can run it as it is."""
        return self.kind == LOCAL and self.servers == 1

    @checked
    def seconds(self, kind: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """Return the seconds in which all groups together run one collective on a source of `size` bytes per device.

        Groups are device ids in chunk order: (sender, *receivers) in `broadcast` and `rd_scatter`, (*senders, receiver)
        in `reduce` and `rd_gather`, (sender, receiver) in `send` and in `permute`, `move` and `messages`, the names of
        messages by their origin. `chunk` and `value_chunk` are local and take no time. Raises InputError for an unknown
        kind or device.

        >>> round(Cluster.preset("v100", 1, 8).seconds("all_reduce", [range(8)], 120e6), 6)
        0.001777
        """
        ways = lines(self._topology, kind, tuple(map(tuple, groups)))
        return min(max((latency + slope * size for latency, slope in way), default=0.0) for way in ways)

    def way(self, kind: str, groups: Sequence[Sequence[int]], size: float) -> Way:
        """Return the way of `seconds`, with the ports that each group uses, scaled by the factors of the links for its
        steps and for the collective. A group has two devices or more, or is the pair of a device and its host.
        """
        found = ways(self._topology, kind, tuple(map(tuple, groups)))
        best = min(found, key=lambda way: max(latency + slope * size for latency, slope in way.lines))
        if kind in COLLECTIVES:
            # A step of a slower ring is as a longer one inside a server.
            seconds = size * max(slope for _, slope in best.lines) / steps(kind, max(map(len, groups)))
            best = best.times(self.links.step(seconds * self.links.intra.bandwidth), latencies=1.0)
        return best.times(self.links.curve(kind, size))

    def bound(self, kind: str, groups: Sequence[Sequence[int]], size: float) -> float:
        """Return a lower bound on the seconds of any way to run the collectives of `seconds`: bytes over bandwidth.

        >>> round(Cluster.preset("v100", 1, 8).bound("all_reduce", [range(8)], 120e6), 6)
        0.00175
        """
        return least(self._topology, kind, tuple(map(tuple, groups))) * size

    @property
    def _topology(self) -> Topology:
        # gloo has no hierarchical collectives.
        return Topology(self.links, self.devices_per_server, len(self.devices), rings=self.kind == LOCAL)

    def __str__(self) -> str:
        is_preset = Preset(self.links, self.device_kind) == PRESETS[self.kind]
        if self.name == self.kind and self.is_local and is_preset:
            return f"{self.name}:{len(self.devices)}"
        if self.name == self.kind and self.kind != LOCAL and is_preset:
            return f"{self.name}:{self.servers}x{self.devices_per_server}"
        shape = f"servers: {self.servers}, devices_per_server: {self.devices_per_server}"
        more = "" if is_preset else f", {_overrides(self)}"
        return f"{{name: {json.dumps(self.name, ensure_ascii=False)}, preset: {self.kind}, {shape}{more}}}"


def _from_file(path: Path) -> Cluster:
    if not os.path.isfile(path):
        raise InputError(f"there is no cluster file {path}; {_FORMS}.")
    with reading(f"cluster file {path}", "give a YAML file in UTF-8", (ValueError,), "text in UTF-8"):
        text = path.read_text(encoding="utf-8")
    return _from_yaml(text, str(path))


# Imported late: only cluster files need YAML and its checks.
def _from_yaml(text: str, where: str) -> Cluster:
    from superscaler.cluster.file import ClusterFile, joined, read

    found = read(text, where, ClusterFile)
    name = found.preset if found.name is None else found.name
    # For an unknown preset `of` has the error.
    own = joined(found, PRESETS[found.preset], found.preset, where) if found.preset in PRESETS else None
    links, device = (own.links, own.device) if own else (None, None)
    return Cluster.of(name, found.preset, found.servers, found.devices_per_server, links, device)


def _overrides(cluster: Cluster) -> str:
    from superscaler.cluster.file import write

    return write(PRESETS[cluster.kind], cluster.links, cluster.device_kind)
