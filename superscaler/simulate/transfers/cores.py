"""The cores of servers whose devices are more: those that work at a time have equal shares of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from superscaler.simulate.transfers.communication import Agenda
from superscaler.simulate.transfers.ports import EQUAL
from superscaler.simulate.transfers.posts import Run


@dataclass(eq=False)
class _Server:
    """A server. `left`: the seconds of a core that each of its devices at work still needs, by the time `seen`;
    `change`: the number of the last change.
    """

    left: dict[Run, float] = field(default_factory=dict)
    seen: float = 0.0
    change: int = 0


class Cores:
    """The cores of all servers, so many on each. Devices that wait need none: others then work faster."""

    def __init__(self, agenda: Agenda, count: int, devices_per_server: int) -> None:
        self.agenda, self.count, self.devices_per_server = agenda, count, devices_per_server
        self._servers: dict[int, _Server] = {}

    def work(self, run: Run, seconds: float) -> None:
        """Begin work of a device now, which goes on when it has had a core for so many seconds."""
        server = self._servers.setdefault(int(run.cohort.devices[0]) // self.devices_per_server, _Server())
        self._advance(server)
        server.left[run] = seconds
        self._next(server)

    def _share(self, server: _Server) -> float:
        return min(1.0, self.count / len(server.left)) if server.left else 1.0

    def _advance(self, server: _Server) -> None:
        """Let the devices of a server work until now."""
        done, server.seen = (self.agenda.now - server.seen) * self._share(server), self.agenda.now
        server.left = {run: left - done for run, left in server.left.items()}

    def _next(self, server: _Server) -> None:
        """Expect the next end of work on a server, unless other work begins before."""
        server.change += 1
        if server.left:
            end = server.seen + min(server.left.values()) / self._share(server)
            self.agenda.push(end, self._end, (server, server.change))

    def _end(self, what: tuple[_Server, int]) -> None:
        server, change = what
        if change != server.change:
            return
        self._advance(server)
        least = min(server.left.values()) + EQUAL
        self.agenda.ready += [run for run, left in server.left.items() if left <= least]
        server.left = {run: left for run, left in server.left.items() if left > least}
        self._next(server)
