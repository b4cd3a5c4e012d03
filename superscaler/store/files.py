"""Files: the names of those of a plan, how one is written whole or not at all, and their hashes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from superscaler.errors import InputError

PLAN_FILE, EXPLAIN_FILE, JOURNAL_FILE = "plan.json", "explain.json", "journal.txt"
MODEL_FILE, PROGRAM_FILE, RUN_FILE = "model.txt", "program.txt", "run.py"
WEIGHTS_FILE = "initial.safetensors"
# The folder of copies of the users' files that register operators.
OPERATORS = "operators"
# The suffix of a file that is not whole yet.
ASIDE = ".tmp"


def named_path(verb: str, name: object) -> Path:
    """Return the path that a caller names. Raises InputError for an invalid name."""
    if not isinstance(name, str | Path) or not str(name) or "\0" in str(name):
        raise InputError(f"{verb} needs the name of a file or directory, not {name!r}; '.' is the current directory.")
    return Path(name)


def is_inside(name: str) -> bool:
    """Return whether a name with slashes stays inside of its folder.

    >>> is_inside("operators/ops.py"), is_inside("../ops.py"), is_inside("/ops.py")
    (True, False, False)
    """
    return not {"", ".", ".."} & set(name.split("/")) and "\\" not in name and "\0" not in name


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def hash_without(found: Mapping[str, Any], key: str) -> str:
    """Return the hash of a JSON object without one entry, which may hold the hash itself."""
    return digest(json.dumps({k: v for k, v in found.items() if k != key}, sort_keys=True))


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Give a name beside a file to write to; the written file is synced to disk and then replaces the file.

    Whatever ends the process, the file is the old one or the new one, whole. After an error it is the old one.
    """
    aside = file.with_name(f".{file.name[:80]}.{uuid4().hex}{ASIDE}")
    try:
        yield aside
        sync(aside)
        os.replace(aside, file)
    finally:
        aside.unlink(missing_ok=True)
    sync(file.parent)


def write_file(file: Path, data: str | bytes) -> None:
    """Write a file whole or not at all, and make it last."""
    with replacing(file) as aside:
        aside.write_bytes(data.encode() if isinstance(data, str) else data)


def sync(path: Path) -> None:
    """Wait until all writes to a file, or into a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
