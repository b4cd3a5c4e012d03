"""The ports of a cluster: transfers that use one at the same time share its bandwidth.

A transfer keeps a port busy for its bytes over the bandwidth of the port. Groups on a port have equal shares of it as
long as they have bytes left there. The delay of a group is the largest delay of its ports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from superscaler.cluster import Cluster
from superscaler.cluster.seconds import Port
from superscaler.ir.grid import Ints
from superscaler.simulate.times import Floats, Times, earliest, even, latest
from superscaler.simulate.transfers.beside import Beside

# Times that differ by less are equal: what rounding leaves.
EQUAL = 1e-12


@dataclass(eq=False)
class Route:
    """Groups that run one collective together, or pairs that send one message each, on their ports.

    `seconds`: of each group without other transfers; `loads`: the busy seconds that they cause on each of `ports`.
    `users`: the groups of the first port, then those of the next one, from `port_starts` on; `used`: the ports of the
    first group, then those of the next one, from `group_starts` on. `near`: the routes with common ports, itself
    included, with the places of these ports among its own and among theirs. `until`: its ports are busy until then by
    transfers of this route.
    """

    seconds: Times
    ports: Ints
    loads: Floats
    users: Ints
    port_starts: Ints
    used: Ints
    group_starts: Ints
    bytes: Mapping[str, float]
    near: dict[Route, tuple[Ints, Ints]] = field(default_factory=dict)
    until: float = 0.0

    @cached_property
    def load(self) -> float:
        """Return the largest of its loads."""
        return float(self.loads.max())

    @cached_property
    def counts(self) -> Ints:
        """Return the number of groups that use each port."""
        return np.diff(np.append(self.port_starts, len(self.users)))

    def left(self, beside: Beside) -> Route:
        """Return the route of the part that products do not hide."""
        left = beside.left(self.seconds)
        return replace(self, seconds=left, loads=self.loads * (latest(left) / latest(self.seconds)), near={})

    def of_ports(self, times: Times) -> Times:
        """Return the earliest time of the groups of each port."""
        return times if isinstance(times, float) else np.minimum.reduceat(times[self.users], self.port_starts)

    def of_groups(self, delays: Floats) -> Floats:
        """Return the largest delay of the ports of each group."""
        return np.maximum.reduceat(delays[self.used], self.group_starts)


@dataclass(eq=False, slots=True)
class Transfer:
    """One use of a route. Times of its groups: `met`, when all ends are there; `start`, `end`: when bytes move, when
    they are there.

    For each port: `began`; `left`, the seconds that each group still had when the last transfer began there; `delays`.
    """

    route: Route
    met: Times = 0.0
    start: Times = 0.0
    end: Times = 0.0
    began: Times = 0.0
    left: Floats | None = None
    delays: Floats | None = None

    def shared(self) -> tuple[Floats, Floats]:
        """Return the seconds left and the delays, once it shares ports."""
        if self.left is None or self.delays is None:
            self.left, self.delays = self.route.loads / self.route.counts, np.zeros(len(self.route.loads))
        return self.left, self.delays

    def set_end(self) -> None:
        late: Times = 0.0 if self.delays is None else self.route.of_groups(self.delays)
        self.end = even(self.start + self.route.seconds + late)


class Ports:
    """The ports of a cluster, each busy until some time. Transfers must begin in the order of time."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._number: dict[Port, int] = {}
        # Until when each port is busy, and when a transfer began there last.
        self._busy, self._last = np.zeros(0), np.zeros(0)
        self._routes: dict[Hashable, Route] = {}
        self._users: dict[int, list[Route]] = defaultdict(list)
        self._active: dict[int, Transfer] = {}
        # When transfers began on routes whose ports were all free, in order, until `_busy` and `_last` have it.
        self._alone: dict[Route, Times] = {}

    def route(
        self, kind: str, groups: Ints, size: float, beside: Beside | None = None, count: float = 1.0
    ) -> Route:  # fmt: skip
        """Return the route of a collective in groups of several devices [groups, members]. `beside`: what products
        hide of it; `count`: as many, one after the other, share the size.
        """
        key = kind, size, groups.shape, groups.tobytes(), beside, count
        if key not in self._routes:
            found = self._route(kind, groups, size, count)
            self._routes[key] = found if beside is None else found.left(beside)
            self._join(self._routes[key])
        return self._routes[key]

    def _route(self, kind: str, groups: Ints, size: float, count: float) -> Route:
        way = self.cluster.way(kind, groups.tolist(), size).times(1.0, count)
        for port in way.loads:
            self._number.setdefault(port, len(self._number))
        more = np.zeros(len(self._number) - len(self._busy))
        self._busy, self._last = np.append(self._busy, more), np.append(self._last, more)
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

    def _join(self, route: Route) -> None:
        """Make a route near to those with common ports."""
        ports = route.ports.tolist()
        for port in ports:
            self._users[port].append(route)
        for other in {user: None for port in ports for user in self._users[port]}:
            _, mine, theirs = np.intersect1d(route.ports, other.ports, return_indices=True)
            route.near[other], other.near[route] = (mine, theirs), (theirs, mine)

    def begin(self, transfer: Transfer) -> None:
        """Set the end of a transfer that starts, and move the ends of the transfers that it slows."""
        route = transfer.route
        transfer.began = began = route.of_ports(transfer.start)
        first = earliest(began)
        if all(other.until <= first for other in route.near):
            # Its ports are written once others need them.
            self._alone.pop(route, None)
            self._alone[route] = began
            route.until = began + route.load if isinstance(began, float) else float((began + route.loads).max())
        else:
            self._begin_beside(transfer, began)
        transfer.set_end()
        self._active[id(transfer)] = transfer

    def _begin_beside(self, transfer: Transfer, began: Times) -> None:
        self._write()
        route = transfer.route
        busy = self._busy[route.ports]
        if (busy - began > EQUAL).any():
            self._share(transfer, np.broadcast_to(began, busy.shape))
        busy = np.maximum(busy, began) + route.loads
        self._busy[route.ports], self._last[route.ports], route.until = busy, began, float(busy.max())

    def _write(self) -> None:
        """Record until when the ports of routes that were alone are busy."""
        for route, began in self._alone.items():
            self._busy[route.ports], self._last[route.ports] = began + route.loads, began
        self._alone.clear()

    def end(self, transfer: Transfer, now: float) -> None:
        """Forget a transfer. Transfers beside it have had a part of the ports until now."""
        if transfer.delays is not None:
            self._write()
            self._progress(transfer, np.full(len(transfer.delays), now))
            self._last[transfer.route.ports] = now
        del self._active[id(transfer)]

    def _share(self, transfer: Transfer, began: Floats) -> None:
        """Share busy ports between a new transfer and the transfers under way on them."""
        every = np.arange(len(began))
        users, left, counts = self._progress(transfer, began)
        users = [(transfer, every, every), *users]
        left, counts = np.vstack([transfer.shared()[0][None], left]), np.vstack([transfer.route.counts[None], counts])
        # With equal shares, a group has waited in the end for as much of each other one as it has left itself.
        ends = began + (counts[None] * np.minimum(left[:, None], left[None])).sum(axis=1)
        for row, end, (other, mine, theirs) in zip(left, ends, users, strict=True):
            _, delays = other.shared()
            late = end[mine] - (other.began + other.route.loads)[theirs]
            delays[theirs] = np.where(row[mine] > EQUAL, late, delays[theirs])
            other.set_end()

    def _progress(self, transfer: Transfer, now: Floats) -> tuple[list[tuple[Transfer, Ints, Ints]], Floats, Floats]:
        """Advance all transfers under way on the ports of a transfer to a time. Return this transfer with the places of
        its ports among those, the seconds that its groups have left there, and their number.
        """
        near = transfer.route.near
        users = [(other, *near[other.route]) for other in self._active.values() if other.route in near]
        left, counts = np.zeros((2, len(users), len(now)))
        last = self._last[transfer.route.ports]
        for row, count, (other, mine, theirs) in zip(left, counts, users, strict=True):
            own, delays = other.shared()
            is_there = (other.began + other.route.loads + delays)[theirs] > last[mine] + EQUAL
            row[mine], count[mine] = own[theirs] * is_there, other.route.counts[theirs]
        left = _after(left, counts, now - last)
        for row, (other, mine, theirs) in zip(left, users, strict=True):
            other.shared()[0][theirs] = row[mine]
        return users, left, counts


def _after(left: Floats, counts: Floats, seconds: Floats) -> Floats:
    """Return the seconds that groups of transfers [transfers, ports] have left after some time, with equal shares."""
    order = np.argsort(left, axis=0)
    users = np.take_along_axis(counts, order, axis=0)[::-1].cumsum(axis=0)[::-1]
    done, rest = np.zeros(left.shape[1]), np.maximum(seconds, 0.0)
    for least, of in zip(np.take_along_axis(left, order, axis=0), users, strict=True):
        step = np.minimum((least - done) * of, rest)
        done, rest = done + step / np.maximum(of, 1), rest - step
    return np.maximum(left - done, 0.0)
