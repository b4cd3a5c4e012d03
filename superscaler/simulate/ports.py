"""The ports of a cluster: transfers that use one at the same time share its bandwidth.

A transfer keeps a port busy for its bytes over the bandwidth of the port. Two transfers on a port slow each other for
as long as both have bytes left, as fair shares do. No transfer ends later than if all bytes before it went first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from superscaler.cluster import Cluster
from superscaler.cluster.seconds import Port
from superscaler.ir.grid import Ints

Floats = NDArray[np.float64]
# Times that differ by less are equal: what rounding leaves.
EQUAL = 1e-12


def even(times: Floats) -> Floats:
    """Return one number for numbers that are all equal."""
    return times[:1] if len(times) == 1 or times.min() == times.max() else times


def of_rows(times: Floats, rows: Ints) -> Floats:
    """Return some rows of numbers, of which one stands for equal ones."""
    return times if len(times) == 1 else times[rows]


@dataclass(eq=False)
class Route:
    """Groups that run one collective, or pairs that send one message each, on their ports.

    `seconds` of each group without others; `loads`: the seconds for which they keep each of `ports` busy.
    `users`: the groups that use the first port, then those of the next one, which begin at `port_starts`; `used`: the
    ports of the first group, then those of the next one, which begin at `group_starts`.
    """

    seconds: Floats
    ports: Ints
    loads: Floats
    users: Ints
    port_starts: Ints
    used: Ints
    group_starts: Ints
    bytes: Mapping[str, float]

    def of_ports(self, times: Floats) -> Floats:
        """Return the earliest time of the groups of each port."""
        return times if len(times) == 1 else np.minimum.reduceat(times[self.users], self.port_starts)

    def of_groups(self, delays: Floats) -> Floats:
        """Return the largest delay of the ports of each group."""
        return np.maximum.reduceat(delays[self.used], self.group_starts)


@dataclass(eq=False)
class Transfer:
    """A route that is taken once. Times are of its groups: all ends are there (`met`), bytes move, bytes are there.

    `began` and `delays` are of its ports.
    """

    route: Route
    met: Floats = field(default_factory=lambda: np.zeros(1))
    start: Floats = field(default_factory=lambda: np.zeros(1))
    end: Floats = field(default_factory=lambda: np.zeros(1))
    began: Floats = field(default_factory=lambda: np.zeros(1))
    delays: Floats | None = None

    def set_end(self) -> None:
        late = 0.0 if self.delays is None else self.route.of_groups(self.delays)
        self.end = even(self.start + self.route.seconds + late)


class Ports:
    """The ports of a cluster, each busy until some time. Transfers begin in the order of time."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._number: dict[Port, int] = {}
        self._busy = np.zeros(0)
        self._routes: dict[Hashable, Route] = {}
        self._common: dict[tuple[int, int], tuple[Ints, Ints]] = {}
        self._active: dict[int, Transfer] = {}

    def route(self, kind: str, groups: Ints, size: float) -> Route:
        """Return the route of a collective in groups of several devices [groups, members]."""
        key = kind, size, groups.shape, groups.tobytes()
        if key not in self._routes:
            self._routes[key] = self._route(kind, groups, size)
        return self._routes[key]

    def _route(self, kind: str, groups: Ints, size: float) -> Route:
        way = self.cluster.way(kind, groups.tolist(), size)
        for port in way.loads:
            self._number.setdefault(port, len(self._number))
        self._busy = np.append(self._busy, np.zeros(len(self._number) - len(self._busy)))
        place = {port: n for n, port in enumerate(way.loads)}
        pairs = np.array([(place[port], g) for g, some in enumerate(way.ports) for port in some])
        by_port = pairs[np.argsort(pairs[:, 0], kind="stable")]
        return Route(
            seconds=even(np.array([latency + slope * size for latency, slope in way.lines])),
            ports=np.array([self._number[port] for port in way.loads]),
            loads=np.array(list(way.loads.values())) * size,
            users=by_port[:, 1],
            port_starts=np.unique(by_port[:, 0], return_index=True)[1],
            used=pairs[:, 0],
            group_starts=np.unique(pairs[:, 1], return_index=True)[1],
            bytes={name: amount * size for name, amount in way.bytes.items()},
        )

    def begin(self, transfer: Transfer) -> None:
        """Set the end of a transfer that starts, and move those of transfers that it slows."""
        route = transfer.route
        busy, began = self._busy[route.ports], route.of_ports(transfer.start)
        transfer.began = began
        if (busy - began > EQUAL).any():
            self._share(transfer, np.broadcast_to(began, busy.shape), busy)
        self._busy[route.ports] = np.maximum(busy, began) + route.loads
        transfer.set_end()
        self._active[id(transfer)] = transfer

    def end(self, transfer: Transfer) -> None:
        del self._active[id(transfer)]

    def _share(self, transfer: Transfer, began: Floats, busy: Floats) -> None:
        """Delay a transfer, and those that are under way on its ports, by the time for which each has the other beside
        it.
        """
        loads, delays = transfer.route.loads, np.zeros(len(busy))
        for other in self._active.values():
            mine, theirs = self._ports_of_both(transfer.route, other.route)
            if not len(mine):
                continue
            if other.delays is None:
                other.delays = np.zeros(len(other.route.ports))
            ends = (other.began + other.route.loads + other.delays)[theirs]
            both = np.minimum(loads[mine], np.maximum(ends - began[mine], 0.0))
            delays[mine] += both
            other.delays[theirs] += both
            other.set_end()
        transfer.delays = np.minimum(delays, np.maximum(busy - began, 0.0))

    def _ports_of_both(self, one: Route, other: Route) -> tuple[Ints, Ints]:
        key = id(one), id(other)
        if key not in self._common:
            _, mine, theirs = np.intersect1d(one.ports, other.ports, return_indices=True)
            self._common[key] = mine, theirs
        return self._common[key]
