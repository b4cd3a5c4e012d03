"""Ctrl-C ends a process with one line and exit code 130, at any moment; a rank also ends with its launcher.

What is imported here takes a few milliseconds: until then Ctrl-C is a traceback of Python itself.
"""

from __future__ import annotations

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

# The environment of a rank has here the number of the process that launched it.
LAUNCHER = "SUPERSCALER_LAUNCHER"
_CODE, _LINE = 130, b"interrupted\n"
# Seconds between two looks for the parent of a rank.
_LOOK = 1.0
# Of Linux: the signal that a process gets when its parent ends.
_PR_SET_PDEATHSIG = 1


def _end(line: bytes = _LINE) -> NoReturn:
    """End the process at once, without the interpreter's own teardown: modules may be half imported."""
    try:
        os.write(2, line)
    finally:
        os._exit(_CODE)


def run(work: Callable[[], object]) -> None:
    """Call a function, as the whole work of this process. Ctrl-C ends it at once in an import, which cannot be undone;
    elsewhere the function cleans up first, unless there is a second Ctrl-C.
    """
    # The first file that is opened must not be what is printed to, where a shell closed that.
    while (file := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(file)
    came: list[int] = []
    hook = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        if came or _is_importing(frame):
            _end()
        came.append(number)
        raise KeyboardInterrupt

    # A job in the background of a shell ignores it, and so do we.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
        # Python drops what is raised in a finalizer.
        sys.unraisablehook = lambda found: _end() if came else hook(found)
    try:
        work()
    except BaseException as error:
        # Code of others may have made another error of it.
        if came or isinstance(error, KeyboardInterrupt):
            _end()
        raise


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def begin_rank() -> None:
    """Let this process, a rank, end by Ctrl-C also while it waits in C, and end with torchrun's agent if that is its
    parent. To be called in the main thread; a second call does nothing.
    """
    if signal.getsignal(signal.SIGINT) is _interrupted:
        return
    signal.signal(signal.SIGINT, _interrupted)
    import threading

    parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    launcher = int(os.environ.get(LAUNCHER) or 0) or parent
    if LAUNCHER in os.environ:
        # Not that of the processes which this one starts.
        os.environ[LAUNCHER] = ""
    if parent is not None:
        _end_with_parent()
    pipe, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    threading.Thread(target=_wait, args=(pipe, parent, launcher), daemon=True).start()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End this rank; one of all ranks says so, unless a launcher does."""
    _end(b"" if LAUNCHER in os.environ or os.environ.get("RANK", "0") != "0" else _LINE)


def _end_with_parent() -> None:
    import ctypes

    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def _wait(pipe: int, parent: int | None, launcher: int | None) -> None:
    """End the rank when its parent or its launcher has ended, or when Python wrote into a pipe that SIGINT came."""
    import select

    # They may have ended before this process could ask for a signal; a program between both may have started it.
    while parent is None or launcher is None or (os.getppid() == parent and _is_running(launcher)):
        if select.select([pipe], [], [], _LOOK)[0] and signal.SIGINT in os.read(pipe, 64):
            _interrupted(signal.SIGINT, None)
    os._exit(1)
