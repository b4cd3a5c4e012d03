"""The memory of a report: a curve over time for each distinct program, and the live tensors at the peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from superscaler.ir.grid import Ints
from superscaler.report.page.markup import Markup, table, tag
from superscaler.report.subject import Subject
from superscaler.simulate.memory import DeviceMemory
from superscaler.simulate.times import Floats
from superscaler.simulate.timetable import COMPUTE, Events
from superscaler.specs.sizes import size

# The most points of a curve: more are joined, and the highest of them stays.
_MOST = 2000


@dataclass(frozen=True, eq=False)
class Curve:
    """The bytes of a device over time. `times` [points]: the starts of `values` [points, categories]; `during`: the
    most bytes at each point, with temporary tensors of instructions.
    """

    memory: DeviceMemory
    devices: tuple[int, ...]
    times: Floats
    values: Ints
    during: Ints


def curves(subject: Subject) -> list[Curve]:
    """Return a curve for each distinct program, that of the fullest device first."""
    found = []
    for memory in sorted(subject.simulation.memories, key=lambda m: -m.total):
        lane = next(lane for lane in subject.simulation.table.lanes if memory.rank in lane.devices)
        kept = _kept(memory.during, memory.curve)
        times = _times(lane, memory)[kept]
        found.append(Curve(memory, tuple(lane.devices.tolist()), times, memory.curve[kept], memory.during[kept]))
    return found


def _times(lane: Events, memory: DeviceMemory) -> Floats:
    """Return when each instruction ends; an instruction without time ends with the one before."""
    row = int(np.flatnonzero(lane.devices == memory.rank)[0])
    found, own = np.zeros(len(memory.during)), lane.stream == COMPUTE
    np.maximum.at(found, lane.instruction[own], lane.end[own, row])
    return np.maximum.accumulate(found)


def _kept(during: Ints, curve: Ints) -> Ints:
    """Return the points to draw: those of a change, or the highest of each run of these."""
    changes = np.flatnonzero(np.append(True, (np.diff(curve, axis=0) != 0).any(axis=1) | (np.diff(during) != 0)))
    if len(changes) <= _MOST:
        return changes
    runs = np.array_split(changes, _MOST)
    return np.array([run[int(during[run].argmax())] for run in runs])


def alive(subject: Subject) -> Markup:
    """Return the live tensors at the peak of the fullest device."""
    fullest = max(subject.simulation.memories, key=lambda m: m.total)
    sums: Mapping[str, int] = {**fullest.parts, "overhead": fullest.overhead}
    parts = ", ".join(f"{name} {size(count)}" for name, count in sums.items() if count)
    rows = ((h.name, h.made_by, h.microbatch if h.microbatch >= 0 else "", size(h.bytes)) for h in fullest.largest)
    said = f"The peak of device {fullest.rank}, {size(fullest.total)}, is in {fullest.place}: {parts}."
    return tag(
        "div",
        tag("p", said),
        tag(
            "div",
            table(("tensor", "made by", "microbatch", "bytes"), rows, left=2, title="The largest alive there."),
            class_="tall",
        ),
    )
