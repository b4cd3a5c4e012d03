"""A folder that is whole or refused: files, and a head (JSON of known types) with their hashes, written last.

A `Draft` writes a folder. `read` returns a `Whole`, which checks each file when it is read; it runs nothing. An error
is one line that names the file, the fault and the remedy.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from superscaler.errors import InputError, a, printable
from superscaler.specs.file_errors import reading, refuse, require_file
from superscaler.specs.whole_file import sync, write_file
from superscaler.store.tensor_file import tensor_hashes, write_tensors

if TYPE_CHECKING:
    from torch import Tensor


def named_path(verb: str, name: object) -> Path:
    """Return the path that a caller names. Raises InputError for an invalid name."""
    if not isinstance(name, str | Path) or not str(name) or "\0" in str(name):
        raise InputError(f"{verb} needs the name of a file or directory, not {name!r}; '.' is the current directory.")
    return Path(name)


def digest(text: str | bytes) -> str:
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


def hash_without(found: Mapping[str, Any], key: str) -> str:
    """Return the hash of a JSON object without one entry, which may hold the hash itself."""
    return digest(json.dumps({k: v for k, v in found.items() if k != key}, sort_keys=True))


Count = Annotated[int, Field(ge=0, lt=2**63)]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Checked(BaseModel):
    """A base of JSON objects with exactly these fields, of these types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Head(Checked):
    """The types of a JSON file, which may be the head of a folder.

    `NAME`: of the file; `KIND`: in errors; `VERSION`: the only readable one; `DIFFERS`: the fault of a file with
    another stamp; `REMEDY`: for damage; `MAY_LINK`: whether files may be links.
    """

    NAME: ClassVar[str]
    KIND: ClassVar[str] = ""
    VERSION: ClassVar[int]
    DIFFERS: ClassVar[str]
    REMEDY: ClassVar[str]
    MAY_LINK: ClassVar[bool] = True

    @staticmethod
    def signed(data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the data of a head with the hashes of itself."""
        raise NotImplementedError

    @staticmethod
    def stamps(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return the stamp of each file in a head: `sha256` and `bytes`, or for tensors the hashes of `header` and
        `tensors`.
        """
        raise NotImplementedError

    @classmethod
    def refuse(cls, file: Path, found: str, kept: str) -> NoReturn:
        """Raise the InputError of a file that differs from its stamp."""
        refuse(file, cls.DIFFERS.format(found=found, kept=kept), cls.REMEDY)


def parse(file: Path, text: bytes, types: type[Head]) -> dict[str, Any]:
    """Return the data in a JSON file. Raises InputError for another version, or the first value of another type."""
    with reading(file, types.REMEDY, kind=types.KIND):
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
        if not isinstance(found, dict):
            raise ValueError(f"it holds {a(type(found).__name__)}, not an object")
        if found.get("version") != types.VERSION:
            theirs = printable(str(found.get("version"))[:20])
            refuse(file, f"is of version {theirs}, but this superscaler reads version {types.VERSION}", types.REMEDY)
    check_types(file, text, types)
    return found


def check_types(file: Path, text: bytes, types: type[Head]) -> None:
    """Raise InputError for the first value in a JSON file that is not of its type."""
    with reading(file, types.REMEDY, kind=types.KIND):
        try:
            types.model_validate_json(text)
        except ValidationError as error:
            raise ValueError(_fault(error)) from None


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)[:80]!r} is there twice")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no number")


def _fault(error: ValidationError) -> str:
    """Return the first fault: the place, the value there, and its expected type."""
    first = error.errors(include_url=False, include_context=False)[0]
    where = printable(", ".join(map(str, first["loc"])))[:120]
    message = first["msg"].removeprefix("Value error, ")
    return f"{where} is {str(first['input'])[:40]!r}: {message[0].lower()}{message[1:]}" if where else message


