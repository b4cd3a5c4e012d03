"""Closed formulas for the time of collectives: alpha and beta by link class, rings, hierarchies, shared NICs.

Everything is linear in the size of the source. So the part that depends on the groups only is computed once: one
latency and one slope per group, for each way to run the collective.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from superscaler.cluster.links import Link, Links
from superscaler.collectives import ALL, KINDS, ONE, PART, TILE, Ends, Messages, Traffic
from superscaler.errors import InputError, unknown
from superscaler.groups import group_by

Groups = tuple[tuple[int, ...], ...]
# Seconds of latency, and seconds per byte.
Line = tuple[float, float]
# A part of the cluster that moves one byte after the other: its kind, and the number of its NIC or device.
Port = tuple[str, object]


@dataclass(frozen=True, slots=True)
class Topology:
    """The facts that determine the time of a collective, beside groups and size. `rings`: only rings are possible."""

    links: Links
    per_server: int
    count: int
    rings: bool = False


# Those of rings, chains and exchanges; the others are messages.
COLLECTIVES: Mapping[str, Traffic] = {
    name: kind.traffic for name, kind in KINDS.items() if isinstance(kind.traffic, Traffic)
}
# Copies between a device and its host; both ends have the number of the device.
COPIES = ("to_host", "to_device")
_PAIRS = ("send", "permute", "move", "messages", *COPIES)
# (sender, receiver, share of the source) of each message: from the first to the others, or from all to the last.
MESSAGES: Mapping[str, Messages] = {
    "rd_scatter": lambda group: [(group[0], d, 1 / (len(group) - 1)) for d in group[1:]],
    **{name: kind.traffic for name, kind in KINDS.items() if not isinstance(kind.traffic, Traffic)},
    **dict.fromkeys(_PAIRS, lambda group: [(group[0], group[1], 1)]),
}
# The servers over which NCCL sends less than a ring: the tree of an all_reduce over two (its author, NVIDIA/nccl#946).
_TREE = 2
# All servers of a group together.
_ALL = -1
LOCAL_KINDS = ("chunk", "value_chunk")


@dataclass(frozen=True, slots=True)
class _LinkTime:
    """The needs of a group: seconds of latency, bytes inside by each device, and bytes out of and into each server.

    Bytes are per byte of the source. Rings use both classes of link together, hierarchies one after the other.
    """

    latency: float
    inside: float
    out: Mapping[int, float]
    into: Mapping[int, float]
    at_once: bool


# The devices of a group by server, the server of its first device first.
_Members = Mapping[int, list[int]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run the collectives of several groups together.

    `lines` and `ports` of each group; `loads`: the busy seconds of a port per byte, by all groups together. `bytes` per
    byte of the source, by class of link: `server`, `network`, `host`.
    """

    lines: tuple[Line, ...]
    ports: tuple[tuple[Port, ...], ...]
    loads: Mapping[Port, float]
    bytes: Mapping[str, float]

    def times(self, factor: float, latencies: float | None = None) -> Way:
        """Return the way with all seconds multiplied by a factor; `latencies`: by another one."""
        first = factor if latencies is None else latencies
        if factor == first == 1.0:
            return self
        longer = tuple((first * latency, factor * slope) for latency, slope in self.lines)
        return replace(self, lines=longer, loads={port: factor * load for port, load in self.loads.items()})


@lru_cache(maxsize=1 << 16)
def lines(topology: Topology, kind: str, groups: Groups) -> tuple[tuple[Line, ...], ...]:
    """Return, for each way, (latency, seconds per byte) of the groups: the slowest group counts, the best way is taken.

    Raises InputError for an unknown kind or device.
    """
    busy = _busy(topology, kind, groups)
    if not busy:
        return ((),)
    if kind in MESSAGES:
        return ((_messages(topology, kind, busy),),)
    spread = [_by_server(topology, group) for group in busy]
    shares = [_shares(topology, members) for members in spread]
    return tuple({_highest(_timed(topology, shares, uses).lines): None for uses in _uses(topology, kind, spread)})


def steps(kind: str, count: int) -> int:
    """Return the steps of a collective of several devices: in each, all send at once."""
    return COLLECTIVES[kind].laps * (count - 1)


