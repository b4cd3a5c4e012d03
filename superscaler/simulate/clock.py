"""The clock of a program: when each instruction runs, and each transfer, on a cluster.

Each device has a compute stream, which runs its code in order, and streams of communication. A transfer starts when all
of its ends have started it and earlier communication on its streams has ended. A Wait moves the compute stream to the
end of a transfer. Devices that run one program advance together: a time is an array with an entry for each of them, or
with one for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from superscaler.cluster import Cluster
from superscaler.errors import ScheduleError
from superscaler.ir.cohorts import Cohort, cohorts
from superscaler.ir.communication import batches
from superscaler.ir.grid import Ints
from superscaler.ir.interpret import describe
from superscaler.ir.program import (
    Backward,
    Collective,
    Copy,
    Fetch,
    Free,
    Instruction,
    Loss,
    Offload,
    Program,
    Recv,
    Send,
    Task,
    Update,
    Wait,
)  # fmt: skip
from superscaler.simulate.communication import Agenda, Communication
from superscaler.simulate.ports import Floats, Ports, between, earliest, even, is_later, latest, of_rows
from superscaler.simulate.posts import Post, Run, path
from superscaler.simulate.timetable import Lane, Timetable
from superscaler.timing import without_garbage_collection

# The seconds of the instruction with a number on the devices of a cohort: one number, or one for each of them.
Work = Callable[[Cohort, int], float | Floats]
# The bytes of the tape of a task that is copied to the host.
Moved = Callable[[Cohort, Task], int]


def clock(
    program: Program,
    cluster: Cluster,
    work: Work,
    *,
    launch: float = 0.0,
    slowdown: float = 1.0,
    one_stream: bool = False,
    moved: Moved = lambda cohort, task: 0,
) -> Timetable:
    """Return the times of a step.

    `work`: the seconds of the kernels of instructions; those of a Wait run after it, those of communication before it
    starts. `launch`: the seconds of the compute stream to start a communication or a copy, beside those that
    were measured for the links of the cluster. `slowdown`: the factor of
    work beside communication of its device. `one_stream`: all messages of a device run one after the other, not only
    those of one direction with one peer. `moved`: see `Moved`.
    Raises ScheduleError if devices wait for each other for ever.
    """
    with without_garbage_collection():
        return _Clock(program, cluster, work, launch, slowdown, one_stream, moved).run()


class _Clock:
    def __init__(
        self, program: Program, cluster: Cluster, work: Work, launch: float, slowdown: float, one_stream: bool,
        moved: Moved,
    ) -> None:  # fmt: skip
        self.program, self.work, self.slowdown, self.moved = program, work, slowdown, moved
        codes = ((cohort, cohort.code[:]) for cohort in cohorts(program))
        self.runs = [Run(cohort, code, batches(code) if one_stream else {}) for cohort, code in codes]
        self.agenda = Agenda(list(self.runs))
        self.communication = Communication(program, self.agenda, Ports(cluster), launch, one_stream)

    def run(self) -> Timetable:
        agenda = self.agenda
        while agenda.ready or agenda.later:
            while agenda.ready:
                self._advance(agenda.ready.pop())
            if agenda.later:
                agenda.next()
        for run in self.runs:
            if run.at < len(run.code):
                what = describe(self.program, run.code[run.at])
                raise ScheduleError(f"device {run.cohort.devices[0]}, instruction {run.at}: {what} never ends.")
            # The step ends when the last stream does.
            run.at -= 1
            for post in run.tails.values():
                self._wait(run, post)
        return self._timetable()

    def _advance(self, run: Run) -> None:
        """Run instructions until one must wait."""
        while run.at < len(run.code):
            i = run.code[run.at]
            if not isinstance(i, Free) and not self._step(run, i):
                break
            run.at += 1

    def _step(self, run: Run, i: Instruction) -> bool:
        """Run an instruction; return whether it is done."""
        if isinstance(i, Wait) and not self._wait(run, run.handles[i.work]):
            return False
        if isinstance(i, Backward | Fetch) and i.task in run.handles and not self._wait(run, run.handles[i.task]):
            return False
        if isinstance(i, Update) and not self._flush(run):
            return False
        if not self._work(run):
            return False
        match i:
            case Collective():
                self.communication.collective(run, i)
            case Send() | Recv():
                self.communication.message(run, i)
            case Copy():
                self.communication.copy(run, i.work, i.bytes, to_host=i.to_host)
            case Offload() | Fetch():
                size = self.moved(run.cohort, i.task)
                self.communication.copy(run, i.task, size, to_host=isinstance(i, Offload))
            case Loss():
                return self._sum(run)
        return True

    # Work.

    def _work(self, run: Run) -> bool:
        if run.worked == run.at:
            return True
        given = self.work(run.cohort, run.at)
        if not (given if isinstance(given, float) else np.any(given)):
            return True
        seconds = np.atleast_1d(np.asarray(given, dtype=np.float64))
        if self.slowdown > 1.0:
            run.beside = [(t, side) for t, side in run.beside if is_later(of_rows(t.end, side.group), run.clock)]
            if run.open or run.beside:
                self._settle((run, seconds, run.clock))
                return False
        self._worked(run, seconds)
        return True

    def _settle(self, what: tuple[Run, Floats, Floats]) -> None:
        """End work that began, unless it lasts beyond the time until which transfers are known."""
        run, seconds, expected = what
        end = self._slowed(run, seconds)
        if latest(end) > latest(expected):
            self.agenda.push(latest(end), self._settle, (run, seconds, end))
            return
        self._worked(run, end - run.clock)
        self.agenda.ready.append(run)

    def _worked(self, run: Run, seconds: Floats) -> None:
        run.work("optimizer" if isinstance(run.code[run.at], Update) else "compute", seconds)
        run.worked = run.at

    def _slowed(self, run: Run, seconds: Floats) -> Floats:
        """Return the end of work that is slower while any transfer of its device runs."""
        end, seen = run.clock + seconds, run.clock
        for transfer, side in sorted(run.beside, key=lambda pair: earliest(pair[0].start)):
            start = np.maximum(of_rows(transfer.start, side.group), seen)
            left = np.maximum(of_rows(transfer.end, side.group) - start, 0.0)
            both = np.minimum(left, np.maximum(end - start, 0.0) * self.slowdown)
            end = end + both * (1 - 1 / self.slowdown)
            seen = np.maximum(seen, start + both)
        return end

    # Waits.

    def _wait(self, run: Run, post: Post) -> bool:
        if post.end is None:
            post.is_awaited = True
            return False
        before, end = run.clock, np.maximum(run.clock, post.end)
        if is_later(end, before):
            met = before if post.is_copy else between(post.met, before, end)
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
        if not self.program.model.loss or self.program.world == 1:
            return True
        if run.loss is None:
            self.communication.loss(run)
        assert run.loss is not None
        return self._wait(run, run.loss)

    # The result.

    def _timetable(self) -> Timetable:
        seconds = max(latest(run.clock) for run in self.runs)
        for run in self.runs:
            run.spend("bubble", seconds - run.clock)
        kinds = ("compute", "optimizer", "launch", "exposed", "copies", "bubble")
        found = {kind: np.zeros(self.program.world) for kind in kinds}
        for run in self.runs:
            for kind in kinds:
                found[kind][run.cohort.devices] = run.seconds[kind]
        last = max(self.runs, key=lambda run: latest(run.clock))
        lanes = tuple(map(_lane, self.runs))
        return Timetable(
            seconds, lanes, **found, path=path(last, int(last.clock.argmax())), bytes=dict(self.communication.bytes)
        )


def _lane(run: Run) -> Lane:
    stream, at, start, end, post = zip(*run.events, strict=True) if run.events else ((),) * 5
    waited = [-1 if p is None else p.at for p in post]
    streams, numbers, waits = (np.array(column, dtype=np.int64) for column in (stream, at, waited))
    there = [s if p is None or p.is_copy else between(p.met, s, e) for s, e, p in zip(start, end, post, strict=True)]
    first, last, met = (_table(some, len(run.cohort)) for some in (start, end, there))
    return Lane(
        run.cohort.devices,
        run.cohort.code,
        tuple(run.names),
        streams,
        numbers,
        waits,
        first,
        last,
        met,
        partial(_late, post),
    )


def _late(posts: Sequence[Post | None], row: int) -> Ints:
    is_collective = (p is not None and isinstance(p.run.code[p.at], Collective | Loss) for p in posts)
    return np.array([p.last(row) if known and p else -1 for p, known in zip(posts, is_collective, strict=True)])


def _table(times: Sequence[Floats], rows: int) -> Floats:
    """Return times as [events, devices], without memory for devices that are alike."""
    most = max(map(len, times), default=1)
    found = [t if len(t) == most else np.broadcast_to(t, most) for t in times]
    return np.broadcast_to(np.array(found).reshape(-1, most), (len(times), rows))
