"""Files that are written whole or not at all."""

import os
from pathlib import Path
from uuid import uuid4

# The suffix of a file that is not whole yet.
ASIDE = ".tmp"


def write_file(file: Path, data: str | bytes) -> None:
    """Write a file whole or not at all, and sync it: aside first, then in the place of an older one."""
    aside = file.with_name(f".{file.name[:80]}.{uuid4().hex}{ASIDE}")
    try:
        aside.write_bytes(data.encode() if isinstance(data, str) else data)
        sync(aside)
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
    sync(file.parent)


def sync(path: Path) -> None:
    """Wait until all writes to a file, or into a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
