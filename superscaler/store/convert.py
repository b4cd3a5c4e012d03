"""Checkpoints from and to other programs: Hugging Face's folders, plain safetensors, torch.distributed.checkpoint."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from superscaler.errors import InputError, unknown
from superscaler.specs.file_errors import reading, writing
from superscaler.store.checkpoint import CheckpointHead, commit, new_folder, write_shard
from superscaler.store.distributed import Imported
from superscaler.store.folder import Draft, written
from superscaler.store.formats import FORMATS
from superscaler.store.pieces import whole
from superscaler.store.save import add_entry
from superscaler.store.tensor_file import DTYPES
from superscaler.store.tensors import open_checkpoint


def export(path: Path, out: Path, form: str, build: Callable[[], nn.Module], ema: bool = False) -> list[str]:
    """Write a checkpoint into a new folder in a format of another program, and return the names of its files.

    `build`: returns the module that was trained; `ema`: its averages. Raises InputError for an unknown format.
    """
    if form not in FORMATS:
        raise InputError(unknown("format", form, FORMATS))
    with _replaced(out) as folder:
        FORMATS[form].write(path, folder, build, ema)
    return sorted(file.name for file in out.iterdir())


def import_weights(source: Path, out: Path, trust: bool = False) -> tuple[Path, Imported]:
    """Write weights of another program as the first checkpoint of a folder; see `Format`. Returns the checkpoint, and
    what was imported.
    """
    found = next(form for form in FORMATS.values() if form.owns(source)).open(source, trust)
    if not found.tensors:
        raise InputError(f"{source} has no tensors of a model.")
    kinds = {name: str(t.dtype).removeprefix("torch.") for name, t in found.tensors.items()}
    if other := [name for name, kind in kinds.items() if kind not in DTYPES.values()]:
        raise InputError(f"{source} has {other[0]} in torch.{kinds[other[0]]}, which no checkpoint of ours can have.")
    with _replaced(out) as folder:
        name = _publish(folder, found.tensors, found.states)
    return out / name, found


def _publish(directory: Path, tensors: Mapping[str, Tensor], states: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Write tensors trained elsewhere, with an optimizer's states, as a checkpoint of no step; return its name."""
    stored: dict[str, Tensor] = {}
    entries: dict[str, Any] = {}
    for name, tensor in tensors.items():
        ranges, own = whole(tensor.shape), states.get(name, {})
        stored |= add_entry(entries, name, tensor.shape, tensor.dtype, name, ranges, tensor, own)
    draft = Draft(directory / new_folder(directory, 0), CheckpointHead)
    write_shard(draft, 0, stored, entries)
    nothing = dict.fromkeys(("plan", "world", "seed", "optimizer", "scaler", "training"))
    commit(draft, {"step": 0, **nothing, "aliases": {}}, [0])
    return draft.path.name


@contextmanager
def _replaced(out: Path) -> Iterator[Path]:
    """Yield a new folder, which replaces `out` when it is whole. Raises InputError if `out` is not empty."""
    out = out.absolute()
    with reading(out, "choose another folder"):
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise InputError(f"{out} is there already and is not empty; choose another folder.")
    aside = out.with_name(f".{out.name}.{os.getpid()}.part")
    with writing(out, "choose another folder", (SafetensorError, CheckpointException)), written(aside):
        yield aside
        aside.replace(out)


def inspect(path: Path) -> Mapping[str, Any]:
    """Return the contents of a checkpoint, after a check of every shard."""
    stored = open_checkpoint(path)
    if stored.whole is not None:
        stored.whole.check()
    kept = {key: value for key, value in stored.head.items() if key not in ("tensors", "sha256")}
    tensors = {
        name: {"shape": entry.shape, "dtype": entry.dtype, "states": entry.states, "pieces": len(entry.pieces)}
        for name, entry in stored.tensors.items()
    }
    return {"path": str(stored.directory), **kept, "tensors": tensors}
