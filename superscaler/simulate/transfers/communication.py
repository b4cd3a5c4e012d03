"""The communication of cohorts: its streams, and the transfers that it consists of.

Each set of devices has a stream for its collectives on each of them, and each direction of messages with a peer has
one. A transfer starts when all of its ends have started it and earlier communication on their streams has ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import reduce
from heapq import heappop, heappush
from itertools import count
from typing import Any, cast

import numpy as np

from superscaler.collectives import KINDS, ONE
from superscaler.ir.program import Collective, Program, Recv, Send
from superscaler.ir.running.meetings import Ends, rows_of
from superscaler.simulate.repeats.steps import Step
from superscaler.simulate.times import Times, earliest, even, later, latest, of_rows, sooner
from superscaler.simulate.transfers.beside import Beside
from superscaler.simulate.transfers.ports import Ports, Route, Transfer
from superscaler.simulate.transfers.posts import Event, Meeting, Post, Run, Side

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


@dataclass(eq=False, slots=True)
class _Way:
    """The communication of a form of instructions of a cohort. `ends`: the number of cohorts that meet; `start`: the
    seconds to start it that were measured.
    """

    side: Side
    route: Route
    ends: int
    stream: Hashable
    name: str
    start: float


class Communication:
    """The communication of all cohorts. `bytes`: those moved so far, by class of link."""

    def __init__(self, program: Program, agenda: Agenda, ports: Ports, launch: float, one_stream: bool) -> None:
        self.program, self.agenda, self.ports = program, agenda, ports
        self.launch, self.one_stream = launch, one_stream
        self.bytes: dict[str, float] = defaultdict(float)
        self._cohort_of, _ = rows_of([run.cohort.devices for run in agenda.ready], program.world)
        self._cohorts = len(agenda.ready)
        self._open: dict[Hashable, Meeting] = {}
        self._sides: dict[Hashable, Side] = {}
        self._ways: dict[Hashable, _Way] = {}

    def collective(
        self, run: Run, step: Step, turn: int, beside: Beside | None = None, broadcasts: float = 0.0
    ) -> Post:  # fmt: skip
        """Start a collective. `beside`: the part that products hide; `broadcasts`: in place of a gather."""
        i = cast("Collective", step.first)
        if len(i.group) == 1:
            # Nothing moves.
            done = Post(run, run.at, run.clock, len(run.own), [], met=run.clock, end=run.clock)
            run.handles |= dict.fromkeys(step.handles_at(turn), done)
            return done
        key = run.cohort.number, i.kind, i.group, i.root, i.bytes, beside, broadcasts
        way = self._way(key, lambda: self._collective(run, i, beside, broadcasts))
        number = run.count[way.side.key]
        run.count[way.side.key] += 1
        meeting = self._meet((way.side.key, number), way)
        post = self._post(run, way.stream, way.name, [(meeting, way.side)], way.start)
        run.handles |= dict.fromkeys(step.handles_at(turn), post)
        if ONE in KINDS[i.kind].ends:
            run.unflushed.append(post)
        return post

    def _collective(self, run: Run, i: Collective, beside: Beside | None, broadcasts: float) -> _Way:
        side = self._side(run, i.group, lambda: Side.of(Ends.of(run.cohort.devices, run.cohort.data(run.at, "group"))))
        # Devices have a stream for each set of devices, in whatever order.
        is_world = len(i.group) == self.program.world
        # Clusters price the only receiver as the last of its group.
        groups = side.groups if i.root < 0 else np.delete(side.groups, i.root, axis=1)
        groups = groups if i.root < 0 else np.append(groups, side.groups[:, i.root, None], axis=1)
        kind, size = ("broadcast", i.bytes * len(i.group)) if broadcasts else (i.kind, i.bytes)
        return _Way(
            side,
            self.ports.route(kind, groups, size, beside, broadcasts or 1.0),
            len(set(self._cohort_of[side.groups[0]].tolist())),
            _WORLD if is_world else frozenset(i.group),
            "all devices" if is_world else f"devices {', '.join(map(str, i.group))}",
            self._start_of(i.kind, i.bytes),
        )

    def message(self, run: Run, step: Step, turn: int) -> None:
        i, cohort, at = cast("Send | Recv", step.first), run.cohort, run.at
        is_send, size = i.is_send, i.bytes
        peers = (i.peer,) if cohort.fold is not None else tuple(cohort.data(at, "peer").tolist())
        way = self._way((cohort.number, is_send, peers, size), lambda: self._message(run, i, is_send, peers, size))
        # Of a fold, the messages of all devices have the number of the first one.
        is_folded = cohort.fold is not None
        number = step.moved("message", turn) if is_folded else cohort.data(at, "message")[way.side.order].tobytes()
        meeting = self._meet((way.side.key, number), way)
        run.gathered.append((meeting, way.side, None if is_send else step.handles_at(turn)[0]))
        run.until = max(run.until, run.batches.get(at, at))
        if at < run.until:
            return
        meetings = [(meeting, side) for meeting, side, _ in run.gathered]
        post = self._post(run, way.stream, way.name, meetings, way.start)
        run.handles |= {work: post for *_, work in run.gathered if work is not None}
        if any(work is None for *_, work in run.gathered):
            run.unflushed.append(post)
        run.gathered = []

    def _message(self, run: Run, i: Send | Recv, is_send: bool, peers: tuple[int, ...], size: int) -> _Way:
        own = run.cohort.devices
        side = self._side(
            run, (is_send, peers), lambda: Side.of(Ends.of_pairs(own, run.cohort.data(run.at, "peer"), is_send))
        )
        stream: Hashable = (is_send, peers)
        name = f"{'to' if is_send else 'from'} {i.peer}"
        if self.one_stream:
            stream, name = _WORLD, "all devices"
        return _Way(side, self.ports.route("send", side.groups, size), 2, stream, name, self._start_of("send", size))

    def copy(self, run: Run, size: int, to_host: bool) -> Post:
        devices, kind = run.cohort.devices, "to_host" if to_host else "to_device"
        side = self._side(run, "copy", lambda: Side(np.stack([devices] * 2, axis=1), np.arange(len(devices))))
        meeting = Meeting(Transfer(self.ports.route(kind, side.groups, size)), 1)
        post = self._post(run, kind, kind, [(meeting, side)], is_copy=True)
        run.unflushed.append(post)
        return post

    def loss(self, run: Run) -> Post:
        """Start to sum the loss over all devices."""
        every = np.arange(self.program.world)[None]
        side = self._side(run, "loss", lambda: Side(every, np.zeros(len(run.cohort), dtype=np.int64)))
        size = _LOSS * self.program.model.iterations
        route, start = self.ports.route("all_reduce", every, size), self._start_of("all_reduce", size)
        way = _Way(side, route, self._cohorts, _WORLD, "all devices", start)
        return self._post(run, way.stream, way.name, [(self._meet("loss", way), side)], start)

    def _start_of(self, kind: str, size: float) -> float:
        return self.ports.cluster.links.start(kind, size)

    def _side(self, run: Run, key: Hashable, make: Callable[[], Side]) -> Side:
        if (run.cohort.number, key) not in self._sides:
            self._sides[run.cohort.number, key] = make()
        return self._sides[run.cohort.number, key]

    def _way(self, key: Hashable, make: Callable[[], _Way]) -> _Way:
        if key not in self._ways:
            self._ways[key] = make()
        return self._ways[key]

    def _meet(self, key: Hashable, way: _Way) -> Meeting:
        """Return the meeting of cohorts at a key; the first cohort makes it."""
        found = self._open.pop(key, None) or Meeting(Transfer(way.route), way.ends)
        found.seen += 1
        if found.seen < found.ends:
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
            # The host comes to it after what it started before.
            waits = later(run.host - run.clock, 0.0)
            run.work("launch", waits + (self.launch + start), waits)
            run.host = run.host + self.launch
            run.spend("starts", self.launch)
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
            met = post.time if post.before is None else later(post.time, post.before.met)
            transfer.start = later(transfer.start, side.latest(post.earliest))
            transfer.met = later(transfer.met, side.latest(met))
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
        rows = [(meeting.transfer, side.group) for meeting, side in post.meetings]
        start = _joined([of_rows(t.start, group) for t, group in rows], sooner)
        post.met = _joined([of_rows(t.met, group) for t, group in rows], later)
        post.end = _joined([of_rows(t.end, group) for t, group in rows], later)
        run.events.append(Event(post.stream, post.at, start, post.end, start, None))
        run.open -= not post.is_copy
        if post.after is not None:
            for meeting, _ in post.after.meetings:
                self._start(meeting)
        if post.is_awaited:
            self.agenda.ready.append(run)


def _joined(times: list[Times], join: Callable[[Times, Times], Times]) -> Times:
    return even(reduce(join, times))
