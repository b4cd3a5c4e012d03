"""The communication of cohorts: its streams, and the transfers that it consists of.

Each set of devices has a stream for its collectives on each of them, and each direction of messages with a peer has
one. A transfer starts when all of its ends have started it and earlier communication on their streams has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import prod
from typing import Any

import numpy as np

from superscaler.ir.cohorts import Cohort
from superscaler.ir.grid import Ints
from superscaler.ir.model import width
from superscaler.ir.program import Collective, Program, Recv, Role, Send, Task, Value, names
from superscaler.simulate.ports import Floats, Ports, Transfer, earliest, even, latest, of_rows
from superscaler.simulate.posts import Meeting, Post, Run, Side

# The bytes of a loss, which is summed over all devices.
_LOSS = 4
# The stream of collectives of all devices. It may have the messages, too: those of a batch then start and end together.
_WORLD = "world"


@dataclass(eq=False)
class Agenda:
    """Future events in the order of time; the present time; the cohorts that can go on now."""

    ready: list[Run]
    now: float = 0.0
    later: list[tuple[float, int, Callable[[Any], None], Any]] = field(default_factory=list)
    numbers: count[int] = field(default_factory=count)

    def push(self, time: float, act: Callable[[Any], None], what: Any) -> None:
        heappush(self.later, (time, next(self.numbers), act, what))

    def next(self) -> None:
        """Let the next event happen."""
        self.now, _, act, what = heappop(self.later)
        act(what)


class Communication:
    """The communication of all cohorts. `bytes`: those moved so far, by class of link."""

    def __init__(self, program: Program, agenda: Agenda, ports: Ports, launch: float, one_stream: bool) -> None:
        self.program, self.agenda, self.ports = program, agenda, ports
        self.launch, self.one_stream = launch, one_stream
        self.bytes: dict[str, float] = defaultdict(float)
        self._cohort_of = np.full(program.world, -1)
        self._cohorts = len(agenda.ready)
        for run in agenda.ready:
            self._cohort_of[run.cohort.devices] = run.cohort.number
        self._open: dict[Hashable, Meeting] = {}
        self._sides: dict[Hashable, Side] = {}

    def collective(self, run: Run, i: Collective) -> None:
        if len(i.group) == 1:
            # Nothing moves.
            done = Post(run, run.at, run.clock, len(run.own), [], met=run.clock, end=run.clock)
            run.handles |= dict.fromkeys(names(i, Role.WRITE), done)
            return
        side = self._side(run, i.group, lambda: _side_of(run.cohort, run.at))
        # Devices have a stream for each set of devices, in whatever order.
        is_world = len(i.group) == self.program.world
        stream = _WORLD if is_world else frozenset(i.group)
        turn, key = run.count[side.key], side.key
        run.count[key] += 1
        # Clusters price the only receiver as the last of its group.
        groups = side.groups if i.root < 0 else np.delete(side.groups, i.root, axis=1)
        groups = groups if i.root < 0 else np.append(groups, side.groups[:, i.root, None], axis=1)
        ends = len(set(self._cohort_of[side.groups[0]].tolist()))
        meeting = self._meet((key, turn), i.kind, groups, i.bytes, ends)
        name = "all devices" if is_world else f"devices {', '.join(map(str, i.group))}"
        post = self._post(run, stream, name, [(meeting, side)], self._start_of(i.kind, i.bytes))
        run.handles |= dict.fromkeys(names(i, Role.WRITE), post)
        if i.root >= 0 or i.kind == "broadcast":
            run.unflushed.append(post)

    def message(self, run: Run, i: Send | Recv) -> None:
        cohort, at, is_send = run.cohort, run.at, isinstance(i, Send)
        peers = (i.peer,) if cohort.fold is not None else tuple(cohort.data(at, "peer").tolist())
        side = self._side(run, (is_send, peers), lambda: _pairs_of(cohort, at, is_send))
        key = side.key, cohort.data(at, "message")[side.order].tobytes()
        size = i.bytes if isinstance(i, Send) else prod(i.shape) * width(i.dtype)
        meeting = self._meet(key, "send", side.groups, size, 2)
        run.gathered.append((meeting, side, None if isinstance(i, Send) else i.work))
        run.until = max(run.until, run.batches.get(at, at))
        if at < run.until:
            return
        stream: Hashable = (is_send, peers)
        name = f"{'to' if is_send else 'from'} {i.peer}"
        if self.one_stream:
            stream, name = _WORLD, "all devices"
        meetings = [(meeting, side) for meeting, side, _ in run.gathered]
        post = self._post(run, stream, name, meetings, self._start_of("send", size))
        run.handles |= {work: post for *_, work in run.gathered if work is not None}
        if any(work is None for *_, work in run.gathered):
            run.unflushed.append(post)
        run.gathered = []

    def copy(self, run: Run, key: Value | Task, size: int, *, to_host: bool) -> None:
        devices, kind = run.cohort.devices, "to_host" if to_host else "to_device"
        side = self._side(run, "copy", lambda: Side(np.stack([devices] * 2, axis=1), np.arange(len(devices))))
        meeting = Meeting(Transfer(self.ports.route(kind, side.groups, size)), 1)
        post = self._post(run, kind, kind, [(meeting, side)], is_copy=True)
        run.handles[key] = post
        run.unflushed.append(post)

    def loss(self, run: Run) -> None:
        """Start to sum the loss over all devices."""
        every = np.arange(self.program.world)[None]
        side = self._side(run, "loss", lambda: Side(every, np.zeros(len(run.cohort), dtype=np.int64)))
        size = _LOSS * self.program.model.iterations
        meeting = self._meet("loss", "all_reduce", every, size, self._cohorts)
        run.loss = self._post(run, _WORLD, "all devices", [(meeting, side)], self._start_of("all_reduce", size))

    def _start_of(self, kind: str, size: float) -> float:
        return self.ports.cluster.links.start(kind, size)

    def _side(self, run: Run, key: Hashable, make: Callable[[], Side]) -> Side:
        if (run.cohort.number, key) not in self._sides:
            self._sides[run.cohort.number, key] = make()
        return self._sides[run.cohort.number, key]

    def _meet(self, key: Hashable, kind: str, groups: Ints, size: float, ends: int) -> Meeting:
        """Return the meeting of so many cohorts at a key; the first cohort makes it."""
        found = self._open.pop(key, None) or Meeting(Transfer(self.ports.route(kind, groups, size)), ends)
        found.seen += 1
        if found.seen < ends:
            self._open[key] = found
        return found

    def _post(
        self,
        run: Run,
        key: Hashable,
        name: str,
        meetings: list[tuple[Meeting, Side]],
        start: float = 0.0,
        is_copy: bool = False,
    ) -> Post:
        """Start communication on a stream, after the communication already there."""
        if self.launch + start:
            run.work("launch", np.full(1, self.launch + start))
        stream = run.streams.setdefault(key, len(run.names))
        if stream == len(run.names):
            run.names.append(name)
        before = run.tails.get(stream)
        post = Post(run, run.at, run.clock, len(run.own), meetings, stream, is_copy, before, left=len(meetings))
        if before is not None:
            before.after = post
        run.tails[stream] = post
        run.open += not is_copy
        for meeting, side in meetings:
            meeting.posts.append((post, side))
        for meeting, _ in meetings:
            self._start(meeting)
        return post

    def _start(self, meeting: Meeting) -> None:
        """Begin a transfer at its time, if all of its ends are there and their streams are free."""
        posts, transfer = meeting.posts, meeting.transfer
        is_there = len(posts) == meeting.ends and not meeting.is_started
        if not is_there or any(p.before is not None and p.before.end is None for p, _ in posts):
            return
        meeting.is_started = True
        for post, side in posts:
            met = post.time if post.before is None else np.maximum(post.time, post.before.met)
            transfer.start = np.maximum(transfer.start, side.latest(post.earliest))
            transfer.met = np.maximum(transfer.met, side.latest(met))
        transfer.start, transfer.met = even(transfer.start), even(transfer.met)
        self.agenda.push(earliest(transfer.start), self._begin, meeting)

    def _begin(self, meeting: Meeting) -> None:
        transfer = meeting.transfer
        self.ports.begin(transfer)
        for name, amount in transfer.route.bytes.items():
            self.bytes[name] += amount
        for post, side in meeting.posts:
            if not post.is_copy:
                post.run.runs_beside(transfer, side)
        self.agenda.push(latest(transfer.end), self._end, meeting)

    def _end(self, meeting: Meeting) -> None:
        """End a transfer, unless others have slowed it since."""
        end = latest(meeting.transfer.end)
        if end > self.agenda.now:
            self.agenda.push(end, self._end, meeting)
            return
        self.ports.end(meeting.transfer, self.agenda.now)
        for post, _ in meeting.posts:
            post.left -= 1
            if not post.left:
                self._close(post)

    def _close(self, post: Post) -> None:
        """End a post whose transfers have ended; resume the cohorts that waited for it."""
        run = post.run
        start, met, end = (
            [of_rows(getattr(m.transfer, name), side.group) for m, side in post.meetings]
            for name in ("start", "met", "end")
        )
        post.met, post.end = _largest(met), _largest(end)
        run.note(post.at, -_largest([-s for s in start]), post.end, stream=post.stream)
        run.open -= not post.is_copy
        if post.after is not None:
            for meeting, _ in post.after.meetings:
                self._start(meeting)
        if post.is_awaited:
            self.agenda.ready.append(run)


def _side_of(cohort: Cohort, at: int) -> Side:
    groups, inverse = np.unique(cohort.data(at, "group"), axis=0, return_inverse=True)
    return Side(groups, inverse.reshape(-1))


def _pairs_of(cohort: Cohort, at: int, is_send: bool) -> Side:
    """Return the pairs (sender, receiver) of a message, in the order of the senders."""
    ends = [cohort.devices, cohort.data(at, "peer")]
    pairs = np.stack(ends if is_send else ends[::-1], axis=1)
    order = np.argsort(pairs[:, 0], kind="stable")
    return Side(pairs[order], np.argsort(order))


def _largest(times: list[Floats]) -> Floats:
    found = times[0]
    for other in times[1:]:
        found = np.maximum(found, other)
    return even(found)
