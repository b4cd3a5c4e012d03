"""Ctrl-C ends a process with one line and exit code 130, at any moment; a rank also ends with its launcher.

This module imports only what loads in a few milliseconds. Before that, Ctrl-C gives Python's own traceback.
"""

from __future__ import annotations

import os
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import NoReturn

# The environment variable with the process number of a rank's launcher.
LAUNCHER = "SUPERSCALER_LAUNCHER"
_CODE, _LINE = 130, b"interrupted\n"
# Temporary folders, each with the process that made it.
_folders: list[tuple[int, str]] = []
# Empty once a thread is about to write the line: another one that also sees the signal leaves the end to it.
_turn = [None]
# Seconds between two checks of a rank's parent.
_LOOK = 1.0
# Linux: option that sets the signal for a process whose parent ends.
_PR_SET_PDEATHSIG = 1


def _end(line: bytes = _LINE) -> NoReturn:
    """End the process at once, without the interpreter's own teardown: modules may be half imported."""
    try:
        _turn.pop()
        os.write(2, line)
        for process, folder in _folders:
            if process == os.getpid():
                # Imported when the folder was made.
                sys.modules["shutil"].rmtree(folder, ignore_errors=True)
    except IndexError:
        time.sleep(1.0)
    finally:
        os._exit(_CODE)


class TemporaryFolder:
    """A temporary folder for a block. It is removed, too, where Ctrl-C ends the process at once."""

    def __init__(self, prefix: str = "superscaler-") -> None:
        self._prefix = prefix

    def __enter__(self) -> str:
        import shutil  # noqa: F401
        import tempfile

        self._made = tempfile.TemporaryDirectory(prefix=self._prefix)
        _folders.append((os.getpid(), self._made.name))
        return self._made.__enter__()

    def __exit__(self, *error: object) -> None:
        self._made.cleanup()
        _folders.remove((os.getpid(), self._made.name))


def run(work: Callable[[], object]) -> None:
    """Call a function as the whole work of this process. Ctrl-C lets the function clean up, and a second one ends the
    process immediately. During an import, which cannot be undone, the first one does.
    """
    # A shell may have closed stdout: the first opened file must not take its number.
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

    # A background job of a shell ignores SIGINT, and stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, stop)
        # Python drops exceptions that are raised in a finalizer.
        sys.unraisablehook = lambda found: _end() if came else hook(found)
    try:
        work()
    except BaseException as error:
        # Other code may have turned KeyboardInterrupt into another error.
        if came or isinstance(error, KeyboardInterrupt):
            _end()
        raise


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def begin_rank() -> None:
    """Make this rank end by Ctrl-C even while it waits in C, and together with torchrun's agent if that is its parent.
    Call it in the main thread; a second call does nothing.
    """
    if signal.getsignal(signal.SIGINT) is _interrupted:
        return
    signal.signal(signal.SIGINT, _interrupted)
    import threading

    parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    launcher = int(os.environ.get(LAUNCHER) or 0) or parent
    if LAUNCHER in os.environ:
        # Processes that this one starts have another launcher.
        os.environ[LAUNCHER] = ""
    if parent is not None:
        end_with_parent()
    pipe, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    threading.Thread(target=_wait, args=(pipe, parent, launcher), daemon=True).start()


def _interrupted(number: int, frame: FrameType | None) -> None:
    """End this rank. Rank 0 prints a line, unless a launcher does."""
    _end(b"" if LAUNCHER in os.environ or os.environ.get("RANK", "0") != "0" else _LINE)


def end_with_parent() -> None:
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
    """End the rank when its parent or its launcher has ended, or when Python reports SIGINT through the pipe."""
    import select

    # Both may have ended before this process asked for the signal; another program may be between them and it.
    while parent is None or launcher is None or (os.getppid() == parent and _is_running(launcher)):
        if select.select([pipe], [], [], _LOOK)[0] and signal.SIGINT in os.read(pipe, 64):
            _interrupted(signal.SIGINT, None)
    os._exit(1)