def ways(topology: Topology, kind: str, groups: Groups) -> list[Way]:
    """Return the ways that NCCL, or gloo, has to run a collective in groups of several devices, with their ports."""
    if kind in MESSAGES:
        return [_posted(topology, kind, groups)]
    spread = [_by_server(topology, group) for group in _busy(topology, kind, groups)]
    shares = [_shares(topology, members) for members in spread]
    if not _is_all_reduce(kind) or max(map(len, spread)) > _TREE:
        topology = replace(topology, rings=True)
    return [_inside(topology, spread, uses, _timed(topology, shares, uses)) for uses in _uses(topology, kind, spread)]


def _uses(topology: Topology, kind: str, spread: list[dict[int, list[int]]]) -> list[list[_LinkTime]]:
    """Return, for each algorithm (an exchange; a ring, a hierarchy), how long each group uses each link."""
    found = [_exchange if _is_exchange(kind) else _ring]
    found += [_hierarchy] if not topology.rings and any(1 < len(m) < sum(map(len, m.values())) for m in spread) else []
    return [[way(topology, kind, members) for members in spread] for way in found]


@lru_cache(maxsize=1 << 16)
def least(topology: Topology, kind: str, groups: Groups) -> float:
    """Return a lower bound on the seconds per byte of the source over all ways."""
    busy = _busy(topology, kind, groups)
    if not busy:
        return 0.0
    if kind in MESSAGES:
        return _messages(topology, kind, busy)[1]
    spread = [_by_server(topology, group) for group in busy]
    return max(_needs(topology, kind, some) for some in [spread, *([members] for members in spread)])


def _needs(topology: Topology, kind: str, spread: list[dict[int, list[int]]]) -> float:
    """Return the least seconds per byte that the devices of these groups, and their servers, send or receive."""
    nics: dict[int, dict[int, float]] = defaultdict(dict)
    loads: dict[tuple[str, int], float] = defaultdict(float)
    found = []
    for members in spread:
        found.append(COLLECTIVES[kind].sent(sum(map(len, members.values()))) / _fastest(topology, members))
        for way, servers in zip(("out", "into"), _needed(kind, members), strict=True):
            for server, amount in servers.items():
                loads[way, server] += amount
        for server, devices in members.items():
            for place in (server, _ALL):
                nics[place].update(topology.links.nic(d, topology.per_server) for d in devices)
    return max([*found, *(amount / sum(nics[server].values()) for (_, server), amount in loads.items())])


def _busy(topology: Topology, kind: str, groups: Groups) -> Groups:
    """Return the groups that use links. Raises InputError for an unknown kind or device."""
    if kind not in COLLECTIVES and kind not in MESSAGES and kind not in LOCAL_KINDS:
        raise InputError(unknown("collective", kind, [*COLLECTIVES, *MESSAGES, *LOCAL_KINDS]))
    for group in groups:
        strange = [d for d in group if not 0 <= d < topology.count]
        if strange:
            raise InputError(f"{kind}: there is no device {strange[0]} among the {topology.count} of the cluster.")
        if kind in _PAIRS and len(group) != 2:
            raise InputError(f"{kind}: {group} has {len(group)} devices; write pairs (sender, receiver).")
    # What goes to one is a reversed broadcast.
    is_back = kind in COLLECTIVES and KINDS[kind].read is ONE
    ordered = (group[::-1] if is_back else group for group in groups)
    return () if kind in LOCAL_KINDS else tuple(group for group in ordered if len(group) > 1)


def _is_all_reduce(kind: str) -> bool:
    return KINDS[kind].ends == (PART, ALL)


def _is_exchange(kind: str) -> bool:
    return KINDS[kind].ends == (TILE, TILE)


def _is_chain(kind: str) -> bool:
    return ONE in KINDS[kind].ends


