"""A clock for schedules: when each work of a compiled order runs if it takes a given time, and so do messages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from superscaler.schedule.dependencies import DependencyGraph, Node, Schedule

KEEPS = {"F": 1, "B": -1, "W": -1}


@dataclass
class Device:
    """What a device did: from when to when, how long it worked, and the most activations that it kept."""

    start: float
    end: float
    busy: float
    peak: int


def run(schedule: Schedule, seconds: Mapping[str, float]) -> dict[int, Device]:
    """Return what each device does if all that waits for nothing runs at once, each device in its own order.

    What moves to other devices takes the seconds of "C", by default none.
    """
    nodes = DependencyGraph(schedule)
    before: list[list[int]] = [[] for _ in nodes.names]
    for node, after in enumerate(nodes.after):
        for other in after:
            before[other].append(node)
    ends: dict[int, float] = {}

    def end(node: int) -> float:
        if node not in ends:
            # An order, an end of a group, or a message.
            name = nodes.names[node]
            is_move = name.kind == "C" and not schedule.transfers[name.number].is_local
            assert not nodes.is_work(node)
            ends[node] = max(map(end, before[node]), default=0.0) + seconds.get("C", 0.0) * is_move
        return ends[node]

    devices: dict[int, Device] = {}
    kept: dict[int, int] = {}
    for name in schedule.order:
        if not name.is_run:
            continue
        node = nodes.number[name]
        device = devices.setdefault(name.device, Device(-1.0, 0.0, 0.0, 0))
        start = max([device.end, *map(end, before[node])])
        ends[node] = device.end = start + _seconds(name, schedule, seconds)
        device.start = start if device.start < 0 else device.start
        device.busy += ends[node] - start
        keeps = KEEPS.get(name.kind, 0) * schedule.segments[name.number].has_mirror
        kept[name.device] = kept.get(name.device, 0) + keeps
        device.peak = max(device.peak, kept[name.device])
    return devices


def _seconds(node: Node, schedule: Schedule, seconds: Mapping[str, float]) -> float:
    """Return the time of a work; what only prepares data takes none."""
    is_data = all(op.from_data for op in schedule.segments[node.number].ops)
    return 0.0 if is_data else seconds[node.kind]
