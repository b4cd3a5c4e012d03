"""A folder of checkpoints on disk: who writes into it, what killed runs left there, and which checkpoints stay."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from contextlib import suppress
from itertools import count
from pathlib import Path

from superscaler.runtime.stored import FOLDER, MANIFEST_FILE, POINTER_FILE, checkpoints
from superscaler.specs.files import ASIDE

# A run has a lock on this file as long as it writes; the system takes it back from a process that ends.
LOCK_FILE = ".lock"
# What a checkpoint has before it is whole.
_PARTS = re.compile(rf"rank-\d{{5,}}\.(safetensors|json)|\.(rank-\d{{5,}}|manifest)\.\w+\.\w+{re.escape(ASIDE)}")


def lock(directory: Path, is_first: bool = False) -> int:
    """Say to other runs that this one writes into a folder, until the file that is returned is closed. With `is_first`,
    what killed runs left there is removed before, unless another run writes there. Raises OSError.
    """
    file = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    # Not every file system has locks: nothing is removed then.
    with suppress(OSError):
        if is_first:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _sweep(directory)
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _sweep(directory: Path) -> None:
    """Remove checkpoints that are not whole, and hold nothing that a checkpoint has not."""
    for folder in directory.iterdir():
        is_ours = FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
        if is_ours and all(_PARTS.fullmatch(name) for name in os.listdir(folder)):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the files of a checkpoint, first the one that says that it is whole, and the folder if that is empty."""
    for name in sorted(os.listdir(folder), key=lambda name: name != MANIFEST_FILE):
        if name == MANIFEST_FILE or _PARTS.fullmatch(name):
            (folder / name).unlink()
    with suppress(OSError):
        folder.rmdir()


def new_folder(directory: Path, steps: int) -> str:
    """Make a new folder for a checkpoint and return its name. Raises OSError."""
    for number in count():
        name = f"step-{steps:08d}" + (f".{number}" if number else "")
        if not os.path.lexists(directory / name):
            (directory / name).mkdir()
            return name
    raise AssertionError


def discard(folder: Path) -> None:
    """Remove a checkpoint that could not be saved, unless it is whole and the last one."""
    pointer = folder.parent / POINTER_FILE
    with suppress(OSError):
        if not pointer.is_file() or pointer.read_text().strip() != folder.name:
            _remove(folder)


def prune(directory: Path, keep: int | None) -> None:
    """Remove the oldest whole checkpoints above `keep`, never the one that `latest` names."""
    if keep is None:
        return
    named = (directory / POINTER_FILE).read_text().strip()
    others = [folder for folder in checkpoints(directory) if folder.name != named]
    for folder in others[: max(0, len(others) + 1 - keep)]:
        _remove(folder)


def reason(file: Path, error: Exception) -> str:
    """Return in words why a file cannot be written."""
    told = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    lost = "; is it on a disk that all ranks share?" if getattr(error, "errno", 0) == errno.ENOENT else ""
    return f"{file} cannot be written: {told}{lost}"
