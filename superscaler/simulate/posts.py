"""Communication under way: the posts of cohorts on their streams, and the transfers that connect posts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from superscaler.ir.cohorts import Cohort
from superscaler.ir.grid import Ints
from superscaler.ir.program import Instruction, Task, Value
from superscaler.simulate.ports import Floats, Transfer, earliest, even, latest, of_rows
from superscaler.simulate.timetable import COMPUTE, Link

ZERO = np.zeros(1)


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

    def latest(self, times: Floats) -> Floats:
        """Return the latest time in each group."""
        return times if len(times) == 1 else np.maximum.reduceat(times[self.order], self.starts)


@dataclass(eq=False)
class Meeting:
    """A transfer between cohorts. `ends`: the number of cohorts; `posts`: those that the cohorts have started so
    far.
    """

    transfer: Transfer
    ends: int
    seen: int = 0
    is_started: bool = False
    posts: list[tuple[Post, Side]] = field(default_factory=list)


@dataclass(eq=False)
class Post:
    """A communication that a cohort starts together on a stream. `before`, `after`: its neighbours on the stream.

    `time`: its start; `events`: the number of earlier events of the compute stream. `met`: when all other ends were
    there, too. `end`: None until it is known.
    """

    run: Run
    at: int
    time: Floats
    events: int
    meetings: list[tuple[Meeting, Side]]
    stream: int = COMPUTE
    is_copy: bool = False
    before: Post | None = None
    after: Post | None = None
    left: int = 0
    is_awaited: bool = False
    met: Floats = field(default_factory=lambda: ZERO)
    end: Floats | None = None

    @property
    def earliest(self) -> Floats:
        """Return the earliest start of its transfers that its cohort allows."""
        return self.time if self.before is None or self.before.end is None else np.maximum(self.time, self.before.end)

    def last(self, row: int) -> int:
        """Return the device that starts this communication last, in the group of the device at `row` of its cohort."""
        found = -1.0, -1
        for meeting, own in self.meetings:
            for post, side in meeting.posts:
                rows = np.flatnonzero(side.group == own.group[row])
                late = int(rows[post.time[rows].argmax() if len(post.time) > 1 else 0])
                found = max(found, (_at(post.time, late), int(post.run.cohort.devices[late])))
        return found[1]


@dataclass(eq=False)
class Run:
    """The state of a cohort in its code. `clock`: the time of its compute stream; `seconds`: its time by cause."""

    cohort: Cohort
    code: Sequence[Instruction]
    # Messages that start together, by the first: the last one.
    batches: dict[int, int]
    at: int = 0
    clock: Floats = field(default_factory=lambda: ZERO)
    seconds: dict[str, Floats] = field(default_factory=lambda: defaultdict(lambda: ZERO))
    # The number of each stream, its name and its last post.
    streams: dict[Hashable, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=lambda: ["compute"])
    tails: dict[int, Post] = field(default_factory=dict)
    # Of names, and of tasks whose tape is copied.
    handles: dict[Value | Task, Post] = field(default_factory=dict)
    # Messages that start together with a later one, up to the instruction `until`.
    gathered: list[tuple[Meeting, Side, Value | None]] = field(default_factory=list)
    until: int = -1
    # Sends and copies, for which an update waits.
    unflushed: list[Post] = field(default_factory=list)
    # Transfers that may slow its work, and the number of posts that have not ended.
    beside: list[tuple[Transfer, Side]] = field(default_factory=list)
    open: int = 0
    count: dict[Hashable, int] = field(default_factory=lambda: defaultdict(int))
    # The instruction whose work was done last, and the sum of the loss.
    worked: int = -1
    loss: Post | None = None
    # Stream, instruction, start, end, and the post of a wait. `own`: the numbers of those of the compute stream.
    events: list[tuple[int, int, Floats, Floats, Post | None]] = field(default_factory=list)
    own: list[int] = field(default_factory=list)

    def note(self, at: int, start: Floats, end: Floats, post: Post | None = None, stream: int = COMPUTE) -> None:
        if stream == COMPUTE:
            self.own.append(len(self.events))
        self.events.append((stream, at, start, end, post))

    def work(self, name: str, seconds: Floats) -> None:
        """Spend seconds on the current instruction."""
        end = even(self.clock + seconds)
        self.spend(name, seconds)
        self.note(self.at, self.clock, end)
        self.clock = end

    def runs_beside(self, transfer: Transfer, side: Side) -> None:
        """Record a transfer of these devices that begins; forget the transfers that ended before the current work."""
        start = earliest(self.clock)
        self.beside = [(t, s) for t, s in self.beside if latest(t.end) > start]
        self.beside.append((transfer, side))

    def spend(self, name: str, seconds: Floats) -> None:
        self.seconds[name] = self.seconds[name] + seconds


def _at(times: Floats, row: int) -> float:
    return float(times[row if len(times) > 1 else 0])


def path(run: Run, row: int) -> tuple[Link, ...]:
    """Return the critical path of a device's end: its work and transfers from the start of the step, in the order of
    time.
    """
    found, event = list[Link](), len(run.own) - 1
    while event >= 0:
        _, at, start, end, post = run.events[run.own[event]]
        seconds = _at(end, row) - _at(start, row)
        event -= 1
        if seconds and post is None:
            found.append(Link(int(run.cohort.devices[row]), at, seconds, False))
        elif seconds and post is not None:
            run, row, event = _last_end(post, row, found)
    return tuple(found[::-1])


def _last_end(post: Post, row: int, found: list[Link]) -> tuple[Run, int, int]:
    """Record the transfers that ended a wait; return the device whose work they waited for, and its last event."""
    while True:
        meeting, side = max(post.meetings, key=lambda m: _at(of_rows(m[0].transfer.end, m[1].group), row))
        transfer, group = meeting.transfer, int(side.group[row])
        seconds = _at(transfer.end, group) - _at(transfer.start, group)
        found.append(Link(int(post.run.cohort.devices[row]), post.at, seconds, True))
        members = ((p, int(r)) for p, s in meeting.posts for r in np.flatnonzero(s.group == group))
        post, row = max(members, key=lambda member: _at(member[0].earliest, member[1]))
        if post.before is None or _at(post.time, row) >= _at(post.earliest, row):
            return post.run, row, post.events - 1
        post = post.before
