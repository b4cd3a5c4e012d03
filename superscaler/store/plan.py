"""Plan directories, read without running any of their code. Any difference from the files that compile wrote is an
InputError with the file.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from superscaler.errors import InputError
from superscaler.specs.file_errors import DAMAGE, reading
from superscaler.store.files import (
    EXPLAIN_FILE,
    JOURNAL_FILE,
    MODEL_FILE,
    OPERATORS,
    PLAN_FILE,
    PROGRAM_FILE,
    RUN_FILE,
    WEIGHTS_FILE,
    digest,
    hash_without,
    is_inside,
)

if TYPE_CHECKING:
    from pydantic import BaseModel

# The version of plan directories; a plan of another version is not read.
VERSION = 2
# The folder of a new plan until it is whole, inside the directory that then gets its files.
NEW = ".superscaler-new"
REWRITE = "write it again with superscaler compile --out"
_OURS = re.compile(
    rf"(program_\d+|segments)\.py|{OPERATORS}/.+\.py|"
    + "|".join(map(re.escape, (RUN_FILE, MODEL_FILE, PROGRAM_FILE, JOURNAL_FILE, EXPLAIN_FILE)))
)


def read_plan(directory: Path, manifest: bool = True) -> dict[str, Any]:
    """Return plan.json of a plan directory, checked for its version and types; with `manifest` also for its hashes."""
    from superscaler.store.plan_head import PlanFile

    file = directory / PLAN_FILE
    with reading(file, REWRITE):
        is_there = file.exists()
    if not is_there:
        raise InputError(f"{directory} is not a plan directory (it has no {PLAN_FILE}); {REWRITE}.")
    text = _bytes(file)
    plan: dict[str, Any] = _object(file, text)
    check_version(file, plan, VERSION)
    check_types(file, PlanFile, text)
    if not len(plan["devices"]) == len(plan["programs"]) == plan["world"] > 0:
        counts = f"{len(plan['devices'])} devices, {len(plan['programs'])} programs and a world of {plan['world']}"
        raise InputError(f"{file} is damaged (it has {counts}); {REWRITE}.")
    kept = plan["manifest"]
    if manifest and (hash_without(plan, "manifest") != kept["data"] or hash_without(kept, "self") != kept["self"]):
        _differs(file)
    return plan


def read_file(directory: Path, name: str, kept: Mapping[str, Any] | None = None) -> bytes:
    """Return a file of a plan directory; with a manifest, its hash is checked."""
    data = _bytes(directory / name)
    if kept is not None and digest(data) != kept["files"].get(name):
        _differs(directory / name)
    return data


def read_text(directory: Path, name: str, kept: Mapping[str, Any] | None = None) -> str:
    with reading(directory / name, REWRITE):
        return read_file(directory, name, kept).decode()


def read_json(directory: Path, name: str, types: type[BaseModel], version: int, kept: Mapping[str, Any]) -> Any:
    """Return the data of a JSON file in a plan directory, checked for its hash, version and types."""
    file, text = directory / name, read_file(directory, name, kept)
    found = _object(file, text)
    check_version(file, found, version)
    check_types(file, types, text)
    return found


def check_files(directory: Path, plan: Mapping[str, Any]) -> None:
    """Raise InputError unless all files of a directory are as its plan.json says."""
    for name in plan["manifest"]["files"]:
        read_file(directory, name, plan["manifest"])
    check_weights(directory, plan["manifest"])


def check_weights(directory: Path, kept: Mapping[str, Any], names: Iterable[str] | None = None) -> None:
    """Raise InputError unless the weights have the header of a manifest, and of the tensors named (default: all) the
    bits.
    """
    file = directory / WEIGHTS_FILE
    header, found = weight_hashes(file, kept["tensors"] if names is None else names)
    if header != kept["header"] or any(kept["tensors"].get(name) != shown for name, shown in found.items()):
        _differs(file)


def weight_hashes(file: Path, names: Iterable[str] | None = None) -> tuple[str, dict[str, str]]:
    """Return the hash of the header of a safetensors file, and by name those of tensors in it (default: of all)."""

    header, found = read_header(file)
    wanted, base = found if names is None else names, 8 + len(header)
    with reading(file, REWRITE), file.open("rb") as stream:
        ends = {name: found[name]["data_offsets"] for name in wanted}
        hashes = {name: _part(stream, base + start, end - start) for name, (start, end) in ends.items()}
    return digest(len(header).to_bytes(8, "little") + header), hashes


def read_header(file: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the header of a safetensors file, as bytes and as data. Raises InputError for a file of another size."""
    require_file(file)
    with reading(file, REWRITE), file.open("rb") as stream:
        # The largest header that safetensors allows.
        header = stream.read(min(int.from_bytes(stream.read(8), "little"), 10**8))
        found: dict[str, Any] = json.loads(header)
        size = 8 + len(header) + max((entry["data_offsets"][1] for entry in found.values()), default=0)
        if size != file.stat().st_size:
            raise ValueError(f"it has {file.stat().st_size} bytes, not {size}")
        return header, found


