"""Checkpoints from and to other programs: Hugging Face's folders, plain safetensors, torch.distributed.checkpoint."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from superscaler.errors import InputError
from superscaler.specs.file_errors import reading, writing
from superscaler.store.checkpoint import ANOTHER, CheckpointHead, commit, new_folder, write_shard
from superscaler.store.distributed import Imported, read_distributed, saved_state
from superscaler.store.folder import Draft, written
from superscaler.store.pieces import whole
from superscaler.store.save import add_entry
from superscaler.store.tensor_file import DTYPES
from superscaler.store.tensors import (
    WHOLE_FILE,
    load_weights,
    named,
    open_checkpoint,
    open_stored,
)

# The file that torch.distributed.checkpoint writes beside its shards.
DISTRIBUTED_FILE = ".metadata"
_TRUST = (
    "its metadata is a pickle, and reading a pickle runs whatever code is in it; if you trust its author, give --trust"
)


def export_model(path: Path, module: nn.Module, out: Path, ema: bool = False) -> list[str]:
    """Write a folder as the module's own library saves it: `model.safetensors` by the user's names, one for tied
    weights, and for a model of Hugging Face's library its `config.json`; `ema`: the averages. Returns the files.
    """
    with _replaced(out) as folder:
        more = load_weights(module, path, ema)
        if more:
            raise InputError(
                f"{path} has {len(more)} tensors that this model lacks, {more[0]} first; give "
                "--model the model that was trained."
            )
        own: Callable[..., Any] | None = getattr(module, "save_pretrained", None)
        if own is not None:
            own(folder)
        else:
            stored = set(module.state_dict())
            tensors = {names[0]: t.detach().contiguous() for names, t in named(module) if names[0] in stored}
            save_file(tensors, folder / WHOLE_FILE, metadata={"format": "pt"})
    return sorted(file.name for file in out.iterdir())


def export_distributed(path: Path, out: Path) -> list[str]:
    """Write a checkpoint in the format of `torch.distributed.checkpoint`, and return the names of its files.

    `dcp.load` reads it into `{"model": ..., "optimizer": ...}` of torch's `get_state_dict(module, optimizer)`.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = saved_state(open_checkpoint(path))
    # The library warns that there is a single process, which is intended.
    with _replaced(out) as folder, warnings.catch_warnings(action="ignore", category=UserWarning):
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
    return sorted(file.name for file in out.iterdir())


def import_weights(source: Path, out: Path, trust: bool = False) -> Path:
    """Write weights as the first checkpoint of a folder, from a safetensors file or folder, or from
    `torch.distributed.checkpoint` with `trust`. Returns the checkpoint.
    """
    return import_all(source, out, trust)[0]


def import_all(source: Path, out: Path, trust: bool = False) -> tuple[Path, Imported]:
    """Import as `import_weights`; return what was imported, too."""
    with reading(source, ANOTHER):
        is_theirs = (source / DISTRIBUTED_FILE).is_file()
    if is_theirs:
        if not trust:
            raise InputError(f"{source} is a torch.distributed.checkpoint: {_TRUST}.")
        found = read_distributed(source)
    else:
        stored = open_stored(source)
        if stored.whole is not None:
            raise InputError(f"{source} is a checkpoint of superscaler already; give it to --resume or --weights.")
        found = Imported({name: stored.read(name, whole(entry.shape)) for name, entry in stored.tensors.items()})
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
