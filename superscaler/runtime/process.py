"""A rank as a whole process: how it ends, and how its launcher learns why."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import record

from superscaler.errors import InputError, PlanError
from superscaler.runtime.communicator import PeerLost

# Seconds that a rank stays after another one was lost, so that the launcher sees the lost one first.
_LINGER = 5.0


def run_rank(function: Callable[[], None], *, log: Path | None = None) -> None:
    """Call the function as the whole work of this process, then end it; let the launcher know why it failed.

    Errors that a user can cause end the process with one line. With a folder `log`, its launcher says them instead,
    and the standard error of all ranks but 0 goes into a file there.
    """
    rank = os.environ.get("RANK", "0")
    if log is not None and rank != "0":
        file = os.open(log / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, sys.stderr.fileno())
        os.close(file)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.excepthook = partial(_end, log is not None)
    record(lambda: _after_linger(function, is_said=log is not None))()
    _exit(0)


def answer(folder: Path) -> None:
    """Do as a whole process what `launch.call` wrote into the folder, and write there what comes of it."""

    def work() -> None:
        function, arguments = pickle.loads((folder / "call").read_bytes())
        found = function(*arguments)
        (folder / f"result{os.environ['RANK']}").write_bytes(pickle.dumps(found))

    run_rank(work, log=folder)


def _after_linger(function: Callable[[], None], is_said: bool) -> None:
    try:
        function()
    except InputError as error:
        if not is_said:
            # What is recorded torchrun shows with our frames, which say nothing about a wrong input.
            _end(is_said, type(error), error, None)
        raise
    except PeerLost:
        time.sleep(_LINGER)
        raise


def _end(is_said: bool, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the process at once: taking down process groups whose peers are gone may abort or hang."""
    # torch.distributed wraps this hook and holds back what goes to sys.stderr until it returns.
    terminal = sys.__stderr__
    if not isinstance(error, PlanError):
        traceback.print_exception(kind, error, trace, file=terminal)
    elif not is_said:
        print(f"error: {error}", file=terminal)
    _exit(error.exit_code if isinstance(error, PlanError) else 1)


def _exit(code: int) -> NoReturn:
    """End the process without the interpreter's own teardown, in which threads of torch may abort it."""
    for stream in (sys.stdout, sys.__stderr__):
        if stream is not None:
            stream.flush()
    os._exit(code)
