"""Communication under way: the posts of cohorts on their streams, and the transfers that connect posts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from superscaler.ir.cohorts import Cohort
from superscaler.ir.grid import Ints
from superscaler.ir.program import Task, Value
from superscaler.ir.running.meetings import Ends
from superscaler.simulate.times import Times, earliest, even, later, latest, of_row, of_rows
from superscaler.simulate.timetable import COMPUTE, Link
from superscaler.simulate.transfers.ports import Transfer


@dataclass(eq=False)
class Side:
    """The devices of a cohort in `groups`. `group`: the number of the group of each device; all sides have equal
    groups.

    `order` sorts the devices by group; `starts`: the first place of each group in that order.
    """

    groups: Ints
    group: Ints
    order: Ints = field(init=False)
    starts: Ints = field(init=False)
    key: Hashable = field(init=False)

    def __post_init__(self) -> None:
        self.order = np.argsort(self.group, kind="stable")
        self.starts = np.unique(self.group[self.order], return_index=True)[1]
        self.key = self.groups.shape, self.groups.tobytes()

    @staticmethod
    def of(ends: Ends) -> Side:
        return Side(ends.groups, ends.group)

    def latest(self, times: Times) -> Times:
        """Return the latest time in each group."""
        return times if isinstance(times, float) else np.maximum.reduceat(times[self.order], self.starts)


@dataclass(eq=False, slots=True, repr=False)
class Meeting:
    """A transfer between cohorts. `ends`: the number of cohorts; `posts`: those that the cohorts have started so
    far.
    """

    transfer: Transfer
    ends: int
    seen: int = 0
    is_started: bool = False
    posts: list[tuple[Post, Side]] = field(default_factory=list)


@dataclass(eq=False, slots=True, repr=False)
class Post:
    """A communication that a cohort starts together on a stream. `before`, `after`: its neighbours on the stream.

    `time`: its start; `events`: the number of earlier events of the compute stream. `met`: when all other ends were
    there, too. `end`: None until it is known.
    """

    run: Run
    at: int
    time: Times
    events: int
    meetings: list[tuple[Meeting, Side]]
    stream: int = COMPUTE
    is_copy: bool = False
    before: Post | None = None
    after: Post | None = None
    left: int = 0
    is_awaited: bool = False
    met: Times = 0.0
    end: Times | None = None

    @property
    def earliest(self) -> Times:
        """Return the earliest start of its transfers that its cohort allows."""
        return self.time if self.before is None or self.before.end is None else later(self.time, self.before.end)

    def last(self, row: int) -> int:
        """Return the device that starts this communication last, in the group of the device at `row` of its cohort."""
        found = -1.0, -1
        for meeting, own in self.meetings:
            for post, side in meeting.posts:
                rows = np.flatnonzero(side.group == own.group[row])
                late = int(rows[0 if isinstance(post.time, float) else post.time[rows].argmax()])
                found = max(found, (of_row(post.time, late), int(post.run.cohort.devices[late])))
        return found[1]


class Event(NamedTuple):
    """An instruction, or a transfer that it started, on a stream of a cohort. `met`: for a wait on the compute stream,
    when all ends of its communication, `post`, were there; for work, its start after waits for the host.
    """

    stream: int
    at: int
    start: Times
    end: Times
    met: Times
    post: Post | None


@dataclass(eq=False, repr=False)
class Run:
    """The state of a cohort in its code. `clock`: the time of its compute stream; `seconds`: its time by cause."""

    cohort: Cohort
    # Messages that start together, by the first: the last one.
    batches: dict[int, int]
    # Goes on until it must wait for an event, or to the end of the code.
    going: Iterator[None] = field(init=False)
    is_done: bool = False
    # The number of the instruction.
    at: int = -1
    clock: Times = 0.0
    # Until when the host has started what it was given.
    host: Times = 0.0
    seconds: dict[str, Times] = field(default_factory=lambda: defaultdict(float))
    # The number of each stream, its name and its last post.
    streams: dict[Hashable, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=lambda: ["compute"])
    tails: dict[int, Post] = field(default_factory=dict)
    # The posts of handles, and of tasks whose tape is copied.
    handles: dict[Value | None, Post] = field(default_factory=dict)
    tapes: dict[Task, Post] = field(default_factory=dict)
    # Messages that start together with a later one, up to the instruction `until`.
    gathered: list[tuple[Meeting, Side, Value | None]] = field(default_factory=list)
    until: int = -1
    # Sends and copies, for which an update waits.
    unflushed: list[Post] = field(default_factory=list)
    # Transfers that may slow its work, and the number of posts that have not ended.
    beside: list[tuple[Transfer, Side]] = field(default_factory=list)
    open: int = 0
    count: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    # `own`: the numbers of the events of the compute stream.
    events: list[Event] = field(default_factory=list)
    own: list[int] = field(default_factory=list)

    def work(self, name: str, seconds: Times, waits: Times) -> None:
        """Spend seconds on the current instruction, with waits for the host."""
        start, self.clock = self.clock, even(self.clock + seconds)
        self.spend(name, seconds)
        self.spend("host", waits)
        self.note(Event(COMPUTE, self.at, start, self.clock, even(start + waits), None))

    def note(self, event: Event) -> None:
        """Record an event of the compute stream."""
        self.own.append(len(self.events))
        self.events.append(event)

    def runs_beside(self, transfer: Transfer, side: Side) -> None:
        """Record a transfer of these devices that begins; forget the transfers that ended before the current work."""
        start = earliest(self.clock)
        self.beside = [(t, s) for t, s in self.beside if latest(t.end) > start]
        self.beside.append((transfer, side))

    def spend(self, name: str, seconds: Times) -> None:
        self.seconds[name] = self.seconds[name] + seconds


def path(run: Run, row: int) -> tuple[Link, ...]:
    """Return the critical path of a device's end: its work and transfers from the start of the step, in the order of
    time.
    """
    found, event = list[Link](), len(run.own) - 1
    while event >= 0:
        _, at, start, end, _, post = run.events[run.own[event]]
        seconds = of_row(end, row) - of_row(start, row)
        event -= 1
        if seconds and post is None:
            found.append(Link(int(run.cohort.devices[row]), at, seconds, False))
        elif seconds and post is not None:
            run, row, event = _last_end(post, row, found)
    return tuple(found[::-1])


def _last_end(post: Post, row: int, found: list[Link]) -> tuple[Run, int, int]:
    """Record the transfers that ended a wait; return the device whose work they waited for, and its last event."""
    while True:
        meeting, side = max(post.meetings, key=lambda m: of_row(of_rows(m[0].transfer.end, m[1].group), row))
        transfer, group = meeting.transfer, int(side.group[row])
        seconds = of_row(transfer.end, group) - of_row(transfer.start, group)
        found.append(Link(int(post.run.cohort.devices[row]), post.at, seconds, True))
        members = ((p, int(r)) for p, s in meeting.posts for r in np.flatnonzero(s.group == group))
        post, row = max(members, key=lambda member: of_row(member[0].earliest, member[1]))
        if post.before is None or of_row(post.time, row) >= of_row(post.earliest, row):
            return post.run, row, post.events - 1
        post = post.before
