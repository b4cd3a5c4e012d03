"""A rank as a whole process: its end, and the report of its failure to the launcher."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import parent_process
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from superscaler.comm.communicator import PeerLost
from superscaler.errors import PlanError
from superscaler.interrupt import begin_rank
from superscaler.launch.hangs import line_of
from superscaler.specs.whole_file import ASIDE

# Seconds that a rank stays after another one was lost, so that the launcher sees the lost one first.
_LINGER = 5.0
# Whether this process is one of `run_rank`.
_is_whole = False
# The variable with the file in which torchrun expects the error of a rank.
_RECORD = "TORCHELASTIC_ERROR_FILE"


def run_rank(function: Callable[[], None], *, log: Path | None = None) -> None:
    """Call the function as the whole work of this process, then end it, and report a failure to the launcher.

    A fork of multiprocessing is only left, not ended, as its launcher awaits its result.
    Errors that a user can cause end the process with one line. With a folder `log`, the launcher prints them instead,
    and the standard error of all ranks but 0 goes into a file there.
    """
    global _is_whole
    _is_whole = True
    rank = os.environ.get("RANK", "0")
    if log is not None and rank != "0":
        file = os.open(log / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, sys.stderr.fileno())
        os.close(file)
    begin_rank()
    sys.excepthook = partial(_end, log is not None)
    record(lambda: _after_linger(function, log is not None), _Brief())()
    if parent_process() is None:
        _exit(0)


def say_once(is_first: Callable[[], bool]) -> None:
    """Let an error that ends a loop of the user be one message, of the first rank that fails, with the user's line; and
    the record of torchrun. Errors that are not of this package are printed as before, and so are those of `run_rank`.
    """
    older = sys.excepthook
    if _is_whole or getattr(older, "is_said_once", False):
        return

    def say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, PlanError):
            older(kind, error, trace)
            return
        if isinstance(error, PeerLost):
            # torchrun shows the failure that it sees first, which should be the other rank's.
            time.sleep(_LINGER)
        where = line_of(reversed(list(traceback.walk_tb(trace))))
        try:
            # torchrun shows what is handled.
            raise error
        except PlanError:
            _Brief().record_exception(error)
        if is_first():
            print(f"error: rank {os.environ.get('RANK', '0')} {where}: {error}", file=sys.__stderr__, flush=True)

    say.is_said_once = True  # type: ignore[attr-defined]
    sys.excepthook = say


class _Brief(ErrorHandler):
    """An error handler that records only the text of a user's error; torchrun shows it for every rank. The record is
    written whole or not at all: torchrun fails on half of one, of a rank that it ended meanwhile.
    """

    def record_exception(self, e: BaseException) -> None:
        if isinstance(e, PlanError):
            e = e.with_traceback(None)
            e.__cause__, e.__suppress_context__ = None, True
        file = os.environ.get(_RECORD)
        if file is not None:
            os.environ[_RECORD] = f"{file}{ASIDE}"
        super().record_exception(e)
        if file is not None:
            os.replace(f"{file}{ASIDE}", file)


def answer(folder: Path, module: str, name: str, *arguments: str) -> None:
    """Call a function of a module as a whole process, and write its result into the folder of `launch.call`."""

    def work() -> None:
        found = getattr(import_module(module), name)(*arguments)
        (folder / f"result{os.environ['RANK']}").write_text(json.dumps(found))

    run_rank(work, log=folder)


def _after_linger(function: Callable[[], None], is_said: bool) -> None:
    try:
        function()
    except PeerLost as error:
        # Written first: a launcher that also loses the others ends this process.
        if not is_said:
            print(f"error: {error}", file=sys.__stderr__, flush=True)
        time.sleep(_LINGER)
        raise


def _end(is_said: bool, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """End the process without cleanup: destroying process groups of lost peers may abort or hang."""
    # torch.distributed wraps this hook and holds back writes to sys.stderr until it returns.
    terminal = sys.__stderr__
    if not isinstance(error, PlanError):
        traceback.print_exception(kind, error, trace, file=terminal)
    elif not is_said and kind is not PeerLost:
        print(f"error: {error}", file=terminal)
    _exit(error.exit_code if isinstance(error, PlanError) else 1)


def _exit(code: int) -> NoReturn:
    """End the process without the interpreter's own teardown, in which threads of torch may abort it."""
    for stream in (sys.stdout, sys.__stderr__):
        if stream is not None:
            with suppress(OSError):
                stream.flush()
    os._exit(code)
