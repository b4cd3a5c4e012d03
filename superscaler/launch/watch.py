"""The watchdog of a rank under torchrun: no rank waits for a hanging or stopped one, or outlives its launcher.

It is a thread that reads the position of the rank's own thread: its line of the plan's code, and whether it waits there
for other ranks. Each rank publishes its position every second, and watches that of the next rank.
"""

import atexit
import json
import linecache
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import NoReturn, TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from superscaler.comm import communicator, distributed, operations
from superscaler.errors import InputError, RuntimeFailure
from superscaler.launch import hangs

# Seconds between two looks; without a sign of a rank until it counts as lost; that an instruction may take at least,
# and in the first step. Later limits are a multiple of the longest instruction before.
LOOK, SILENCE, LEAST, FIRST, TIMES = 1.0, 15.0, 20.0, 600.0, 20.0
# Seconds without a sign of a rank on another machine, where nobody sees whether its process runs; and the variable with
# seconds in its place.
ELSEWHERE, PATIENCE = 60.0, "SUPERSCALER_SILENCE"
_RUNS = f" Its process runs, so one call holds Python's lock (GIL) for that long; {PATIENCE}=SECONDS allows more."
_LOST = (
    " It is stopped, its machine or the network is lost, or one call holds Python's lock (GIL), for which "
    f"{PATIENCE}=SECONDS allows more."
)
# A rank in one of these files waits for others.
_WAITS = (communicator.__file__, distributed.__file__, operations.__file__)

Progress = tuple[int, int]
T = TypeVar("T")


@dataclass
class Spot:
    """The position of a rank: the step, the segments run, the plan's line (0: none), the start of its wait, if any, and
    the line in words.
    """

    step: int = 0
    works: int = 0
    line: int = 0
    is_waiting: bool = False
    since: float = 0.0
    text: str = "outside of the plan"
    where: str = ""


