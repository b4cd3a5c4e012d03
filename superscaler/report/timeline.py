"""The timeline of a step: lanes of events, predicted or measured, in one form for pages, traces and text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from superscaler.groups import group_by
from superscaler.ir.grid import Ints
from superscaler.ir.program import Meets, Program
from superscaler.ir.running.meetings import Message, message
from superscaler.report.event_notes import Details
from superscaler.report.kinds import Kind
from superscaler.simulate.times import Floats
from superscaler.simulate.timetable import COMPUTE, Events, Link, Timetable

# The most events of a timeline; devices beyond them are counted, not shown.
MOST = 400_000
# Cut from the ends of events, as a share of the step: what rounding leaves.
_EQUAL = 1e-9


@dataclass(frozen=True, eq=False)
class Lane:
    """A stream of some devices: its events in the order of time, as columns.

    `kind`: of `Kind`; `detail`: the number of its detail, -1 for none; `microbatch`: -1 for none; `source`:
    the number of the event that it waited for, -1 for none. The source of a wait for a late device of a collective is
    the last work of that device before it. Events are numbered through all lanes.
    """

    devices: tuple[int, ...]
    stream: str
    is_compute: bool
    first: int
    start: Floats
    end: Floats
    kind: Ints
    detail: Ints
    microbatch: Ints
    critical: NDArray[np.bool_]
    source: Ints

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, eq=False)
class Timeline:
    """The lanes of a step of `seconds`. `hidden`: the number of devices without lanes."""

    title: str
    seconds: float
    lanes: Sequence[Lane]
    hidden: int = 0

    def __len__(self) -> int:
        return sum(map(len, self.lanes))


def predicted(table: Timetable, details: Details) -> Timeline:
    """Return the timeline of a timetable."""
    return timeline("predicted", table.seconds, table.lanes, details, table.path)


def timeline(
    title: str, seconds: float, every: Sequence[Events], details: Details, path: Sequence[Link] = ()
) -> Timeline:
    """Return the timeline of events, limited to the lanes that can be shown; devices with equal times share lanes.
    `path`: the critical one.
    """
    alike = (some for events in every for some in _equal(events, details.program))
    rows = sorted(alike, key=lambda row: row.devices.tolist())
    ends = np.cumsum([len(row.start) for row in rows])
    shown = max(1, int(np.searchsorted(ends, MOST, side="right")))
    made = _Lanes(
        details, seconds, {(link.device, link.instruction, link.is_transfer) for link in path if link.seconds}
    )
    for row in rows[:shown]:
        made.add(row)
    return Timeline(title, seconds, made.finish(), sum(len(row.devices) for row in rows[shown:]))


def _equal(events: Events, program: Program) -> Iterator[Events]:
    """Yield the events of devices whose times are equal."""
    columns = events.start, events.end, events.met
    if len(events.start) == 0 or all(x.strides[1] == 0 for x in columns):
        yield events
        return
    digits = [np.round(x / max(float(events.end.max()), 1e-12) / _EQUAL).astype(np.int64) for x in columns]
    found = group_by(range(len(events.devices)), lambda row: b"".join(x[:, row].tobytes() for x in digits))
    for rows in found.values():
        device = int(events.devices[rows[0]])
        yield events.alike(rows, events.code if rows[0] == 0 else program.devices[device].instructions[:])


@dataclass(eq=False)
class _Lanes:
    """A maker of lanes from events of devices with equal times, which also finds the source of each event."""

    details: Details
    seconds: float
    # The critical path: device, instruction, and whether it is a transfer.
    path: Collection[tuple[int, int, bool]]
    lanes: list[Lane] = field(default_factory=list)
    count: int = 0
    # The event of each communication of a row, by instruction; of each message, by its ends and number.
    posts: dict[tuple[int, int], int] = field(default_factory=dict)
    sent: dict[Message, int] = field(default_factory=dict)
    received: dict[int, Message] = field(default_factory=dict)
    waits: list[tuple[Ints, Ints, Ints]] = field(default_factory=list)
    # The number of the compute lane of each device; its events that are work, and their starts.
    computes: dict[int, int] = field(default_factory=dict)
    works: dict[int, tuple[Ints, Floats]] = field(default_factory=dict)

    def add(self, row: Events) -> None:
        """Make the lanes of devices with equal times, that of their compute stream first."""
        devices = set(row.devices.tolist())
        about = self.details.columns(row.code, np.unique([row.instruction, row.waited]))
        on_path = {(i, is_transfer) for d, i, is_transfer in self.path if d in devices}
        pairs = zip(row.instruction.tolist(), (row.stream != COMPUTE).tolist(), strict=True)
        critical = np.array([pair in on_path for pair in pairs], dtype=bool) & (row.waited < 0)
        for stream in range(len(row.streams)):
            at = np.flatnonzero(row.stream == stream)
            at = at[np.argsort(row.start[at, 0], kind="stable")]
            if len(at) or stream == COMPUTE:
                self._lane(row, stream, at, about, critical)

    def _lane(
        self, row: Events, stream: int, at: Ints, about: tuple[Ints, Ints, Ints], critical: NDArray[np.bool_]
    ) -> None:
        devices = tuple(row.devices.tolist())
        start, end, met, waited = row.start[at, 0], row.end[at, 0], row.met[at, 0], row.waited[at]
        of = np.where(waited >= 0, waited, row.instruction[at])
        kind, detail, microbatch = (column[of] for column in about)
        meets = [row.code[i].meets for i in of.tolist()]
        is_copy = np.array([m is Meets.HOST for m in meets], dtype=bool)
        if stream == COMPUTE:
            kind = np.where(np.array([m is not Meets.NOBODY for m in meets], dtype=bool), int(Kind.LAUNCH), kind)
        kind = np.where(waited >= 0, np.where(is_copy, int(Kind.COPYING), int(Kind.EXPOSED)), kind)
        # A wait is a bubble until all ends of its communication are there.
        least = self.seconds * _EQUAL
        cut = (waited >= 0) & (met > start + least)
        alone = np.full(len(at), -1)
        columns = np.where(cut, met, start), end, kind, detail, microbatch, critical[at], waited, of, alone
        waits = *(x[cut] for x in columns[3:-1]), row.late(0)[at][cut]
        bubbles = start[cut], met[cut], np.full(cut.sum(), int(Kind.BUBBLE)), *waits
        both = [np.concatenate(pair) for pair in zip(columns, bubbles, strict=True)]
        if stream == COMPUTE and (last := float(end.max(initial=0.0))) < self.seconds - least:
            idle = last, self.seconds, int(Kind.END), -1, -1, False, -1, 0, -1
            both = [np.append(column, value) for column, value in zip(both, idle, strict=True)]
        kept = np.flatnonzero(both[1] > both[0] + (least if stream == COMPUTE else -1.0))
        kept = kept[np.argsort(both[0][kept], kind="stable")]
        start, end, kind, detail, microbatch, critical, waited, of, late = (column[kept] for column in both)
        source = np.full(len(kept), -1)
        self.waits.append((source, waited, late))
        if stream != COMPUTE:
            self._note(row, of)
        else:
            self.computes |= dict.fromkeys(devices, len(self.lanes))
        self.lanes.append(
            Lane(
                devices, row.streams[stream], stream == COMPUTE, self.count, start, end, kind, detail, microbatch,
                critical.astype(bool), source,
            )
        )  # fmt: skip
        self.count += len(kept)

    def _note(self, row: Events, of: Ints) -> None:
        """Record the communication of a lane, by which other events find it."""
        device = int(row.devices[0])
        for number, at in enumerate(of.tolist(), self.count):
            self.posts[device, at] = number
            i = row.code[at]
            if i.is_send:
                self.sent[message(i, device)] = number
            elif i.meets is Meets.PEER:
                self.received[number] = message(i, device)

    def finish(self) -> list[Lane]:
        """Return the lanes, once the sources of their events are set."""
        for lane, (source, waited, late) in zip(self.lanes, self.waits, strict=True):
            for k in np.flatnonzero(waited >= 0).tolist():
                source[k] = self.posts.get((lane.devices[0], int(waited[k])), -1)
            for k in np.flatnonzero(late >= 0).tolist():
                source[k] = self._before(int(late[k]), float(lane.end[k]), int(source[k]))
            if not lane.is_compute:
                ends = (self.received.get(k) for k in range(lane.first, lane.first + len(lane)))
                source[:] = [-1 if end is None else self.sent.get(end, -1) for end in ends]
        return self.lanes

    def _before(self, device: int, time: float, other: int) -> int:
        """Return the last work of a device that begins before a time; `other` where none is known."""
        if device not in self.computes:
            return other
        number = self.computes[device]
        lane = self.lanes[number]
        if number not in self.works:
            works = np.flatnonzero(lane.kind < Kind.LAUNCH)
            self.works[number] = works, lane.start[works]
        works, starts = self.works[number]
        at = int(np.searchsorted(starts, time - self.seconds * _EQUAL)) - 1
        return lane.first + int(works[at]) if at >= 0 else other