def _by_server(topology: Topology, group: Iterable[int]) -> dict[int, list[int]]:
    return group_by(group, lambda device: device // topology.per_server)


def _between(kind: str, members: _Members, amount: float) -> tuple[dict[int, float], dict[int, float]]:
    """Return the bytes out of and into each server; a broadcast goes down a chain from its first, a reduce up."""
    if len(members) == 1:
        return {}, {}
    servers, is_from_one = list(members), KINDS[kind].held is ONE
    ends = (servers[:-1], servers[1:])[:: 1 if is_from_one else -1]
    out, into = ends if _is_chain(kind) else (servers, servers)
    return dict.fromkeys(out, amount), dict.fromkeys(into, amount)


def _ring(topology: Topology, kind: str, members: _Members) -> _LinkTime:
    """One ring through all devices, server by server."""
    n, row, links = sum(map(len, members.values())), COLLECTIVES[kind], topology.links
    far = len(members) - 1
    latency = row.laps * ((n - 1 - far) * links.intra.alpha + far * links.network.alpha)
    inside = row.sent(n) if n > len(members) else 0.0
    return _LinkTime(latency, inside, *_between(kind, members, row.sent(n)), at_once=True)


def _exchange(topology: Topology, kind: str, members: _Members) -> _LinkTime:
    """Each device sends to each other one, one after the other."""
    sizes = {server: len(devices) for server, devices in members.items()}
    n, links = sum(sizes.values()), topology.links
    latency = max((g - 1) * links.intra.alpha + (n - g) * links.network.alpha for g in sizes.values())
    across = {server: g * (n - g) / n for server, g in sizes.items()} if len(sizes) > 1 else {}
    return _LinkTime(latency, (max(sizes.values()) - 1) / n, across, across, at_once=False)


def _hierarchy(topology: Topology, kind: str, members: _Members) -> _LinkTime:
    """Inside the servers, and between devices of equal place in them; an exchange or a ring for uneven servers."""
    sizes, row, links = {len(devices) for devices in members.values()}, COLLECTIVES[kind], topology.links
    g, servers = max(sizes), len(members)
    if g == 1 or servers == 1 or (len(sizes) > 1 and not _is_chain(kind)):
        return (_exchange if _is_exchange(kind) else _ring)(topology, kind, members)
    latency = row.laps * ((g - 1) * links.intra.alpha + (servers - 1) * links.network.alpha)
    return _LinkTime(latency, row.inside(g, servers), *_between(kind, members, row.across(g, servers)), at_once=False)


def _shares(topology: Topology, members: _Members) -> dict[int, dict[int, float]]:
    """Return, per server, the seconds on each NIC for a byte that leaves evenly by the NICs of the members there."""
    found: dict[int, dict[int, float]] = {}
    for server, devices in members.items() if len(members) > 1 else ():
        mine = found[server] = defaultdict(float)
        for number, speed in (topology.links.nic(d, topology.per_server) for d in devices):
            mine[number] += 1 / len(devices) / speed
    return found


def _timed(topology: Topology, shares: list[dict[int, dict[int, float]]], uses: list[_LinkTime]) -> Way:
    """Return the lines, ports and loads of groups, given their needs. A NIC serves all groups."""
    loads: dict[Port, float] = defaultdict(float)
    touched: list[list[Port]] = []
    for nics, use in zip(shares, uses, strict=True):
        mine = list[Port]()
        for way, servers in (("NIC out", use.out), ("NIC into", use.into)):
            for server, amount in servers.items():
                for number, per_byte in nics[server].items():
                    loads[way, number] += amount * per_byte
                    mine.append((way, number))
        touched.append(mine)
    found, speed = list[Line](), topology.links.intra.bandwidth
    for use, mine in zip(uses, touched, strict=True):
        inside, across = use.inside / speed, max((loads[nic] for nic in mine), default=0.0)
        found.append((use.latency, max(inside, across) if use.at_once else inside + across))
    return Way(tuple(found), tuple(map(tuple, touched)), loads, {})


def _inside(topology: Topology, spread: list[dict[int, list[int]]], uses: list[_LinkTime], way: Way) -> Way:
    """Return a way with the ports inside the servers too, which no two of its groups share, and its bytes."""
    loads, ports, moved = dict(way.loads), list(way.ports), dict.fromkeys(("server", "network"), 0.0)
    for n, (members, use) in enumerate(zip(spread, uses, strict=True)):
        devices = [device for some in members.values() for device in some] if use.inside else []
        mine = [(side, device) for device in devices for side in ("out of", "into")]
        ports[n] += tuple(mine)
        loads |= dict.fromkeys(mine, use.inside / topology.links.intra.bandwidth)
        # Of a ring, one device of each server sends to another server.
        moved["server"] += use.inside * max(len(devices) - len(members) * (use.at_once and len(members) > 1), 0)
        moved["network"] += sum(use.out.values())
    return Way(way.lines, tuple(ports), loads, moved)


def _highest(found: Iterable[Line]) -> tuple[Line, ...]:
    """Return the lines that no other one dominates."""
    some = set(found)
    return tuple(a for a in some if not any(b != a and b[0] >= a[0] and b[1] >= a[1] for b in some))


def _messages(topology: Topology, kind: str, groups: Groups) -> Line:
    """Return the latency and the slope of messages that start together."""
    found = _posted(topology, kind, groups).lines
    return max(latency for latency, _ in found), max(slope for _, slope in found)


def _posted(topology: Topology, kind: str, groups: Groups) -> Way:
    """Return the one way of messages. A device posts its messages one after the other; messages on one link share its
    speed.
    """
    latencies: dict[Port, float] = defaultdict(float)
    loads: dict[Port, float] = defaultdict(float)
    moved: dict[str, float] = defaultdict(float)
    ends, ports = ([set[Port]() for _ in groups] for _ in range(2))
    for at, (sender, receiver, share) in ((n, m) for n, group in enumerate(groups) for m in MESSAGES[kind](group)):
        link, where, used = _path(topology, kind, sender, receiver)
        for port, speed in used:
            loads[port] += share / speed
            ports[at].add(port)
        for end in {("out", sender), ("into", receiver)}:
            latencies[end] += link.alpha
            ends[at].add(end)
        moved[where] += share
    found = ((max(latencies[e] for e in ends[n]), max(loads[p] for p in ports[n])) for n in range(len(groups)))
    return Way(tuple(found), tuple(map(tuple, ports)), loads, moved)


def _path(topology: Topology, kind: str, sender: int, receiver: int) -> tuple[Link, str, list[tuple[Port, float]]]:
    """Return the link of a message, its class, and the bytes per second of each port."""
    links, per_server = topology.links, topology.per_server
    if sender == receiver:
        link, name = (links.host, kind) if kind in COPIES else (links.device, "copy")
        return link, "host" if kind in COPIES else "device", [((name, sender), link.bandwidth)]
    if sender // per_server == receiver // per_server:
        link, whole = links.pair, max(links.pair.bandwidth, links.intra.bandwidth)
        between = ("between", (sender, receiver)), link.bandwidth
        return link, "server", [between, (("out of", sender), whole), (("into", receiver), whole)]
    ends = [(way, *links.nic(device, per_server)) for way, device in (("NIC out", sender), ("NIC into", receiver))]
    return links.network, "network", [((way, number), speed) for way, number, speed in ends]


def _fastest(topology: Topology, members: _Members) -> float:
    """Return the bytes per second of the fastest link by which a device of the group can send to another of it."""
    found = [topology.links.intra.bandwidth] if any(len(devices) > 1 for devices in members.values()) else []
    if len(members) > 1:
        found += [topology.links.nic(d, topology.per_server)[1] for devices in members.values() for d in devices]
    return max(found)


def _needed(kind: str, members: _Members) -> tuple[dict[int, float], dict[int, float]]:
    """Return the least bytes out of and into each server. An all_reduce may leave its bytes to any server."""
    n, servers = sum(map(len, members.values())), len(members)
    if servers == 1:
        return {}, {}
    away = {server: n - len(devices) for server, devices in members.items()}
    match KINDS[kind].ends:
        case Ends.PART, Ends.ALL:
            return {_ALL: 2.0 * (servers - 1)}, {}
        case Ends.TILE, Ends.ALL:
            return {}, {s: float(a) for s, a in away.items()}
        case Ends.PART, Ends.TILE:
            return {s: a / n for s, a in away.items()}, {}
        case Ends.TILE, Ends.TILE:
            both = {s: len(members[s]) * a / n for s, a in away.items()}
            return both, both
    first, *others = members
    ends = {first: 1.0}, dict.fromkeys(others, 1.0)
    return ends if KINDS[kind].held is ONE else (ends[1], ends[0])
