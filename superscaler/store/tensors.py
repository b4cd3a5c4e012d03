"""Tensors in safetensors files, by the user's names, read by slices: checkpoints, and weights of other programs."""

import difflib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor, nn

from superscaler.errors import InputError
from superscaler.groups import group_by
from superscaler.specs.arguments import checked
from superscaler.specs.file_errors import reading, refuse
from superscaler.store.checkpoint import (
    ANOTHER,
    AVERAGE,
    MANIFEST_FILE,
    POINTER_FILE,
    CheckpointHead,
    Entry,
    Piece,
    pointed,
)
from superscaler.store.folder import Whole, read
from superscaler.store.pieces import Ranges, index_of, overlap, sizes, whole
from superscaler.store.tensor_file import kind_of, kinds, opened, reading_tensors

WHOLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"


def newest(name: str) -> str:
    """Return the name of a tensor without the number of an older version.

    >>> newest("head.weight~2"), newest("head.weight")
    ('head.weight', 'head.weight')
    """
    return re.sub(r"~\d+$", "", name)


def numbers_of(entry: Entry) -> dict[str, float]:
    """Return the numbers of the optimizer for a tensor, its count of updates `step` included."""
    return ({} if entry.steps is None else {"step": entry.steps}) | entry.numbers


@dataclass
class TensorReader:
    """A reader of a checkpoint, or of weights of another program: those have no stamps and an empty `head`."""

    directory: Path
    tensors: Mapping[str, Entry]
    whole: Whole | None = None
    _files: dict[str, Any] = field(default_factory=dict)

    @property
    def head(self) -> Mapping[str, Any]:
        return self.whole.head if self.whole else {}

    @property
    def model(self) -> tuple[str, bool]:
        """Return the text of the trained model, "" if it is not recorded, and whether it is of the library: a user's
        file is run only where the user names it.
        """
        name = (self.head["training"] or {}).get("model") or ""
        return name, bool(name) and not name.partition(":")[0].endswith(".py")

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
        for piece in entry.pieces:
            common = overlap(piece.ranges, ranges)
            if common is None:
                continue
            found = self._slice(piece, state, [here for here, _ in common], entry.dtype)
            if tuple(found.shape) == sizes(ranges):
                # The slice is the whole result, in order.
                return found
            out = torch.empty(sizes(ranges), dtype=found.dtype) if out is None else out
            out[index_of(there for _, there in common)] = found
        assert out is not None, "pieces cover a tensor, as the check of its head found"
        return out

    def _slice(self, piece: Piece, state: str, places: list[np.ndarray], dtype: str) -> Tensor:
        file, key = self.directory / piece.shard, f"{piece.key}/{state}" if state else piece.key
        with reading_tensors(file, ANOTHER):
            stored = self._open(piece.shard)
            view = stored.get_slice(key)
            shape, found_dtype = kind_of(view)
            # The states of a weight may be of another dtype.
            if shape != sizes(piece.ranges) or (not state and found_dtype != dtype):
                saved = f"but the manifest says {dtype} of shape {sizes(piece.ranges)}"
                refuse(file, f"has {key} as {found_dtype} of shape {shape}, {saved}", ANOTHER)
            if not places:
                return stored.get_tensor(key)
            found = view[tuple(slice(int(p[0]), int(p[-1]) + 1) for p in places)].contiguous()
        for dim, place in enumerate(places):
            if len(place) != found.shape[dim]:
                found = found.index_select(dim, torch.from_numpy(place - place[0]))
        return found

    def _open(self, name: str) -> Any:
        """Return a file for its tensors. A shard is checked first."""
        if name not in self._files:
            if self.whole is not None:
                self.whole.check([name])
            self._files[name] = safe_open(self.directory / name, framework="pt")
        return self._files[name]


def is_there(path: Path) -> bool:
    """Return whether a file or folder exists. Raises InputError if that is unknown."""
    with reading(path, ANOTHER):
        return path.exists()


def open_stored(path: str | Path) -> TensorReader:
    """Open a checkpoint, a folder of checkpoints (the one that `latest` names), a safetensors file, or a folder with
    `model.safetensors` or its index. Raises InputError for anything else, and for damage.
    """
    path = Path(path)
    if not is_there(path):
        raise InputError(f"{path} does not exist; give a checkpoint, or a safetensors file or folder.")
    if path.is_file():
        return _plain(path.parent, [path.name])
    ways: dict[str, Callable[[Path], TensorReader]] = {
        MANIFEST_FILE: _checkpoint,
        POINTER_FILE: lambda path: _checkpoint(pointed(path)),
        INDEX_FILE: _indexed,
        WHOLE_FILE: lambda path: _plain(path, [WHOLE_FILE]),
    }
    for name, way in ways.items():
        with reading(path, ANOTHER):
            # Reading a pipe would wait for a writer.
            is_file = (path / name).is_file()
        if is_file:
            return way(path)
    raise InputError(
        f"{path} has no checkpoint and no weights: none of {', '.join(ways)} is there; name a folder that --save, "
        "step.save or save_pretrained has written."
    )


def open_checkpoint(path: str | Path) -> TensorReader:
    """Open a checkpoint, or the one that `latest` of a folder names. Raises InputError for weights only."""
    stored = open_stored(path)
    if stored.whole is None:
        raise InputError(
            f"{path} holds weights but no state of training, so it is no checkpoint; start from it by --weights or "
            "step.load_weights, or make a checkpoint of it by superscaler checkpoint import."
        )
    return stored


