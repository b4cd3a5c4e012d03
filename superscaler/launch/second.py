"""A second process, which does jobs of a long computation while the first one goes on."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from itertools import chain
from multiprocessing.connection import Connection, Pipe
from tempfile import TemporaryFile
from typing import IO, Any, NamedTuple, Self

# The process: it has the classes of this module by their own names.
_RUN = "import sys; from superscaler.launch.second import main; main(*sys.argv[1:])"
# The jobs that the process has at a time: it has work while this one does not look.
_ASKED = 2


class Job(NamedTuple):
    """A piece of work: the name of a method, and its argument. One that is `short` lets others wait."""

    name: str
    of: Any
    is_short: bool = False


class _Process(NamedTuple):
    """`file`: for the state, which no pipe holds before it is read."""

    running: subprocess.Popen[bytes]
    pipe: Connection
    file: IO[bytes]


# The processes that have no state yet, by their work.
_ready: dict[str, _Process] = {}


def prepare(work: str) -> None:
    """Start a process, if there is a core for it: it loads its modules while this one goes on. See `Second`."""
    if work not in _ready and _has_core():
        with suppress(OSError):
            _ready[work] = _started(work)


class Second:
    """A process that does jobs beside this one. Without it, or after it has ended, this one does all.

    `work`: a class, as "package.module:Name", whose methods are the jobs, and whose `modules` are loaded before its
    arguments, the `state`, are there. Without a state there is no process: one that was prepared ends.
    """

    def __init__(self, work: str = "", state: Sequence[Any] | None = None) -> None:
        # The first of these is what the process does, as it seems.
        self._asked, self._done = list[Job](), dict[Job, Any]()
        self._process = _ready.pop(work, None)
        if state is None or not _has_core():
            self.end()
            return
        try:
            self._process = self._process or _started(work)
            with self._process.file as file:
                pickle.dump(state, file)
        # A state that cannot be pickled, or no room for it, or for a process.
        except (OSError, pickle.PicklingError, AttributeError, TypeError):
            self.end()
        self._send(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def is_busy(self) -> bool:
        """Return whether the process has jobs, as it seems."""
        self._receive()
        return bool(self._asked)

    def has_done(self, job: Job) -> bool:
        """Return whether the result of a job is known."""
        return job in self._done

    def has(self, job: Job) -> bool:
        """Return whether a job is done, or given to the process."""
        return job in self._done or job in self._asked

    def result(
        self,
        job: Job,
        here: Callable[[Job], Any],
        ahead: Callable[[], Iterable[Job]] = tuple,
        spare: Callable[[], bool] = bool,
    ) -> Any:
        """Return the result of a job, done here or by the process. While that does it, this one does others: those that
        come next, or that the process has not begun, then a piece of what else can be done (`spare`; False: nothing).
        """

        def others() -> Iterator[Job]:
            return (other for other in ahead() if other != job and not self.has(other))

        while job not in self._done:
            self.fill(job.name, others)
            if job in self._done:
                break
            waiting = (other for other in self._asked[1:] if other.name == job.name)
            own = next(chain(waiting, others()), None) if job in self._asked[:1] else job
            if own is None:
                if not spare():
                    self._receive(is_awaited=True)
                continue
            if own in self._asked:
                self.take_back()
            self._done[own] = here(own)
        return self._done[job]

    def fill(self, name: str, ahead: Callable[[], Iterable[Job]]) -> None:
        """Give the process jobs of a name that come next, but none that would wait for longer jobs."""
        self._receive()
        while self._process and len(self._asked) < _ASKED and all(o.name == name or o.is_short for o in self._asked):
            if (other := next((other for other in ahead() if not self.has(other)), None)) is None:
                return
            self.ask(other)

    def ask(self, job: Job) -> None:
        """Give the process a job, unless it has it, or has done it."""
        if self._process and not self.has(job):
            self._asked.append(job)
            self._send(job)

    def take_back(self) -> None:
        """Take back the jobs that the process has not begun, as it seems."""
        if len(self._asked) > 1:
            self._send(self._asked[1:])
            del self._asked[1:]

    def _receive(self, is_awaited: bool = False) -> None:
        """Take the results of jobs that are done. A job that has failed is no longer asked for."""
        try:
            while self._process and (is_awaited or self._process.pipe.poll()):
                (job, found), is_awaited = self._process.pipe.recv(), False
                if job in self._asked:
                    self._asked.remove(job)
                if found is not None:
                    self._done[job] = found[0]
        except (OSError, EOFError):
            self.end()

    def end(self) -> None:
        """End the process. It is not waited for what it does."""
        self._asked.clear()
        process, self._process = self._process, None
        if process is not None:
            process.pipe.close()
            process.file.close()
            process.running.kill()
            process.running.wait()

    def _send(self, message: object) -> None:
        try:
            if self._process is not None:
                self._process.pipe.send(message)
        except OSError:
            self.end()


def _has_core() -> bool:
    """Return whether this process may use a second core: as torch, it heeds OMP_NUM_THREADS."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1 and threads != "1"


def _started(work: str) -> _Process:
    (ours, theirs), file = Pipe(), TemporaryFile()  # noqa: SIM115
    with theirs:
        numbers = theirs.fileno(), file.fileno()
        # Ctrl-C is for the first process. It is no fork: that has the threads of this one without what they hold.
        running = subprocess.Popen(
            [sys.executable, "-c", _RUN, work, *map(str, numbers)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=numbers, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    return _Process(running, ours, file)


def serve(pipe: Connection, work: object) -> None:
    """Do the jobs of a pipe until the first process closes it, or ends. A job that fails has no result: the first
    process does it again, and has the error. A list takes jobs back.
    """
    jobs = list[Job]()
    with suppress(EOFError, OSError):
        while True:
            while pipe.poll() or not jobs:
                asked = pipe.recv()
                if isinstance(asked, Job):
                    jobs.append(asked)
                else:
                    jobs = [job for job in jobs if job not in asked]
            job, found = jobs.pop(0), None
            with suppress(Exception):
                found = (getattr(work, job.name)(job.of),)
            pipe.send((job, found))


def main(work: str, pipe: str, file: str) -> None:
    """Do the jobs of a pipe. The state of the work is in a file, when the pipe says so."""
    module, _, name = work.partition(":")
    made = getattr(import_module(module), name)
    for other in made.modules:
        import_module(other)
    with Connection(int(pipe)) as ours, suppress(EOFError):
        ours.recv()
        with open(int(file), "rb") as given:
            given.seek(0)
            state = pickle.load(given)
        serve(ours, made(*state))
