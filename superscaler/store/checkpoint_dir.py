"""A folder of checkpoints on disk: its lock, the leftovers of killed runs, and the checkpoints that stay."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import socket
from contextlib import suppress
from itertools import count
from pathlib import Path

from superscaler.errors import InputError, brief
from superscaler.specs.file_errors import cause, writing
from superscaler.store.folder import ASIDE
from superscaler.store.tensors import FOLDER, MANIFEST_FILE, POINTER_FILE, checkpoints

# All ranks of a run lock this file. The system releases the lock of a process that ends, for whatever cause.
LOCK_FILE = ".lock"
# The files of an unfinished checkpoint.
_PARTS = re.compile(rf"rank-\d{{5,}}\.(safetensors|json)|\.(rank-\d{{5,}}|manifest)\.\w+\.\w+{re.escape(ASIDE)}")


def lock(directory: Path, is_first: bool) -> int:
    """Hold a folder of checkpoints for a run, until the file that is returned is closed or the process ends. The first
    rank makes the folder, writes there which process holds it, and removes leftovers of killed runs. Raises OSError,
    and InputError where another run holds the folder.
    """
    if is_first:
        directory.mkdir(parents=True, exist_ok=True)
    file = os.open(directory / LOCK_FILE, os.O_RDWR | (os.O_CREAT if is_first else 0), 0o666)
    try:
        if is_first:
            _flock(file, fcntl.LOCK_EX)
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            os.fsync(file)
            _sweep(directory)
        _flock(file, fcntl.LOCK_SH)
    except BlockingIOError:
        holder = brief(os.pread(file, 300, 0).decode(errors="replace")) or "an unknown process"
        os.close(file)
        raise InputError(
            f"another run saves into {directory}: {holder}. Wait until it ends, stop it, or choose another folder."
        ) from None
    except OSError:
        os.close(file)
        raise
    return file


def _flock(file: int, kind: int) -> None:
    """Lock a file unless another run did. Not every file system has locks; nothing is held there."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


def check_folder(directory: Path) -> None:
    """Raise InputError unless a run may save into a folder, which need not be there and is not made."""
    made = [path for path in (directory, *directory.parents) if not os.path.lexists(path)]
    try:
        with writing(directory, "choose another folder"):
            file = lock(directory, is_first=True)
            if made:
                (directory / LOCK_FILE).unlink()
            os.close(file)
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _sweep(directory: Path) -> None:
    """Remove incomplete checkpoints that hold nothing but files of a checkpoint."""
    for folder in directory.iterdir():
        is_ours = FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
        if is_ours and all(_PARTS.fullmatch(name) for name in os.listdir(folder)):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the files of a checkpoint, the manifest first, and the folder if it is then empty."""
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
    """Remove a failed checkpoint, unless it is whole and the last one."""
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
    """Return the file of a checkpoint that cannot be written, and the cause."""
    hint = "; is it on a disk that all ranks share?" if getattr(error, "errno", 0) == errno.ENOENT else ""
    return f"{file} cannot be written: {cause(error, file)}{hint}"
