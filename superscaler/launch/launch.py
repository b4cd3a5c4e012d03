"""The launcher of a program's ranks on this machine: starts and watches them, and names the rank that failed."""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import TypeVar
from uuid import uuid4

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from superscaler.errors import InputError, RuntimeFailure
from superscaler.interrupt import LAUNCHER, TemporaryFolder
from superscaler.launch import forks
from superscaler.replaced import quiet
from superscaler.timing import cores

# Shown lines of a failed rank's standard error, for ranks that do not write to the terminal.
_TAIL = 40
T = TypeVar("T")

_CALL = """import sys
from pathlib import Path

from superscaler.interrupt import begin_rank

begin_rank()
from superscaler.launch.process import answer

answer(Path(__file__).parent, *sys.argv[1:])
"""


def call(function: Callable[..., T], world: int, *arguments: str) -> list[T]:
    """Return the results, as JSON has them, of `function(*arguments)` on each of `world` ranks. Raises as `launch`."""
    with TemporaryFolder() as name:
        folder = Path(name)
        (folder / "call.py").write_text(_CALL)
        launch(folder / "call.py", [function.__module__, function.__name__, *arguments], world, folder)
        return [json.loads((folder / f"result{rank}").read_text()) for rank in range(world)]


def launch(
    program: Path,
    options: list[str],
    world: int,
    folder: Path | None = None,
    stop: Path | None = None,
    is_forked: bool = False,
) -> None:
    """Run a Python program once a rank under torchrun's agent, on a free port, and wait until all have ended.

    `folder`: for the agent's files (default: a temporary one); a program may write a rank's standard error to
    `rank<number>` there. `stop`: a file that the first SIGTERM makes, to ask the ranks to end. A second SIGTERM ends
    them; without `stop` the first one does. `is_forked`: ranks are forks of the server of `forks.start_server`, not new
    Pythons. Raises RuntimeFailure with the first rank that failed, or InputError if it raised that.
    """
    if folder is None:
        with TemporaryFolder() as made:
            launch(program, options, world, Path(made), stop, is_forked)
        return
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=world,
        run_id=uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        start_method="forkserver",
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        signals_to_handle="SIGTERM,SIGINT,SIGHUP,SIGQUIT" if stop is None else "SIGINT,SIGHUP,SIGQUIT",
    )
    try:
        with _agent_environment(max(1, cores() // world)):
            if stop is not None and current_thread() is main_thread():
                signal.signal(signal.SIGTERM, partial(_ask_to_stop, stop))
            if is_forked:
                elastic_launch(config, forks.run)(forks.Surroundings(), forks.taken(), str(program), *options)
            else:
                elastic_launch(config, sys.executable)(str(program), *options)
    except ChildFailedError as error:
        _end_line()
        rank, failure = first_failure(error.failures | recorded(folder))
        kind, _, text = _exception(failure).partition(": ")
        if kind == InputError.__name__:
            raise InputError(text) from None
        tail = _standard_error(folder, rank)
        if tail:
            print(f"rank {rank}:\n{tail}", file=sys.stderr)
        raise RuntimeFailure(_describe(rank, failure, world, tail, folder)) from None
    except SignalException as error:
        _end_line()
        if error.sigval == signal.SIGINT:
            # This process has its own handler again, which ends it as Ctrl-C elsewhere does.
            signal.raise_signal(signal.SIGINT)
            raise KeyboardInterrupt from None
        raise RuntimeFailure(f"training was stopped by {error.sigval.name}; all {world} ranks have ended.") from None


def _ask_to_stop(stop: Path, number: int, frame: object) -> None:
    """Make the file that asks the ranks to end; on the second call, end them."""
    if stop.exists():
        raise SignalException("a second SIGTERM came", signal.Signals(number))
    stop.touch()


def _end_line() -> None:
    """End the progress line that rank 0 left open."""
    if sys.stderr.isatty():
        print(file=sys.stderr)


# Errors of a rank that lost a peer: later, and while they connect.
_LOST = ("PeerLost:", "RuntimeError: Gloo connectFullMesh failed")


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the first rank with a failure of its own, not caused by the others.

    Failures come in the order in which they were seen. The agent ends the others by SIGTERM; a rank that lost a peer is
    a consequence, too.
    """

    def order(rank: int) -> tuple[int, int]:
        failure = failures[rank]
        text = _exception(failure)
        is_ended = not text and failure.exitcode == -signal.SIGTERM
        # A rank with a reason comes before a killed rank, which another rank may have killed because it was stopped.
        return 3 if is_ended else 2 if text.startswith(_LOST) else int(not text), failure.timestamp

    rank = min(failures, key=order)
    return rank, failures[rank]


def recorded(folder: Path) -> dict[int, ProcessFailure]:
    """Return the failures that ranks recorded themselves: of forks, the agent sees only one."""
    files = {int(file.parent.name): file for file in folder.glob("*/*/*/error.json")}
    return {rank: ProcessFailure(rank, 0, 1, str(file)) for rank, file in files.items()}


def _exception(failure: ProcessFailure) -> str:
    """Return `Class: message` of the exception that ended a rank, or nothing if it recorded none."""
    # A text instead of a dict is torch's placeholder for "nothing recorded".
    message = failure.error_file_data.get("message")
    return str(message.get("message", "")) if isinstance(message, dict) else ""


def _describe(rank: int, failure: ProcessFailure, world: int, tail: str, folder: Path) -> str:
    text = _exception(failure)
    if failure.exitcode < 0 and not text:
        how = f"was killed by {failure.signal_name()}"
        # Written by its watch, a moment before.
        at = folder / f"at{rank}"
        how += f" {at.read_text()}" if at.is_file() else ""
        how += " (the system does this when memory runs out)" if failure.exitcode == -signal.SIGKILL else ""
    else:
        how = f"failed with exit code {failure.exitcode}"
        text = text or (tail.splitlines()[-1] if tail else "see its last output above")
    others = f" All {world} ranks have ended." if world > 1 else ""
    return f"rank {rank} of {world} {how}{': ' + text if text else ''}{'' if text.endswith('.') else '.'}{others}"


def _standard_error(folder: Path, rank: int) -> str:
    """Return the last lines of a rank, if they did not go to the terminal."""
    file = folder / f"rank{rank}"
    return "\n".join(file.read_text(errors="replace").splitlines()[-_TAIL:]) if file.is_file() else ""


@contextmanager
def _agent_environment(threads: int) -> Iterator[None]:
    """Set the number of threads of the ranks, and undo the agent's changes to this process after the block."""
    names = ("OMP_NUM_THREADS", "TORCHELASTIC_SIGNALS_TO_HANDLE", LAUNCHER)
    variables = {name: os.environ.get(name) for name in names}
    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in signals}
    os.environ["OMP_NUM_THREADS"], os.environ[LAUNCHER] = str(threads), str(os.getpid())
    try:
        # The agent's module has a logger with a level of its own.
        with quiet(logging.CRITICAL, "torch.distributed.elastic", "torch.distributed.elastic.agent.server.api"):
            yield
    finally:
        for name, value in variables.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
        for number, handler in handlers.items():
            # Only the main thread may set handlers; elsewhere nothing changed. None: not set by Python.
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
