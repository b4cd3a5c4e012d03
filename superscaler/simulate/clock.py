"""The clock of a program: when each instruction runs, and each transfer, on a cluster.

Each device has a compute stream, which runs its code in order, and streams of communication. A transfer starts once all
of its ends have started it, and what they started before on its streams has ended. A Wait moves the compute stream to
the end of a transfer. Devices that run one program go on together: a time is an array with an entry for each of them,
or with one for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import prod
from typing import Any

import numpy as np

from superscaler.cluster import Cluster
from superscaler.errors import ScheduleError
from superscaler.ir.codes import Cohort, cohorts
from superscaler.ir.grid import Ints
from superscaler.ir.interpret import describe
from superscaler.ir.model import width
from superscaler.ir.program import (
    Collective,
    Copy,
    Free,
    Instruction,
    Loss,
    Program,
    Recv,
    Role,
    Send,
    Update,
    Wait,
    names,
)  # fmt: skip
from superscaler.ir.rendezvous import batches
from superscaler.simulate.ports import Floats, Ports, Transfer, even, of_rows
from superscaler.simulate.posts import Meeting, Post, Run, Side, path
from superscaler.simulate.timetable import Lane, Timetable

# The seconds of the instruction with a number on the devices of a cohort: one number, or one for each of them.
Work = Callable[[Cohort, int], float | Floats]
# The bytes of a loss, which is summed over all devices.
_LOSS = 4
# The stream of collectives of all devices. It may have the messages, too: those of a batch then start and end together.
_WORLD = "world"


def clock(
    program: Program,
    cluster: Cluster,
    work: Work,
    *,
    launch: float = 0.0,
    slowdown: float = 1.0,
    one_stream: bool = False,
) -> Timetable:
    """Return the times of a step.

    `work`: the seconds of the kernels of instructions; those of a Wait come after it, those of communication before it
    starts. `launch`: the seconds of the compute stream to start a communication or a copy. `slowdown`: how many times
    longer work takes beside communication of its device. `one_stream`: the messages of a device run one after the
    other, not only those of a direction with a peer. Raises ScheduleError if devices wait for each other for ever.
    """
    return _Clock(program, cluster, work, launch, slowdown, one_stream).run()


@dataclass(eq=False)
class _Clock:
    program: Program
    cluster: Cluster
    work: Work
    launch: float
    slowdown: float
    one_stream: bool
    # What happens later, in the order of time, and the cohorts that can go on before.
    later: list[tuple[float, int, Callable[[Any], None], Any]] = field(default_factory=list)
    ready: list[Run] = field(default_factory=list)
    now: float = 0.0
    bytes: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self.ports = Ports(self.cluster)
        found = cohorts(self.program)
        self.runs = [Run(cohort, batches(cohort.code[:]) if self.one_stream else {}) for cohort in found]
        self.cohort_of = np.full(self.program.world, -1)
        for cohort in found:
            self.cohort_of[cohort.devices] = cohort.number
        self._open: dict[Hashable, Meeting] = {}
        self._sides: dict[Hashable, Side] = {}
        self._numbers = count()

    def run(self) -> Timetable:
        self.ready = list(self.runs)
        while self.ready or self.later:
            while self.ready:
                self._advance(self.ready.pop())
            if self.later:
                self.now, _, act, what = heappop(self.later)
                act(what)
        for run in self.runs:
            if run.at < len(run.cohort.code):
                what = describe(self.program, run.cohort.code[run.at])
                raise ScheduleError(f"device {run.cohort.devices[0]}, instruction {run.at}: {what} never ends.")
        return self._timetable()

    def _push(self, time: float, act: Callable[[Any], None], what: Any) -> None:
        heappush(self.later, (time, next(self._numbers), act, what))

    def _advance(self, run: Run) -> None:
        """Run instructions until one must wait."""
        code = run.cohort.code[:]
        while run.at < len(code):
            i = code[run.at]
            if not isinstance(i, Free) and not self._step(run, i):
                break
            run.at += 1

    def _step(self, run: Run, i: Instruction) -> bool:
        """Run an instruction; return whether it is done."""
        if isinstance(i, Wait) and not self._wait(run, run.handles[i.work]):
            return False
        if isinstance(i, Update) and not self._flush(run):
            return False
        if not self._work(run):
            return False
        match i:
            case Collective():
                self._collective(run, i)
            case Send() | Recv():
                self._message(run, i)
            case Copy():
                self._copy(run, i)
            case Loss():
                return self._sum(run)
        return True

    # Work.

    def _work(self, run: Run) -> bool:
        given = self.work(run.cohort, run.at)
        if run.worked == run.at or not np.any(given):
            return True
        seconds = np.atleast_1d(np.asarray(given, dtype=np.float64))
        if self.slowdown > 1.0:
            run.beside = [(t, side) for t, side in run.beside if (of_rows(t.end, side.group) > run.clock).any()]
            if run.open or run.beside:
                self._settle((run, seconds, run.clock))
                return False
        self._worked(run, seconds)
        return True

    def _settle(self, what: tuple[Run, Floats, Floats]) -> None:
        """End work that began, unless it lasts longer than was known before: the transfers until now are known."""
        run, seconds, expected = what
        end = self._slowed(run, seconds)
        if end.max() > expected.max():
            self._push(float(end.max()), self._settle, (run, seconds, end))
            return
        self._worked(run, end - run.clock)
        self.ready.append(run)

    def _worked(self, run: Run, seconds: Floats) -> None:
        is_update = isinstance(run.cohort.code[run.at], Update)
        self._spend(run, "optimizer" if is_update else "compute", seconds)
        run.worked = run.at

    def _slowed(self, run: Run, seconds: Floats) -> Floats:
        """Return the end of work that is slower while any transfer of its device runs."""
        end, seen = run.clock + seconds, run.clock
        for transfer, side in sorted(run.beside, key=lambda pair: float(pair[0].start.min())):
            start = np.maximum(of_rows(transfer.start, side.group), seen)
            left = np.maximum(of_rows(transfer.end, side.group) - start, 0.0)
            both = np.minimum(left, np.maximum(end - start, 0.0) * self.slowdown)
            end = end + both * (1 - 1 / self.slowdown)
            seen = np.maximum(seen, start + both)
        return end

    def _spend(self, run: Run, name: str, seconds: Floats) -> None:
        end = even(run.clock + seconds)
        run.spend(name, seconds)
        run.note(run.at, run.clock, end)
        run.clock = end

    # Waits.

    def _wait(self, run: Run, post: Post) -> bool:
        if post.end is None:
            post.is_awaited = True
            return False
        before, end = run.clock, np.maximum(run.clock, post.end)
        if (end > before).any():
            met = before if post.is_copy else np.clip(post.met, before, end)
            run.spend("bubble", met - before)
            run.spend("copies" if post.is_copy else "exposed", end - met)
            run.clock = even(end)
            run.note(run.at, before, run.clock, post)
        return True

    def _flush(self, run: Run) -> bool:
        """Wait for sends and copies, as the optimizer does."""
        while run.unflushed:
            if not self._wait(run, run.unflushed[0]):
                return False
            run.unflushed.pop(0)
        return True

    def _sum(self, run: Run) -> bool:
        """Sum the loss over all devices."""
        model, world = self.program.model, self.program.world
        if not model.loss or world == 1:
            return True
        if run.loss is None:
            every = np.arange(world)[None]
            side = self._side(run, "loss", lambda: Side(every, np.zeros(len(run.cohort), dtype=np.int64)))
            meeting = self._meet("loss", "all_reduce", every, _LOSS * model.iterations, len(self.runs))
            run.loss = self._post(run, _WORLD, "all devices", [(meeting, side)])
        return self._wait(run, run.loss)

    # Communication.

    def _side(self, run: Run, key: Hashable, make: Callable[[], Side]) -> Side:
        if (run.cohort.number, key) not in self._sides:
            self._sides[run.cohort.number, key] = make()
        return self._sides[run.cohort.number, key]

    def _meet(self, key: Hashable, kind: str, groups: Ints, size: float, ends: int) -> Meeting:
        """Return the meeting of so many cohorts at a key, which the first of them makes."""
        found = self._open.pop(key, None) or Meeting(Transfer(self.ports.route(kind, groups, size)), ends)
        found.seen += 1
        if found.seen < ends:
            self._open[key] = found
        return found

    def _collective(self, run: Run, i: Collective) -> None:
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
        ends = len(set(self.cohort_of[side.groups[0]].tolist()))
        meeting = self._meet((key, turn), i.kind, groups, i.bytes, ends)
        name = "all devices" if is_world else f"devices {', '.join(map(str, i.group))}"
        post = self._post(run, stream, name, [(meeting, side)])
        run.handles |= dict.fromkeys(names(i, Role.WRITE), post)
        if i.root >= 0 or i.kind == "broadcast":
            run.unflushed.append(post)

    def _message(self, run: Run, i: Send | Recv) -> None:
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
        post = self._post(run, stream, name, [(meeting, side) for meeting, side, _ in run.gathered])
        run.handles |= {work: post for *_, work in run.gathered if work is not None}
        if any(work is None for *_, work in run.gathered):
            run.unflushed.append(post)
        run.gathered = []

    def _copy(self, run: Run, i: Copy) -> None:
        devices, kind = run.cohort.devices, "to_host" if i.to_host else "to_device"
        side = self._side(run, "copy", lambda: Side(np.stack([devices] * 2, axis=1), np.arange(len(devices))))
        meeting = Meeting(Transfer(self.ports.route(kind, side.groups, i.bytes)), 1)
        post = self._post(run, kind, kind, [(meeting, side)], is_copy=True)
        run.handles[i.work] = post
        run.unflushed.append(post)

    def _post(
        self, run: Run, key: Hashable, name: str, meetings: list[tuple[Meeting, Side]], is_copy: bool = False
    ) -> Post:
        """Start communication on a stream, after what is there."""
        if self.launch:
            self._spend(run, "launch", np.full(1, self.launch))
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
        """Let a transfer begin at its time, if all of its ends are there and their streams are free."""
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
        self._push(float(transfer.start.min()), self._begin, meeting)

    def _begin(self, meeting: Meeting) -> None:
        transfer = meeting.transfer
        self.ports.begin(transfer)
        for name, amount in transfer.route.bytes.items():
            self.bytes[name] += amount
        if self.slowdown > 1.0:
            for post, side in meeting.posts:
                post.run.beside += [] if post.is_copy else [(transfer, side)]
        self._push(float(transfer.end.max()), self._end, meeting)

    def _end(self, meeting: Meeting) -> None:
        """End a transfer, unless others have slowed it since."""
        end = float(meeting.transfer.end.max())
        if end > self.now:
            self._push(end, self._end, meeting)
            return
        self.ports.end(meeting.transfer)
        for post, _ in meeting.posts:
            post.left -= 1
            if not post.left:
                self._close(post)

    def _close(self, post: Post) -> None:
        """End a post whose transfers have ended; go on with what waited for it."""
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
            self.ready.append(run)

    # The result.

    def _timetable(self) -> Timetable:
        tails = (post.end for run in self.runs for post in run.tails.values() if post.end is not None)
        seconds = max(float(times.max()) for times in (*tails, *(run.clock for run in self.runs)))
        for run in self.runs:
            run.spend("bubble", seconds - run.clock)
        kinds = ("compute", "optimizer", "launch", "exposed", "copies", "bubble")
        found = {kind: np.zeros(self.program.world) for kind in kinds}
        for run in self.runs:
            for kind in kinds:
                found[kind][run.cohort.devices] = run.seconds[kind]
        last = max(self.runs, key=lambda run: float(run.clock.max()))
        lanes = tuple(map(_lane, self.runs))
        return Timetable(seconds, lanes, **found, path=path(last, int(last.clock.argmax())), bytes=dict(self.bytes))


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


def _lane(run: Run) -> Lane:
    stream, at, start, end, post = zip(*run.events, strict=True) if run.events else ((),) * 5
    waited = [-1 if p is None else p.at for p in post]
    streams, numbers, waits = (np.array(column, dtype=np.int64) for column in (stream, at, waited))
    first, last = (_table(some, len(run.cohort)) for some in (start, end))
    return Lane(run.cohort.devices, run.cohort.code, tuple(run.names), streams, numbers, waits, first, last)


def _table(times: Sequence[Floats], rows: int) -> Floats:
    """Return times as [events, devices], without memory for devices that are alike."""
    most = max(map(len, times), default=1)
    found = [t if len(t) == most else np.broadcast_to(t, most) for t in times]
    return np.broadcast_to(np.array(found).reshape(-1, most), (len(times), rows))
