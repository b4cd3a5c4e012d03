"""Ranks as forks of a process that has imported torch, and has computed nothing: multiprocessing's fork server."""

import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from multiprocessing import forkserver, parent_process, reduction, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from superscaler.replaced import variable

_SIGNALS = signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
# Seen by numpy when it is imported: a process with threads cannot be forked.
_THREADS = "OPENBLAS_NUM_THREADS"
# Printed by the process that removes the semaphores of a killed launcher: that is its work.
_KILLED = "ignore:resource_tracker:UserWarning"


def start_server(modules: list[str]) -> bool:
    """Start a process that imports modules while this one goes on. Return whether ranks may be its forks: there is no
    GPU. It ends with this process.
    """
    if sys.platform != "linux" or torch.cuda.device_count():
        return False
    forkserver.set_forkserver_preload([*modules, "superscaler.launch.frozen"])
    with variable("PYTHONWARNINGS", _KILLED):
        resource_tracker.ensure_running()
    # A signal for all processes of a job is for the ranks and their launcher.
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in _SIGNALS}
    try:
        with variable(_THREADS, os.environ.get(_THREADS, "1")):
            forkserver.ensure_running()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return True


def taken() -> list[signal.Signals]:
    """Return the signals that end this process; it ignores the others (nohup), and so do ranks."""
    return [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


class Surroundings:
    """The environment and the output of this process. A process that unpickles them has them, too: its server may be
    older than they are.
    """

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Any, ...]]:
        return _enter, (dict(os.environ), reduction.DupFd(1), reduction.DupFd(2))


def _enter(environment: Mapping[str, str], *files: Any) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for number, file in enumerate(files, 1):
        given = file.detach()
        os.dup2(given, number)
        os.close(given)


def run(here: None, signals: Collection[signal.Signals], program: str, *options: str) -> None:
    """Run a program in this fork as a new Python would. It returns when a rank has done its work.

    `here`: `Surroundings`, unpickled.
    """
    try:
        launcher = parent_process()
        assert launcher is not None
        os.setsid()
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        sys.argv, sys.path[:0] = [program, *options], [str(Path(program).parent)]
        runpy.run_path(program, run_name="__main__")
    except BaseException:
        # What a rank raises ends it with a report (`launch.process.run_rank`).
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)


def _end_with(launcher: BaseProcess) -> None:
    """End this process when the one that asked for it has ended."""
    launcher.join()
    os._exit(1)