def _part(stream: BinaryIO, start: int, count: int) -> str:
    """Return the hash of a part of a file."""
    found = hashlib.sha256()
    stream.seek(start)
    while count > 0 and (data := stream.read(min(count, 2**20))):
        found.update(data)
        count -= len(data)
    return found.hexdigest()


def plan_files(directory: Path) -> frozenset[str]:
    """Return the names of the files in a directory that are of the plan which compile wrote there, or was writing; none
    if it is empty or not there. Raises InputError for a file, and for a directory that holds something, but no plan of
    ours: nothing there is ours.
    """
    with reading(directory, "choose another directory"):
        if directory.exists() and not directory.is_dir():
            raise InputError(f"{directory} is a file; choose a directory.")
        there = {entry.name for entry in directory.iterdir()} if directory.exists() else set()
        plans = [folder for folder in (directory, directory / NEW) if (folder / PLAN_FILE).is_file()]
    if there - {NEW} and not plans:
        raise InputError(f"{directory} is not empty and is not a plan directory; choose another --out.")
    return frozenset[str]().union(*map(listed, plans))


def listed(folder: Path) -> frozenset[str]:
    """Return the names of all files of the plan of any version whose plan.json is in a folder."""
    try:
        names = json.loads((folder / PLAN_FILE).read_bytes())["manifest"]["files"].keys()
        if not {EXPLAIN_FILE, RUN_FILE} <= names or not all(_OURS.fullmatch(n) and is_inside(n) for n in names):
            raise KeyError
    except (OSError, *DAMAGE):
        raise InputError(
            f"{folder / PLAN_FILE} is not what compile writes, or was damaged. Nothing in {folder} is replaced; choose "
            "another --out, or empty that directory yourself."
        ) from None
    return frozenset((PLAN_FILE, WEIGHTS_FILE, *names))


def check_version(file: Path, found: Mapping[str, Any], version: int) -> None:
    if found.get("version") != version:
        theirs = str(found.get("version"))[:20]
        raise InputError(f"{file} is of version {theirs}, but this superscaler reads version {version}; {REWRITE}.")


def check_types(file: Path, types: type[BaseModel], text: bytes) -> None:
    """Raise InputError that names the first thing in a JSON text that is not of its type."""
    from pydantic import ValidationError

    try:
        types.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ", ".join(map(str, first["loc"]))[:120] or "the whole"
        message = first["msg"][0].lower() + first["msg"][1:]
        raise InputError(
            f"{file} is damaged ({where} is {str(first['input'])[:40]!r}: {message}); {REWRITE}."
        ) from None


def _object(file: Path, text: bytes) -> dict[str, Any]:
    def no_number(name: str) -> NoReturn:
        raise ValueError(f"{name} is no number")

    with reading(file, REWRITE):
        found = json.loads(text, parse_constant=no_number)
    if not isinstance(found, dict):
        raise InputError(f"{file} is damaged (it holds a {type(found).__name__}, not an object); {REWRITE}.")
    return found


def _bytes(file: Path) -> bytes:
    require_file(file)
    with reading(file, REWRITE):
        return file.read_bytes()


def require_file(file: Path) -> None:
    """Raise InputError for a missing file, and for a folder or pipe: reading a pipe would wait for ever."""
    with reading(file, REWRITE):
        if not file.is_file():
            found = "a folder" if file.is_dir() else "not a file" if file.exists() else "missing"
            raise InputError(f"{file} is {found}; {REWRITE}.")


def _differs(file: Path) -> NoReturn:
    mine = "; what was edited on purpose runs by ss.load(DIR, manifest=False)" if file.suffix == ".py" else ""
    raise InputError(f"{file} is not what compile wrote there; {REWRITE}{mine}.")
