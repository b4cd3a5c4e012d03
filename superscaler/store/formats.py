"""The formats of other programs: each finds its files, reads a model from them, and writes one."""

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from superscaler.errors import InputError
from superscaler.specs.file_errors import reading
from superscaler.store.checkpoint import ANOTHER
from superscaler.store.distributed import Imported, read_distributed, saved_state
from superscaler.store.pieces import whole
from superscaler.store.tensors import WHOLE_FILE, load_weights, named, open_checkpoint, open_stored

# The file that torch.distributed.checkpoint writes beside its shards.
DISTRIBUTED_FILE = ".metadata"


class Format(Protocol):
    """A format of a model on disk.

    owns     whether a file or a folder is of it; all but safetensors are asked first
    open     the tensors in it. Raises InputError for damage, and where reading runs code and there is no `trust`
    write    a checkpoint in a new folder. `build` returns the trained module; `ema`: its averages of weights
    """

    def owns(self, source: Path) -> bool: ...
    def open(self, source: Path, trust: bool) -> Imported: ...
    def write(self, path: Path, folder: Path, build: Callable[[], nn.Module], ema: bool) -> None: ...


class Safetensors:
    """What `save_pretrained` of Hugging Face's libraries writes, and plain files: tensors by the names of a module."""

    def owns(self, source: Path) -> bool:
        return True

    def open(self, source: Path, trust: bool) -> Imported:
        stored = open_stored(source)
        if stored.whole is not None:
            raise InputError(f"{source} is a checkpoint of superscaler already; give it to --resume or --weights.")
        return Imported({name: stored.read(name, whole(entry.shape)) for name, entry in stored.tensors.items()})

    def write(self, path: Path, folder: Path, build: Callable[[], nn.Module], ema: bool) -> None:
        """Write `model.safetensors` by the user's names, one for tied weights, or what the module's library saves."""
        module = build()
        more = load_weights(module, path, ema)
        if more:
            raise InputError(
                f"{path} has {len(more)} tensors that this model lacks, {more[0]} first; give "
                "--model the model that was trained."
            )
        own: Callable[..., Any] | None = getattr(module, "save_pretrained", None)
        if own is not None:
            own(folder)
            return
        stored = set(module.state_dict())
        tensors = {names[0]: t.detach().contiguous() for names, t in named(module) if names[0] in stored}
        save_file(tensors, folder / WHOLE_FILE, metadata={"format": "pt"})


class Distributed:
    """Folders of torch.distributed.checkpoint. `dcp.load` reads one into `{"model": ..., "optimizer": ...}` of torch's
    `get_state_dict(module, optimizer)`.
    """

    def owns(self, source: Path) -> bool:
        with reading(source, ANOTHER):
            return (source / DISTRIBUTED_FILE).is_file()

    def open(self, source: Path, trust: bool) -> Imported:
        if not trust:
            raise InputError(
                f"{source} is a torch.distributed.checkpoint: its metadata is a pickle, and reading a pickle runs "
                "whatever code is in it; if you trust its author, give --trust."
            )
        return read_distributed(source)

    def write(self, path: Path, folder: Path, build: Callable[[], nn.Module], ema: bool) -> None:
        if ema:
            raise InputError("--ema exports a model; --format distributed has averages as states of the optimizer.")
        state = saved_state(open_checkpoint(path))
        # The library warns that there is a single process, which is intended.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            save(state, storage_writer=FileSystemWriter(folder), no_dist=True)


# By the name in `checkpoint export --format`; safetensors are the last to look at a file.
FORMATS: Mapping[str, Format] = {"distributed": Distributed(), "safetensors": Safetensors()}