def _checkpoint(directory: Path) -> TensorReader:
    found = read(directory, CheckpointHead)
    return TensorReader(directory, {name: Entry(**entry) for name, entry in found.head["tensors"].items()}, found)


def _indexed(directory: Path) -> TensorReader:
    file = directory / INDEX_FILE
    with reading(file, ANOTHER, kind="index of safetensors files"):
        index = dict(json.loads(file.read_bytes())["weight_map"])
        if wrong := [name for name in index.values() if Path(name).name != name or not name.endswith(".safetensors")]:
            raise ValueError(f"{wrong[0]!r} is no safetensors file in the folder")
    return _plain(directory, set(index.values()), index)


def _plain(directory: Path, files: Iterable[str], index: Mapping[str, str] | None = None) -> TensorReader:
    """Return the tensors of safetensors files, each whole: all, or those in the index."""
    tensors: dict[str, Entry] = {}
    for file in sorted(files):
        with opened(directory / file, ANOTHER) as stored:
            here = kinds(stored)
        for name in sorted(here) if index is None else sorted(name for name in index if index[name] == file):
            if not name or not name.isprintable():
                raise InputError(
                    f"{directory / file} has a tensor named {name!r}, but a name has 1 or more printable characters."
                )
            if name not in here:
                raise InputError(f"{directory / file} has no {name}, though {INDEX_FILE} says so.")
            (shape, dtype), piece = here[name], Piece(shard=file, key=name, ranges=whole(here[name][0]))
            tensors[name] = Entry(shape=list(shape), dtype=dtype, states=[], steps=None, pieces=[piece])
    return TensorReader(directory, tensors)


class Target(NamedTuple):
    """A tensor of this process: the piece `ranges` of a user's tensor of this `shape`, which has (tied) `names`."""

    tensor: Tensor
    names: Sequence[str]
    shape: tuple[int, ...]
    ranges: Ranges
    is_needed: bool


def read_targets(stored: TensorReader, targets: Iterable[Target], state: str = "") -> list[tuple[Target, Tensor]]:
    """Return tensors with their stored values, without those that are not stored; nothing is set.

    `state`: return that state of each tensor instead of its value, if stored. Raises InputError for a needed tensor
    that is not stored, for another shape, a dtype that this one cannot hold exactly, and for tensors that are tied here
    and differ there.
    """
    found = []
    for target in targets:
        names = [name for name in target.names if name in stored.tensors]
        values = [_value(stored, name, target, state) for name in names]
        for name, value in zip(names[1:], values[1:], strict=True):
            if not torch.equal(values[0], value):
                raise InputError(f"{names[0]} and {name} differ in {stored.directory}, but this model ties them.")
        if values:
            found.append((target, values[0].reshape(target.tensor.shape)))
        elif target.is_needed:
            near = difflib.get_close_matches(target.names[0], stored.tensors, n=1, cutoff=0.5)
            own = f"{target.names[0]}, one of the model's own{f'; it has {near[0]}' if near else ''}"
            raise InputError(f"{stored.directory} has no {own}. They are of different models.")
    return found


def _value(stored: TensorReader, name: str, target: Target, state: str) -> Tensor:
    entry, dtype = stored.tensors[name], target.tensor.dtype
    if tuple(entry.shape) != target.shape or not _is_exact(getattr(torch, entry.dtype, None), dtype):
        raise InputError(
            f"{name} is {entry.dtype} of shape {tuple(entry.shape)} in {stored.directory}, but "
            f"{str(dtype).removeprefix('torch.')} of shape {target.shape} in this model; they are of different models."
        )
    return stored.read(name, target.ranges, state if state in entry.states else "").to(dtype)


def _is_exact(theirs: torch.dtype | None, ours: torch.dtype) -> bool:
    """Return whether our dtype can hold every number of theirs."""
    if theirs is None or theirs == ours:
        return theirs == ours
    return theirs.is_floating_point and ours.is_floating_point and torch.promote_types(theirs, ours) == ours


def set_targets(found: Iterable[tuple[Target, Tensor]]) -> None:
    with torch.no_grad():
        for target, value in found:
            target.tensor.copy_(value)


@checked
def load_weights(module: nn.Module, path: str | Path, ema: bool = False) -> list[str]:
    """Set a module's parameters and buffers from a checkpoint, or from a safetensors file or folder.

    `path` may also be a folder of checkpoints; the last one is taken. Tied parameters stay tied; buffers that are not
    stored are unchanged. With `ema` averages of weights are taken. Returns the stored names that the module lacks.
    Raises InputError, with nothing changed, for a damaged file, a missing parameter, and for another shape or dtype.
    """
    stored, tensors = open_stored(path), named(module)
    if ema and not any(AVERAGE in entry.states for entry in stored.tensors.values()):
        raise InputError(f"{path} has no averages of weights; train with --ema, or step.ema, or leave ema out.")
    if empty := next((names[0] for names, tensor in tensors if tensor.is_meta), None):
        raise InputError(f"{empty} is on the meta device; give it memory first: module.to_empty(device='cpu').")
    targets = (
        Target(tensor, names, tuple(tensor.shape), whole(tensor.shape), isinstance(tensor, nn.Parameter))
        for names, tensor in tensors
    )
    set_targets(read_targets(stored, targets, AVERAGE if ema else ""))
    return sorted(stored.names - {name for names, _ in tensors for name in names})


def named(module: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Return the parameters and buffers of a module, each once with all its names."""
    every = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    same = group_by(every, lambda pair: id(pair[1])).values()
    return [([name for name, _ in some], some[0][1]) for some in same]