class Watch:
    """A watch over the thread that made it. `folder`: of the plan's code; `progress`: steps and segments done."""

    def __init__(self, store: Store, rank: int, world: int, folder: str, progress: Callable[[], Progress]) -> None:
        self._store, self._rank, self._world = store, rank, world
        self._folder, self._progress = folder, progress
        self._thread, self._parent = threading.get_ident(), os.getppid()
        self._spot, self._longest = Spot(since=time.monotonic()), 0.0
        self._next, self._word = (rank + 1) % world, b""
        # Steps that the thread has begun, as a loop counts them, its meetings, and its calls of steps.
        self.begun = self._meetings = self.calls = 0
        # Seconds until a rank that waits says for whom, from the start and then from the last look at all ranks; the
        # news of that; where stacks go.
        self._wait = seconds_of(hangs.VARIABLE, hangs.WAIT)
        self._due, self._news, self._stacks = self._wait, b"", hangs.folder_of(folder)
        # Looks since the store last answered, and since the next rank had news. A process that is stopped, or has a
        # call that holds Python's lock, does not look, so it counts none.
        self._silent = self._unheard = 0
        self._patience = seconds_of(PATIENCE, None)
        # The launcher's folder, for the place where this rank was when it was killed.
        self.log: Path | None = None
        self._end = threading.Event()
        # A store whose server is lost does not even answer that.
        self._threads = [threading.Thread(target=f, name="watch", daemon=True) for f in (self._run, self._talk)]

    def close(self) -> None:
        """End the watch, and say so to the rank before."""
        atexit.unregister(self.close)
        self._end.set()
        for thread in self._threads:
            thread.join(SILENCE)
        # A thread that is left waits for a lost store.
        if not any(thread.is_alive() for thread in self._threads):
            with suppress(RuntimeError):
                self._store.set(f"watch{self._rank}", "closed")

    def is_first_to_fail(self) -> bool:
        """Return whether no other rank of this start has asked before, as far as the store still answers."""
        with suppress(RuntimeError):
            return int(self._store.add("failures", 1)) == 1
        return True

    def meet(self) -> list[int]:
        """Wait until all ranks call this before the same step. Return the ranks that began that step instead."""
        self._meetings += 1
        key, looked = f"meeting{self._meetings}", time.monotonic()
        self._store.add(key, 1)
        while self._store.add(key, 0) < self._world:
            time.sleep(LOOK / 100)
            if time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                others = [rank for rank in range(self._world) if rank != self._rank and self._begun(rank) > self.begun]
                if others:
                    return others
        return []

    def _news_of(self, rank: int) -> bytes:
        """Return the last news of a rank."""
        key = f"watch{rank}"
        return self._store.get(key) if self._store.check([key]) else b"closed"

    def _begun(self, rank: int) -> int:
        """Return the steps that a rank said it has begun."""
        word = self._news_of(rank)
        return 0 if word == b"closed" else int(json.loads(word)["begun"])

    def start(self) -> None:
        # Python's end aborts the process where a thread is in the store's code.
        atexit.register(self.close)
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._end.wait(LOOK):
            if os.getppid() != self._parent:
                # No rank is left to notify.
                os._exit(1)
            self._look()
            if self.log is not None:
                with suppress(OSError):
                    (self.log / f"at{self._rank}").write_text(self._spot.text)
            self._silent += 1
            if self._silent * LOOK > SILENCE:
                where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
                _fail(
                    f"rank {self._rank} on {socket.gethostname()} lost the store of this launch, {where}: it has not "
                    f"answered for {self._silent * LOOK:.0f} s. That server is lost, its launcher has ended, or the "
                    f"network; this rank is {self._spot.text}."
                )

    def _talk(self) -> None:
        beats = 0
        while not self._end.wait(LOOK):
            beats += 1
            spot = self._spot
            word = {"beat": beats, "text": spot.text, "host": socket.gethostname(), "pid": os.getpid()}
            word["begun"] = self.begun
            word |= {"calls": self.calls, "is_inside": bool(spot.line), "is_waiting": spot.is_waiting}
            word |= {"seconds": time.monotonic() - spot.since, "line": spot.where}
            try:
                self._store.set(f"watch{self._rank}", json.dumps(word | {"limit": self._limit(spot)}))
                self._listen()
                self._tell_of_late()
            except RuntimeError:
                # The launcher keeps the store, and it is ending.
                continue
            self._silent = 0

    def _tell_of_late(self) -> None:
        """Name the late ranks to all, if this one has waited long for them; print and write what one has said."""
        waited = time.monotonic() - self._spot.since
        if waited < self._wait:
            self._due = self._wait
        elif waited >= self._due and self._world > 1:
            # Rarely, as each look reads what all ranks have published.
            self._due = 2 * waited
            places = [self._place(rank) for rank in range(self._world)]
            if ranks := hangs.late(self._rank, places, self._wait):
                self._store.set("late", hangs.warning(self._rank, ranks, places, self._stacks))
        news = self._store.get("late") if self._store.check(["late"]) else b""
        if news != self._news:
            self._news = news
            with suppress(OSError):
                hangs.write_stacks(self._stacks, self._rank, self._thread)
            if self._rank == 0:
                print(f"warning: {news.decode()}", file=sys.stderr, flush=True)

    def _place(self, rank: int) -> hangs.Place | None:
        word = self._news_of(rank)
        return None if word == b"closed" else hangs.Place.of(json.loads(word))

    def _look(self) -> None:
        own = frame = sys._current_frames().get(self._thread)
        is_waiting = False
        while frame is not None and not self._is_plan(frame):
            is_waiting |= frame.f_code.co_filename in _WAITS
            frame = frame.f_back
        line, now, spot, (step, works) = frame.f_lineno if frame else 0, time.monotonic(), self._spot, self._progress()
        if (step, works, line, is_waiting) != (spot.step, spot.works, spot.line, spot.is_waiting):
            if spot.line and not spot.is_waiting:
                self._longest = max(self._longest, now - spot.since)
            text = self._text(frame) if frame else Spot.text
            self._spot = Spot(
                step, works, line, is_waiting, now, text, text if frame else hangs.line_of(walk_stack(own))
            )
            return
        # Outside of the plan a rank may be elsewhere each time.
        spot.where = spot.text if frame else hangs.line_of(walk_stack(own))
        if line and not is_waiting and now - spot.since > self._limit(spot):
            _fail(
                f"rank {self._rank} hangs: it has been {spot.text} in step {step} for {now - spot.since:.0f} s; no "
                f"instruction took more than {self._longest:.0f} s before."
            )

    def _limit(self, spot: Spot) -> float:
        """Return the seconds that a rank may stay in a spot: in a line of the plan, or in a call outside of it."""
        return max(LEAST, TIMES * self._longest) if spot.step and spot.line else FIRST

    def _is_plan(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        # The code of compiled steps has a prefix.
        return name.startswith(self._folder) and "program_" in os.path.basename(name)

    @staticmethod
    def _text(frame: FrameType) -> str:
        name = frame.f_code.co_filename
        return f"at {os.path.basename(name)}:{frame.f_lineno} ({linecache.getline(name, frame.f_lineno).strip()[:120]})"

    def _listen(self) -> None:
        """Raise the alarm if the next rank has published no news for long."""
        word = self._news_of(self._next) if self._world > 1 else b"closed"
        self._unheard = 0 if word != self._word or word == b"closed" else self._unheard + 1
        self._word, silent = word, self._unheard * LOOK
        if silent > SILENCE:
            last = json.loads(word)
            is_here = last["host"] == socket.gethostname()
            runs = is_here and _runs(last["pid"])
            limit = SILENCE if is_here and not runs else self._patience or (last["limit"] if runs else ELSEWHERE)
            if silent > limit:
                why = _RUNS if runs else "" if is_here else _LOST
                _fail(
                    f"rank {self._next} on {last['host']} does not answer: it sent nothing for {silent:.0f} s, and was "
                    f"{last['text']} then; rank {self._rank} is {self._spot.text}.{why}",
                    last["pid"] if is_here else None,
                )


def seconds_of(variable: str, default: T) -> float | T:
    """Return the seconds in a variable of the environment. Raises InputError for others."""
    text = os.environ.get(variable, "")
    with suppress(ValueError):
        if not text or float(text) > 0:
            return float(text) if text else default
    raise InputError(f"{variable} is '{text}', but it must be a number of seconds above 0, for example 300.")


def _runs(pid: int) -> bool:
    """Return whether a process of this machine is there, and neither stopped nor ended. Known on Linux alone."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "TtZX"


def watch(rank: int, world: int, folder: str, progress: Callable[[], Progress], start: str) -> Watch | None:
    """Watch the calling thread, if torchrun started this process. `start` is the name of this start of all ranks."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    found = Watch(PrefixStore(start, store), rank, world, folder, progress)
    found.start()
    return found


def _fail(text: str, other: int | None = None) -> NoReturn:
    """Report a failure and end this process, after the process `other`: a stopped one receives no SIGTERM."""
    try:
        raise RuntimeFailure(text)
    except RuntimeFailure as error:
        # Recorded while it is handled: torchrun shows nothing of an exception that is not.
        get_error_handler().record_exception(error)
        if other is not None:
            with suppress(OSError):
                os.kill(other, signal.SIGKILL)
        sys.excepthook(RuntimeFailure, error, None)
    os._exit(1)
