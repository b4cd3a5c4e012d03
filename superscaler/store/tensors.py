"""Tensors in safetensors files, by the user's names, read by slices: checkpoints, and weights of other programs."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from superscaler.errors import InputError
from superscaler.specs.file_errors import reading
from superscaler.store.manifest import read_manifest
from superscaler.store.pieces import Ranges, overlap, sizes, whole
from superscaler.store.tensor_file import DTYPES

MANIFEST_FILE, POINTER_FILE = "manifest.json", "latest"
WHOLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# The remedy for damage.
ANOTHER = "take another checkpoint or file"
# Bytes of the longest name of a checkpoint.
_LONGEST = 200
FOLDER = re.compile(r"step-\d{8,}(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a tensor, under a key of a file."""

    file: str
    key: str
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor: its pieces, the optimizer's `states` of it (stored under KEY/STATE), and its count of updates."""

    shape: tuple[int, ...]
    dtype: str
    pieces: tuple[Piece, ...]
    states: tuple[str, ...] = ()
    steps: float | None = None


def newest(name: str) -> str:
    """Return the name of a tensor without the number of an older version.

    >>> newest("head.weight~2"), newest("head.weight")
    ('head.weight', 'head.weight')
    """
    return re.sub(r"~\d+$", "", name)


@dataclass
class TensorReader:
    """A checkpoint (with a manifest), or weights of another program (without). A shard is checked before it is read."""

    directory: Path
    tensors: Mapping[str, Entry]
    manifest: Mapping[str, Any] | None = None
    _files: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Return the names of the model's tensors, without older versions."""
        return {name for name in self.tensors if newest(name) == name}

    def read(self, name: str, ranges: Ranges, state: str = "") -> Tensor:
        """Return a piece of a tensor, or of a state of it. Raises InputError naming the damaged file."""
        entry = self.tensors[name]
        if not math.prod(sizes(ranges)):
            return torch.empty(sizes(ranges), dtype=getattr(torch, entry.dtype))
        out: Tensor | None = None
        filled = 0
        for piece in entry.pieces:
            common = overlap(piece.ranges, ranges)
            if common is None:
                continue
            found = self._slice(piece, f"/{state}" if state else "", [here for here, _ in common], entry.dtype)
            if tuple(found.shape) == sizes(ranges):
                # The slice is the whole result, in order.
                return found
            out = torch.zeros(sizes(ranges), dtype=found.dtype) if out is None else out
            out[tuple(torch.from_numpy(i) for i in np.ix_(*(there for _, there in common)))] = found
            filled += found.numel()
        if out is None or filled < out.numel():
            raise InputError(f"{self.directory} has {filled} of the {np.prod(sizes(ranges))} elements read of {name}.")
        return out

    def _slice(self, piece: Piece, suffix: str, places: list[np.ndarray], dtype: str) -> Tensor:
        file = self.directory / piece.file
        with _reading(file):
            if piece.file not in self._files:
                self.check(piece.file)
                self._files[piece.file] = safe_open(file, framework="pt")
            view = self._files[piece.file].get_slice(piece.key + suffix)
            found_as = tuple(view.get_shape()), DTYPES.get(view.get_dtype(), view.get_dtype())
            # The states of a weight may be of another dtype.
            if found_as[0] != sizes(piece.ranges) or (not suffix and found_as[1] != dtype):
                raise InputError(
                    f"{file} has {piece.key + suffix} as {found_as[1]} of shape {found_as[0]}, but the manifest says "
                    f"{dtype} of shape {sizes(piece.ranges)}; take another checkpoint."
                )
            if not places:
                return self._files[piece.file].get_tensor(piece.key + suffix)
            found = view[tuple(slice(int(p[0]), int(p[-1]) + 1) for p in places)].contiguous()
        for dim, place in enumerate(places):
            if len(place) != found.shape[dim]:
                found = found.index_select(dim, torch.from_numpy(place - place[0]))
        return found

    def check(self, name: str) -> None:
        """Raise InputError for a shard that differs from the saved one."""
        if self.manifest is None:
            return
        file, kept = self.directory / name, self.manifest["shards"][name]
        with _reading(file):
            if not stat.S_ISREG(file.lstat().st_mode):
                raise InputError(f"{file} is no file of its own; a checkpoint has no links, folders or pipes.")
            size, found = file.stat().st_size, "" if file.stat().st_size != kept["bytes"] else file_hash(file)
        if found != kept["sha256"]:
            differs = f"{size:,} bytes, not {kept['bytes']:,}" if not found else f"sha256 {found}, not {kept['sha256']}"
            raise InputError(
                f"{file} is damaged: it has {differs}. Nothing was loaded; take another checkpoint beside it."
            )


