"""Reads of the user's code beside its modules: files and environment variables. Equal reads make equal results."""

import hashlib
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from superscaler.specs.user_file import is_installed

# Events of Python's audit hooks by which code reads the system, not a file.
_UNKNOWN = {
    **dict.fromkeys(("os.listdir", "os.scandir", "glob.glob", "pathlib.Path.glob"), "lists a folder"),
    **dict.fromkeys(("socket.connect", "socket.getaddrinfo", "urllib.Request"), "reads the network"),
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.posix_spawn"), "runs a program"),
}
_CLOCK = re.compile(
    rb"\btime\.(time|time_ns|localtime|gmtime|ctime|strftime)\b|\bdate(time)?\.(now|utcnow|today)\b|from time import"
)
# A larger file is identified by its size and time, without its bytes.
_LARGE = 1 << 26
_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = (sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), "<frozen")
_FRAMEWORK = (os.sep + "torch" + os.sep, "importlib", _OURS)


@dataclass(slots=True)
class Reads:
    """Reads with their contents at that time: (file or variable, content). `own`: those by the user's code, or by a
    library that it called. `unknown`: a read whose result cannot be compared, in words.
    """

    found: set[tuple[str, str]] = field(default_factory=set)
    own: set[tuple[str, str]] = field(default_factory=set)
    unknown: str = ""

    def add(self, what: str, content: str, is_own: bool) -> None:
        self.found.add((what, content))
        if is_own:
            self.own.add((what, content))


# An audit hook stays until Python ends. The files of an imported module are not read anew for the next model that
# needs it, so all reads are kept.
_ACTIVE: list[Reads] = []
_ALL = Reads()


@contextmanager
def watched(is_import: bool = True) -> Iterator[Reads]:
    """Record all reads in the block. With `is_import`, `found` also has the reads of earlier imports."""
    _listen()
    reads = Reads(_ALL.found, unknown=_ALL.unknown) if is_import else Reads()
    variables, modules = type(os.environ), dict(sys.modules)
    get, each = variables.__getitem__, variables.__iter__

    def getitem(self: Any, key: Any) -> Any:
        value = None
        try:
            value = get(self, key)
            return value
        finally:
            reads.add(f"${os.fsdecode(key)}", repr(value), _is_own(sys._getframe(1)))

    def iterate(self: Any) -> Any:
        if _is_own(sys._getframe(1)):
            reads.unknown = "reads all variables of the environment"
        return each(self)

    variables.__getitem__, variables.__iter__ = getitem, iterate  # type: ignore[method-assign]
    _ACTIVE.append(reads)
    try:
        yield reads
    finally:
        _ACTIVE.remove(reads)
        variables.__getitem__, variables.__iter__ = get, each  # type: ignore[method-assign]
        if is_import:
            _look_for_clocks(reads, modules)
            _ALL.unknown = reads.unknown


@cache
def _listen() -> None:
    sys.addaudithook(_hear)


def _hear(event: str, args: tuple[Any, ...]) -> None:
    if not _ACTIVE or (event != "open" and event not in _UNKNOWN):
        return
    # Reads of this function itself do not count.
    active = _ACTIVE[:]
    _ACTIVE.clear()
    try:
        is_own = _is_own(sys._getframe(1))
        for reads in active:
            if event == "open":
                _opened(reads, is_own, *args)
            elif is_own or "network" in _UNKNOWN[event]:
                reads.unknown = f"{_UNKNOWN[event]} ({args[0] if args else ''})"
    finally:
        _ACTIVE.extend(active)


def _opened(reads: Reads, is_own: bool, path: Any, mode: Any, flags: int) -> None:
    """Record a file that is opened for reading, unless it belongs to Python, a package or this library."""
    writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    with suppress(OSError, ValueError, TypeError):
        file = os.path.abspath(os.fsdecode(path))
        if writes or is_installed(file) or file.startswith(_OURS) or file.endswith(".pyc"):
            return None
        try:
            found = os.stat(file)
        except FileNotFoundError:
            return reads.add(file, "missing", is_own)
        if not stat.S_ISREG(found.st_mode) or file.startswith(("/proc/", "/sys/")):
            reads.unknown = f"reads {file}" if is_own else reads.unknown
        elif found.st_size > _LARGE:
            reads.add(file, f"{found.st_size} {found.st_mtime_ns}", is_own)
        else:
            reads.add(file, hashlib.sha256(Path(file).read_bytes()).hexdigest(), is_own)
    return None


def _is_own(frame: FrameType | None) -> bool:
    """Return whether the user's code reads, itself or through a library that it called. Imports do not count."""
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in _FRAMEWORK):
            return False
        if not is_installed(file) and not file.startswith(_PYTHON):
            return True
        frame = frame.f_back
    return False


def _look_for_clocks(reads: Reads, before: dict[str, Any]) -> None:
    """Mark as unknown the reads of imported user files that name a clock: no hook sees the reading of a clock."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__dict__", {}).get("__file__") or ""
        if before.get(name) is not module and file and not is_installed(file) and not file.startswith(_OURS):
            with suppress(OSError):
                if _CLOCK.search(Path(file).read_bytes()):
                    reads.unknown = f"reads the clock ({file})"
