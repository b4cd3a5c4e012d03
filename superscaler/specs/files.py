"""The files of a plan directory: their names, and which files in a directory are of the plan there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from superscaler.errors import InputError

PLAN_FILE, EXPLAIN_FILE, JOURNAL_FILE = "plan.json", "explain.json", "journal.txt"
MODEL_FILE, PROGRAM_FILE, RUN_FILE = "model.txt", "program.txt", "run.py"
WEIGHTS_FILE = "initial.safetensors"


def named_path(verb: str, name: object) -> Path:
    """Return the path that a caller names. Raises InputError for what is no name of a file."""
    if not isinstance(name, str | Path) or not str(name) or "\0" in str(name):
        raise InputError(f"{verb} needs the name of a file or directory, not {name!r}; '.' is the current directory.")
    return Path(name)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def data_hash(plan: Mapping[str, Any]) -> str:
    """Return the hash of plan.json without its manifest."""
    return digest(json.dumps({k: v for k, v in plan.items() if k != "manifest"}, sort_keys=True))


def read_plan(directory: Path) -> dict[str, Any]:
    """Return plan.json. Raises InputError for a directory without one, or with one that compile did not write."""
    try:
        if not (directory / PLAN_FILE).is_file():
            raise InputError(f"{directory} is not a plan directory (it has no {PLAN_FILE}); write one with --out.")
        plan = json.loads((directory / PLAN_FILE).read_text())
        if not {"sources", "superscaler", "files"} <= plan["manifest"].keys():
            raise KeyError("manifest")
        if any(Path(name).name != name or len(shown) != 64 for name, shown in plan["manifest"]["files"].items()):
            raise KeyError("files")
        return dict(plan)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{directory / PLAN_FILE} is not what compile writes, or was damaged.") from None


def plan_files(directory: Path) -> frozenset[str]:
    """Return the names of the files in a directory that are of the plan which compile wrote there; none if it is empty
    or not there. Raises InputError for a file, and for a directory that holds something, but no plan of ours: nothing
    there is ours.
    """
    try:
        if directory.exists() and not directory.is_dir():
            raise InputError(f"{directory} is a file; choose a directory.")
        if not directory.exists() or not any(directory.iterdir()):
            return frozenset()
    except OSError as error:
        raise InputError(f"{directory} cannot be read: {error.strerror}; choose another directory.") from error
    if not (directory / PLAN_FILE).is_file():
        raise InputError(f"{directory} is not empty and is not a plan directory; choose another --out.")
    try:
        return frozenset((PLAN_FILE, WEIGHTS_FILE, *read_plan(directory)["manifest"]["files"]))
    except InputError as error:
        raise InputError(
            f"{error} Nothing in {directory} is replaced; choose another --out, or empty that directory yourself."
        ) from None