def _reading(file: Path) -> AbstractContextManager[None]:
    """Name the file in errors of reading it."""
    return reading(file, ANOTHER, (SafetensorError,), "safetensors file")


def is_there(path: Path) -> bool:
    """Return whether a file or folder exists. Raises InputError if that is unknown."""
    with reading(path, ANOTHER):
        return path.exists()


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    with _reading(file):
        # Opening a pipe would wait for a writer.
        if not stat.S_ISREG(file.stat().st_mode):
            raise InputError(f"{file} is no file; give a safetensors file, or a folder with some.")
        with safe_open(file, framework="pt") as stored:
            yield stored


def file_hash(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def open_stored(path: str | Path) -> TensorReader:
    """Open a checkpoint, a folder of checkpoints (the one that `latest` names), a safetensors file, or a folder with
    `model.safetensors` or its index. Raises InputError for anything else, and for damage.
    """
    path = Path(path)
    if not is_there(path):
        raise InputError(f"{path} does not exist; give a checkpoint, or a safetensors file or folder.")
    if path.is_file():
        return _plain(path.parent, dict.fromkeys(_keys(path), path.name))
    kinds: dict[str, Callable[[Path], TensorReader]] = {
        MANIFEST_FILE: _checkpoint,
        POINTER_FILE: lambda path: _checkpoint(pointed(path)),
        INDEX_FILE: lambda path: _plain(path, _index(path / INDEX_FILE)),
        WHOLE_FILE: lambda path: _plain(path, dict.fromkeys(_keys(path / WHOLE_FILE), WHOLE_FILE)),
    }
    for name, read in kinds.items():
        with reading(path, ANOTHER):
            # Reading a pipe would wait for a writer.
            is_file = (path / name).is_file()
        if is_file:
            return read(path)
    raise InputError(f"{path} has no checkpoint and no weights: none of {', '.join(kinds)} is there.")


def open_checkpoint(path: str | Path) -> TensorReader:
    """Open a checkpoint, or the one that `latest` of a folder names. Raises InputError for weights only."""
    stored = open_stored(path)
    if stored.manifest is None:
        raise InputError(f"{path} holds weights but is no checkpoint; load it as weights, or import it first.")
    return stored


def pointed(directory: Path) -> Path:
    """Return the checkpoint that `latest` names."""
    file = directory / POINTER_FILE
    with _reading(file), file.open("rb") as stream:
        name = stream.read(_LONGEST).decode(errors="replace").strip()
    folder = directory / name if FOLDER.fullmatch(name) else directory
    if folder == directory or folder.is_symlink() or not (folder / MANIFEST_FILE).is_file():
        kept = ", ".join(str(found) for found in checkpoints(directory))
        hint = f"give one of the whole ones there: {kept}" if kept else "there is no whole one there"
        raise InputError(f"{file} names {name[:80]!r}, which is no whole checkpoint; {hint}.")
    return folder


def checkpoints(directory: Path) -> list[Path]:
    """Return the whole checkpoints in a folder, in the order in which they were saved."""
    found = [f for f in directory.glob(f"step-*/{MANIFEST_FILE}") if FOLDER.fullmatch(f.parent.name) and _is_own(f)]
    return [file.parent for file in sorted(found, key=lambda file: (file.stat().st_mtime_ns, file))]


def _is_own(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and not file.parent.is_symlink()


def _checkpoint(directory: Path) -> TensorReader:
    file = directory / MANIFEST_FILE
    if file.is_symlink():
        raise InputError(f"{file} is a link, which no checkpoint has; take another checkpoint.")
    with reading(file, ANOTHER, kind="manifest of a checkpoint"):
        manifest = read_manifest(file.read_bytes())
    return TensorReader(directory, {name: _entry(**entry) for name, entry in manifest["tensors"].items()}, manifest)


def _entry(pieces: Any, shape: Any, dtype: str, states: Any, steps: Any, **_: Any) -> Entry:
    made = tuple(Piece(p["shard"], p["key"], [[(a, b) for a, b in dim] for dim in p["ranges"]]) for p in pieces)
    return Entry(tuple(shape), dtype, made, tuple(states), steps)


def _keys(file: Path) -> list[str]:
    with opened(file) as stored:
        return list(stored.keys())


def _index(file: Path) -> dict[str, str]:
    with reading(file, ANOTHER, kind="index of safetensors files"):
        found = dict(json.loads(file.read_bytes())["weight_map"])
        if wrong := [name for name in found.values() if Path(name).name != name or not name.endswith(".safetensors")]:
            raise ValueError(f"{wrong[0]!r} is no safetensors file in the folder")
        return found


def _plain(directory: Path, files: Mapping[str, str]) -> TensorReader:
    """Return the tensors of safetensors files, each whole."""
    if unclear := [name for name in files if not name.isprintable()]:
        raise InputError(f"{directory / files[unclear[0]]} has a tensor with the name {unclear[0]!r}, which is none.")
    tensors = {}
    for file in sorted(set(files.values())):
        with opened(directory / file) as stored:
            here = set(stored.keys())
            for name in sorted(n for n, f in files.items() if f == file):
                if name not in here:
                    raise InputError(f"{directory / file} has no {name}, though {INDEX_FILE} says so.")
                view = stored.get_slice(name)
                shape, kind = tuple(view.get_shape()), view.get_dtype()
                tensors[name] = Entry(shape, DTYPES.get(kind, kind), (Piece(file, name, whole(shape)),))
    return TensorReader(directory, tensors)


def read_named(
    stored: TensorReader, names: list[str], shape: tuple[int, ...], dtype: torch.dtype, ranges: Ranges
) -> Tensor | None:
    """Return a piece of the tensor with all these (tied) names, None if none is stored.

    Raises InputError for another shape, a dtype that this one cannot hold exactly, and for tensors that are tied here
    and differ there.
    """
    found: Tensor | None = None
    first = ""
    for name in names:
        entry = stored.tensors.get(name)
        if entry is None:
            continue
        if entry.shape != shape or not _is_exact(getattr(torch, entry.dtype, None), dtype):
            raise InputError(
                f"{name} is {entry.dtype} of shape {entry.shape} in {stored.directory}, but "
                f"{str(dtype).removeprefix('torch.')} of shape {shape} in this model; they are of different models."
            )
        value = stored.read(name, ranges).to(dtype)
        if found is not None and not torch.equal(found, value):
            raise InputError(f"{first} and {name} differ in {stored.directory}, but this model ties them.")
        found, first = (value, name) if found is None else (found, first)
    return found


def _is_exact(theirs: torch.dtype | None, ours: torch.dtype) -> bool:
    """Return whether every number of their dtype is one of ours."""
    if theirs is None or theirs == ours:
        return theirs == ours
    return theirs.is_floating_point and ours.is_floating_point and torch.promote_types(theirs, ours) == ours


def missing(stored: TensorReader, name: str) -> InputError:
    """Return the error of a tensor that is not stored."""
    near = difflib.get_close_matches(name, stored.tensors, n=1, cutoff=0.5)
    hint = f"; it has {near[0]}" if near else ""
    return InputError(f"{stored.directory} has no {name}, one of the model's own{hint}. They are of different models.")
