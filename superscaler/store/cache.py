"""A folder of files by hash, shared by any number of processes: each is written whole or not at all, and their number
is bounded.

An unreadable entry counts as missing, and an entry that cannot be written is skipped: a cache never causes an error.
"""

import functools
import hashlib
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from superscaler.specs.whole_file import ASIDE, write_file

BYTES, ENTRIES = 2 * 10**9, 64
_HOUR = 3600
# An entry starts with the sha256 of its data.
_DIGEST = 32
# platform -> the environment variable that has the folder for caches, and the folder below home without it
_FOLDERS = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}


@functools.cache
def sources() -> str:
    """Return the hash of this package's sources, which determine the meaning of an entry."""
    home, found = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(home.rglob("*.py")):
        found.update(f"{file.relative_to(home)}\n".encode() + file.read_bytes())
    return found.hexdigest()


def folder() -> Path:
    """Return XDG_CACHE_HOME/superscaler, or the platform's own cache folder. By XDG's rules, a relative path does not
    count.
    """
    variable, below = _FOLDERS.get(sys.platform, ("", ".cache"))
    given = (Path(os.environ.get(name, "")) for name in ("XDG_CACHE_HOME", variable))
    return (next((path for path in given if path.is_absolute()), None) or Path.home() / below) / "superscaler"


def read(key: str) -> bytes | None:
    """Return an entry, and mark it as the latest used; None if it is missing or damaged."""
    with suppress(OSError, RuntimeError):
        data = (folder() / key).read_bytes()
        if data[:_DIGEST] == hashlib.sha256(data[_DIGEST:]).digest():
            os.utime(folder() / key)
            return data[_DIGEST:]
    return None


def write(key: str, data: bytes) -> None:
    """Write or replace an entry, and remove the least recently used ones if there are too many."""
    if len(data) > BYTES:
        return
    with suppress(OSError, RuntimeError):
        home = folder()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_file(home / key, hashlib.sha256(data).digest() + data)
        _shrink(home)


def usage() -> tuple[int, int]:
    """Return the number of entries, and their bytes."""
    try:
        sizes = [size for _, size, file in _entries(folder()) if file.suffix != ASIDE]
    except (OSError, RuntimeError):
        return 0, 0
    return len(sizes), sum(sizes)


def _entries(home: Path) -> list[tuple[float, int, Path]]:
    """Return (time of use, bytes, path) of each file, the latest first."""
    found = []
    for file in home.glob("*"):
        with suppress(FileNotFoundError):
            stat = file.stat()
            found.append((stat.st_mtime, stat.st_size, file))
    return sorted(found, reverse=True)


def _shrink(home: Path) -> None:
    total, count = 0, 0
    for used, size, file in _entries(home):
        if file.suffix == ASIDE:
            # A killed process leaves its file.
            is_old = time.time() - used > _HOUR
        else:
            total, count = total + size, count + 1
            is_old = count > ENTRIES or total > BYTES
        if is_old:
            file.unlink(missing_ok=True)
