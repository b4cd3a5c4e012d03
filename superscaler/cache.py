"""A folder of files by hash, which any number of processes share: written whole or not at all, and bounded.

What cannot be read is not there, and what cannot be written is not kept: a cache is never the reason of an error.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

BYTES, ENTRIES = 2 * 10**9, 64
_HOUR = 3600
# platform -> the environment variable that has the folder for caches, and the folder below home without it
_FOLDERS = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}


def folder() -> Path:
    """Return XDG_CACHE_HOME/superscaler, or where this platform has caches."""
    variable, below = _FOLDERS.get(sys.platform, ("", ".cache"))
    given = os.environ.get("XDG_CACHE_HOME") or os.environ.get(variable)
    return (Path(given) if given else Path.home() / below) / "superscaler"


def read(key: str, *names: str) -> list[bytes] | None:
    """Return these parts of an entry, which is then the latest used; None where it is missing or damaged."""
    try:
        file = _file(key)
        with zipfile.ZipFile(file) as entry:
            found = [entry.read(name) for name in names]
        os.utime(file)
    except (OSError, RuntimeError, KeyError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile):
        return None
    return found


def write(key: str, parts: Mapping[str, bytes]) -> None:
    """Write an entry, in the place of an older one, and remove those used longest ago where there are too many."""
    if sum(map(len, parts.values())) > BYTES:
        return
    with suppress(OSError, RuntimeError):
        home = folder()
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=home, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file, zipfile.ZipFile(file, "w") as entry:
                for part, data in parts.items():
                    entry.writestr(part, data)
            os.replace(name, _file(key))
        finally:
            Path(name).unlink(missing_ok=True)
        _shrink(home)


def remove(key: str) -> None:
    with suppress(OSError, RuntimeError):
        _file(key).unlink()


def usage() -> tuple[int, int]:
    """Return how many entries there are, and their bytes."""
    try:
        sizes = [size for _, size, _ in _entries(folder())]
    except (OSError, RuntimeError):
        return 0, 0
    return len(sizes), sum(sizes)


def _file(key: str) -> Path:
    return folder() / f"{key}.zip"


def _entries(home: Path) -> list[tuple[float, int, Path]]:
    """Return when each entry was used, its bytes and its file."""
    found = []
    for file in home.glob("*.zip"):
        with suppress(FileNotFoundError):
            stat = file.stat()
            found.append((stat.st_mtime, stat.st_size, file))
    return found


def _shrink(home: Path) -> None:
    total = 0
    for k, (_, size, file) in enumerate(sorted(_entries(home), reverse=True)):
        total += size
        if k >= ENTRIES or total > BYTES:
            file.unlink(missing_ok=True)
    for file in home.glob("*.tmp"):
        with suppress(FileNotFoundError):
            # A process that was killed leaves its file.
            if time.time() - file.stat().st_mtime > _HOUR:
                file.unlink()