@dataclass(frozen=True)
class Whole:
    """A folder with a checked `head`. A file that differs from its stamp is refused; without hashes none has one."""

    path: Path
    head: dict[str, Any]
    types: type[Head]
    stamps: Mapping[str, Mapping[str, Any]]

    def bytes(self, name: str) -> bytes:
        """Return a file."""
        with reading(self._file(name), self.types.REMEDY):
            data = (self.path / name).read_bytes()
        self._compare(name, {"bytes": len(data), "sha256": digest(data)})
        return data

    def text(self, name: str) -> str:
        """Return a file as text."""
        with reading(self.path / name, self.types.REMEDY):
            return self.bytes(name).decode()

    def json(self, name: str, types: type[Head]) -> dict[str, Any]:
        """Return the data of a JSON file of these types."""
        return parse(self.path / name, self.bytes(name), types)

    def check(self, names: Iterable[str] | None = None) -> None:
        """Raise InputError unless files (default: all) are unchanged since they were written."""
        for name in self.stamps if names is None else names:
            if "header" in self.stamps[name]:
                self.check_tensors(name, self.stamps[name]["tensors"])
                continue
            with reading(self._file(name), self.types.REMEDY), (self.path / name).open("rb") as stream:
                found = hashlib.file_digest(stream, "sha256").hexdigest()
                self._compare(name, {"bytes": stream.tell(), "sha256": found})

    def check_tensors(self, name: str, tensors: Iterable[str]) -> None:
        """Raise InputError if the header of a file, or one of these tensors in it, differs from its recorded hash."""
        header, found = tensor_hashes(self._file(name), self.types.REMEDY, tensors)
        kept = self.stamps[name]["tensors"] if name in self.stamps else {}
        self._compare(name, {"header": header, "tensors": {**kept, **found}})

    def _file(self, name: str) -> Path:
        require_file(self.path / name, self.types.REMEDY, self.types.MAY_LINK)
        return self.path / name

    def _compare(self, name: str, found: Mapping[str, Any]) -> None:
        for key, kept in self.stamps.get(name, {}).items():
            if found[key] != kept:
                shown = (f"{x:,} bytes" if key == "bytes" else f"{key} {x}" for x in (found[key], kept))
                self.types.refuse(self.path / name, *shown)


def read(folder: Path, types: type[Head], has_hashes: bool = True) -> Whole:
    """Open a folder: its head is read and checked, with `has_hashes` also by its own hash. Raises InputError."""
    file = folder / types.NAME
    require_file(file, types.REMEDY, types.MAY_LINK)
    with reading(file, types.REMEDY):
        text = file.read_bytes()
    head = parse(file, text, types)
    if has_hashes and types.signed(head) != head:
        types.refuse(file, "another hash", "its own")
    return Whole(folder, head, types, types.stamps(head) if has_hashes else {})


@dataclass(frozen=True)
class Draft:
    """A folder under construction: it is whole once `finish` has written its head, and no sooner."""

    path: Path
    types: type[Head]

    def file(self, name: str, data: bytes) -> None:
        """Write a file."""
        (self.path / name).write_bytes(data)
        sync(self.path / name)

    def tensors(self, name: str, tensors: Mapping[str, Tensor], hurry: Event | None = None) -> dict[str, Any]:
        """Write a safetensors file, with rests until `hurry` is set, and return its stamp."""
        found = write_tensors(self.path / name, tensors, hurry)
        sync(self.path / name)
        return {"bytes": (self.path / name).stat().st_size, "sha256": found}

    def finish(self, head: Mapping[str, Any]) -> None:
        """Write the head with the hashes of itself, after all other files are on the disk."""
        sync(self.path)
        lines = ",\n".join(f" {json.dumps(key)}: {_lines(value)}" for key, value in self.types.signed(head).items())
        write_file(self.path / self.types.NAME, f"{{\n{lines}\n}}\n")


def _lines(value: Any) -> str:
    """Return JSON with a line per entry of a table."""
    if not isinstance(value, dict) or not value:
        return json.dumps(value)
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items())
    return f"{{\n{lines}\n }}"


@contextmanager
def written(folder: Path) -> Iterator[Path]:
    """Make a new folder, which is removed after an error, and with it the empty folders that were made around it."""
    around = [parent for parent in folder.parents if not parent.exists()]
    try:
        folder.mkdir(parents=True)
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except BaseException:
        with suppress(OSError):
            for parent in around:
                parent.rmdir()
        raise
