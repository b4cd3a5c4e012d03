"""Deadlock freedom: run only the communication of all devices, with sends that block until they are received."""

from __future__ import annotations

from collections import defaultdict

from superscaler.errors import ScheduleError
from superscaler.ir.program import Bucket, Collective, Program, Recv, Send

Meeting = tuple[object, ...]


def meetings(program: Program) -> list[list[tuple[Meeting, frozenset[int]]]]:
    """Return per device its communication in order: what it meets for, and who must be there."""
    found = []
    for device in program.devices:
        mine: list[tuple[Meeting, frozenset[int]]] = []
        count: dict[tuple[int, ...], int] = defaultdict(int)
        for i in device.instructions:
            if isinstance(i, Collective | Bucket):
                mine.append(((i.kind, i.group, count[i.group]), frozenset(i.group)))
                count[i.group] += 1
            elif isinstance(i, Send):
                mine.append((("message", device.rank, i.peer, i.message), frozenset((device.rank, i.peer))))
            elif isinstance(i, Recv):
                mine.append((("message", i.peer, device.rank, i.message), frozenset((device.rank, i.peer))))
        found.append(mine)
    return found


def check_rendezvous(program: Program) -> None:
    """Raise ScheduleError showing where each device stands if the communication cannot finish."""
    left = meetings(program)
    at = [0] * len(left)
    ready = list(range(len(left)))
    while ready:
        device = ready.pop()
        while at[device] < len(left[device]):
            meeting, members = left[device][at[device]]
            if not all(at[m] < len(left[m]) and left[m][at[m]][0] == meeting for m in members):
                break
            for member in members:
                at[member] += 1
            ready += [m for m in members if m != device]
    stuck = [d for d in range(len(left)) if at[d] < len(left[d])]
    if stuck:
        lines = [f"  device {d}, step {at[d]}: waits in {left[d][at[d]][0]}" for d in stuck[:8]]
        raise ScheduleError("the communication of this plan deadlocks:\n" + "\n".join(lines))
