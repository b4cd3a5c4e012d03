"""The clock of a program: when each instruction runs, and each transfer, on a cluster.

Each device has a compute stream, which runs its code in order, and streams of communication. A transfer starts when all
of its ends have started it and earlier communication on its streams has ended. A Wait moves the compute stream to the
end of a transfer. Devices that run one program advance together, unless they share cores: a time is a number for all
of them, or an array with one for each. Instructions of a loop are looked at once for all of its repetitions
(`steps.py`), and run in each.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import numpy as np

from superscaler.cluster import Cluster
from superscaler.errors import ScheduleError
from superscaler.ir.cohorts import Cohort, alone, cohorts
from superscaler.ir.communication import batches
from superscaler.ir.grid import Ints
from superscaler.ir.program import Meets, Program, Task
from superscaler.simulate.repeats.steps import Step, steps
from superscaler.simulate.times import Floats, Times, earliest, even, is_later, later, latest, of_rows, sooner
from superscaler.simulate.timetable import COMPUTE, Events, Timetable
from superscaler.simulate.transfers.beside import Beside
from superscaler.simulate.transfers.communication import Agenda, Communication
from superscaler.simulate.transfers.cores import Cores
from superscaler.simulate.transfers.ports import Ports
from superscaler.simulate.transfers.posts import Event, Post, Run, path
from superscaler.timing import without_garbage_collection

# The seconds of the instruction with a number on the devices of a cohort: one number, or one for each of them.
Work = Callable[[Cohort, int], float | Floats]
# Meetings with a device that comes last.
_MANY = (Meets.GROUP, Meets.ALL)


@dataclass(frozen=True)
class Behavior:
    """How devices and their hosts run a program, beside the seconds of its kernels.

    launch      the seconds of the compute stream to start a communication or a copy, beside those that were measured
                for the links of the cluster
    slowdown    the factor of work beside communication of its device
    one_stream  all messages of a device run one after the other, not only those of one direction with one peer
    cores       of a server, which its devices share; 0: each has its own
    starts      of the kernels of an instruction: the seconds from the start of their host until they end on a device
                that waits for each start, and those of the host
    moved       the bytes of the tape of a task that is copied to the host
    hidden      what hides the collective with a number in the code of a cohort
    awaited     the numbers of the gathers of weights, in the code of a cohort, that their devices wait for at once
    owned       by the number of a gather of weights, the broadcasts in its place
    """

    launch: float = 0.0
    slowdown: float = 1.0
    one_stream: bool = False
    cores: int = 0
    starts: Callable[[Cohort, int], tuple[float | Floats, float | Floats]] = lambda cohort, at: (0.0, 0.0)
    moved: Callable[[Cohort, Task], int] = lambda cohort, task: 0
    hidden: Callable[[Cohort, int], Beside | None] = lambda cohort, at: None
    awaited: Callable[[Cohort], Set[int]] = lambda cohort: frozenset()
    owned: Callable[[Cohort], Mapping[int, float]] = lambda cohort: {}


_PLAIN = Behavior()


def clock(program: Program, cluster: Cluster, work: Work, how: Behavior = _PLAIN) -> Timetable:
    """Return the times of a step.

    `work`: the seconds of the kernels of instructions; those of a Wait run after it, those of communication before it
    starts. Raises ScheduleError if devices wait for each other for ever.
    """
    with without_garbage_collection():
        return _Clock(program, cluster, work, how).run()


class _Clock:
    def __init__(self, program: Program, cluster: Cluster, work: Work, how: Behavior) -> None:
        self.program, self.work, self.how = program, work, how
        some = alone(program) if how.cores else cohorts(program)
        self.runs = [Run(c, batches(c.code[:]) if how.one_stream else {}) for c in some]
        for run in self.runs:
            run.going = self._going(run)
        self.agenda = Agenda(list(self.runs))
        self.communication = Communication(program, self.agenda, Ports(cluster), how.launch, how.one_stream)
        self.cores = Cores(self.agenda, how.cores, cluster.devices_per_server) if how.cores else None

    def run(self) -> Timetable:
        agenda = self.agenda
        while agenda.ready or agenda.later:
            while agenda.ready:
                next(agenda.ready.pop().going, None)
            if agenda.later:
                agenda.next()
        for run in self.runs:
            if not run.is_done:
                what = self.program.describe(run.cohort.code[run.at])
                raise ScheduleError(f"device {run.cohort.devices[0]}, instruction {run.at}: {what} never ends.")
            # The step ends when the last stream does.
            run.at = len(run.cohort.code) - 1
            for post in run.tails.values():
                self._awaited(run, post)
        return self._timetable()

    def _going(self, run: Run) -> Iterator[None]:
        """Run the code of a cohort. It stops where it must wait, and goes on when the cohort is ready again."""
        for step, at, turn in steps(run.cohort.code):
            run.at = at
            for post in self._needed(run, step, turn):
                yield from self._wait(run, post)
            given = self.work(run.cohort, at)
            if given if isinstance(given, float) else np.any(given):
                yield from self._work(run, step, even(given))
            match step.first.meets:
                case Meets.GROUP:
                    beside, parts = self.how.hidden(run.cohort, at), self.how.owned(run.cohort).get(at, 0.0)
                    post = self.communication.collective(run, step, turn, beside, parts)
                    if at in self.how.awaited(run.cohort):
                        yield from self._wait(run, post)
                case Meets.PEER:
                    self.communication.message(run, step, turn)
                case Meets.HOST:
                    self._copy(run, step, turn)
                case Meets.ALL if self.program.model.loss and self.program.world > 1:
                    yield from self._wait(run, self.communication.loss(run))
        run.is_done = True

    def _copy(self, run: Run, step: Step, turn: int) -> None:
        """Start a copy of a value or of a tape, which the next use of the tape waits for."""
        i = step.first
        if i.task is None:
            run.handles[step.handles_at(turn)[0]] = self.communication.copy(run, i.bytes, i.to_host)
        else:
            task = step.moved("task", turn)
            run.tapes[task] = self.communication.copy(run, self.how.moved(run.cohort, task), i.to_host)

    def _needed(self, run: Run, step: Step, turn: int) -> Sequence[Post]:
        """Return the communication that a step waits for."""
        i = step.first
        if i.is_wait:
            return (run.handles.pop(step.handles_at(turn)[0]),)
        if i.needs_tape and run.tapes:
            return [run.tapes[task] for task in [step.moved("task", turn)] if task in run.tapes]
        if i.updates:
            found, run.unflushed = run.unflushed, []
            return found
        return ()

    # Work.

    def _work(self, run: Run, step: Step, seconds: Times) -> Iterator[None]:
        """Run work that its host has started. Beside transfers it ends when all transfers until its end are known."""
        late, own = self.how.starts(run.cohort, run.at)
        waits = later(run.host + late - run.clock - seconds, 0.0)
        run.host, seconds = even(run.host + own), even(seconds + waits)
        run.spend("starts", 0.0 if step.first.updates else own)
        if self.cores is not None:
            seconds = yield from self._shared(run, self.cores, latest(seconds))
        elif self.how.slowdown > 1.0:
            run.beside = [(t, side) for t, side in run.beside if is_later(of_rows(t.end, side.group), run.clock)]
            if run.open or run.beside:
                seconds = yield from self._settled(run, seconds)
        run.work("optimizer" if step.first.updates else "compute", seconds, waits)

    def _shared(self, run: Run, cores: Cores, seconds: float) -> Generator[None, None, Times]:
        """Return the seconds of work on shared cores, with the work that communication beside it does there."""
        while run.clock > self.agenda.now:
            self.agenda.push(latest(run.clock), self.agenda.ready.append, run)
            yield
        cores.work(run, seconds)
        yield
        spent = self.agenda.now - run.clock
        beside = latest(self._slowed(run, spent)) - self.agenda.now
        if beside > 0:
            cores.work(run, beside)
            yield
        return self.agenda.now - run.clock

    def _settled(self, run: Run, seconds: Times) -> Generator[None, None, Times]:
        """Return the seconds of work beside transfers, once they are known until its end."""
        end, expected = self._slowed(run, seconds), latest(run.clock)
        while latest(end) > expected:
            expected = latest(end)
            self.agenda.push(expected, self.agenda.ready.append, run)
            yield
            end = self._slowed(run, seconds)
        return end - run.clock

    def _slowed(self, run: Run, seconds: Times) -> Times:
        """Return the end of work that is slower while any transfer of its device runs."""
        end, seen = run.clock + seconds, run.clock
        for transfer, side in sorted(run.beside, key=lambda pair: earliest(pair[0].start)):
            start = later(of_rows(transfer.start, side.group), seen)
            left = later(of_rows(transfer.end, side.group) - start, 0.0)
            both = sooner(left, later(end - start, 0.0) * self.how.slowdown)
            end = end + both * (1 - 1 / self.how.slowdown)
            seen = later(seen, start + both)
        return end

    # Waits.

    def _wait(self, run: Run, post: Post) -> Iterator[None]:
        if post.end is None:
            post.is_awaited = True
            yield
        self._awaited(run, post)

    def _awaited(self, run: Run, post: Post) -> None:
        """Move the compute stream to the end of communication."""
        assert post.end is not None
        before, end = run.clock, later(run.clock, post.end)
        if is_later(end, before):
            met = before if post.is_copy else sooner(later(post.met, before), end)
            run.spend("bubble", met - before)
            run.spend("copies" if post.is_copy else "exposed", end - met)
            run.clock = even(end)
            run.note(Event(COMPUTE, run.at, before, run.clock, met, post))

    # The result.

    def _timetable(self) -> Timetable:
        seconds = max(latest(run.clock) for run in self.runs)
        for run in self.runs:
            run.spend("bubble", seconds - run.clock)
        kinds = ("compute", "optimizer", "launch", "exposed", "copies", "bubble", "host", "starts")
        found = {kind: np.zeros(self.program.world) for kind in kinds}
        for run in self.runs:
            for kind in kinds:
                found[kind][run.cohort.devices] = run.seconds[kind]
        last = max(self.runs, key=lambda run: latest(run.clock))
        row = 0 if isinstance(last.clock, float) else int(last.clock.argmax())
        lanes = tuple(map(_events, self.runs))
        return Timetable(seconds, lanes, **found, path=path(last, row), bytes=dict(self.communication.bytes))


def _events(run: Run) -> Events:
    stream, at, start, end, met, post = zip(*run.events, strict=True) if run.events else ((),) * 6
    waited = [-1 if p is None else p.at for p in post]
    streams, numbers, waits = (np.array(column, dtype=np.int64) for column in (stream, at, waited))
    first, last, there = (_table(some, len(run.cohort)) for some in (start, end, met))
    return Events(
        run.cohort.devices,
        run.cohort.code,
        tuple(run.names),
        streams,
        numbers,
        waits,
        first,
        last,
        there,
        partial(_late, post),
    )


def _late(posts: Sequence[Post | None], row: int) -> Ints:
    meets = (Meets.NOBODY if p is None else p.run.cohort.code[p.at].meets for p in posts)
    return np.array([p.last(row) if p and m in _MANY else -1 for p, m in zip(posts, meets, strict=True)])


def _table(times: Sequence[Times], rows: int) -> Floats:
    """Return times as [events, devices], without memory for devices that are alike."""
    if all(isinstance(t, float) for t in times):
        return np.broadcast_to(np.array(times, dtype=np.float64)[:, None], (len(times), rows))
    return np.array([np.broadcast_to(t, rows) for t in times])
