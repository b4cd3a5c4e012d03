"""Checkpoints on disk: the types of a manifest, and a folder of checkpoints: its lock, its leftovers, and `latest`."""

import errno
import fcntl
import json
import math
import os
import re
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from threading import Event
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, FiniteFloat, StringConstraints, model_validator
from torch import Tensor

from superscaler.errors import InputError, brief
from superscaler.specs.file_errors import reading, refuse, unwritable, writing
from superscaler.specs.whole_file import ASIDE, sync, write_file
from superscaler.store.folder import Checked, Count, Draft, Hash, Head, hash_without
from superscaler.store.pieces import covers
from superscaler.store.tensor_file import DTYPES

MANIFEST_FILE, POINTER_FILE = "manifest.json", "latest"
# All ranks of a run lock this file. The system releases the lock of a process that ends, for whatever cause.
LOCK_FILE = ".lock"
# The remedy for damage.
ANOTHER = "take another checkpoint or file"
FOLDER = re.compile(r"step-\d{8,}(\.\d+)?")
# The files of an unfinished checkpoint.
_PARTS = re.compile(rf"rank-\d{{5,}}\.(safetensors|json)|\.(rank-\d{{5,}}|manifest)\.\w+\.\w+{re.escape(ASIDE)}")
# An unfinished `latest`.
_LEFT = re.compile(rf"\.{POINTER_FILE}\.\w+{re.escape(ASIDE)}")
# Bytes of the longest name of a checkpoint.
_LONGEST = 200


def _printable(name: str) -> str:
    if not name.isprintable() or not name:
        raise ValueError(f"{name!r} is no name")
    return name


# The state of the optimizer that is the average of a weight over steps.
AVERAGE = "ema"
Name = Annotated[str, AfterValidator(_printable)]
Shard = Annotated[str, StringConstraints(pattern=r"^rank-\d{5,}\.safetensors$")]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class ShardFile(Checked):
    bytes: Count
    sha256: Hash


class Piece(Checked):
    """A piece of a tensor, under a key of a file. `ranges`: per dim, the runs [start, end) of the tensor in it."""

    shard: str
    key: Name
    ranges: list[list[Annotated[list[Count], Field(min_length=2, max_length=2)]]]


class Entry(Checked):
    """A tensor: its pieces, the optimizer's `states` of it (stored under KEY/STATE), its count of updates, and other
    numbers of the optimizer for it.
    """

    shape: list[Count]
    dtype: Name
    states: list[Name]
    steps: Rate | None
    pieces: list[Piece]
    numbers: dict[Name, Rate] = Field(default_factory=dict)


class GroupEntry(Checked):
    """A parameter group: the class of its optimizer, and the names of its trained weights."""

    kind: Name
    weights: list[Name]


class OptimizerEntry(Checked):
    """The optimizer. `options`: of each parameter group, but `lr`; checkpoints of older versions lack those of the
    plan, and `groups`. `unused`: the parameters that no operator reads.
    """

    name: Name
    lr: list[Rate]
    precision: Literal["", "bf16", "fp16"] = ""
    options: list[dict[Name, bool | int | FiniteFloat | list[FiniteFloat] | Name | None]] = Field(default_factory=list)
    groups: list[GroupEntry] = Field(default_factory=list)
    unused: list[Name] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if len(self.options) not in (0, len(self.lr)):
            raise ValueError(f"it has options of {len(self.options)} parameter groups, and rates of {len(self.lr)}")
        if len(self.groups) not in (0, len(self.lr)):
            raise ValueError(f"it has {len(self.groups)} parameter groups, and rates of {len(self.lr)}")
        return self


class ScalerEntry(Checked):
    """The result of `torch.amp.GradScaler.state_dict`, which other versions of torch may extend."""

    model_config = ConfigDict(extra="ignore")

    scale: Rate
    growth_factor: Rate
    backoff_factor: Rate
    growth_interval: Count
    growth_tracker: Annotated[Count, Field(alias="_growth_tracker")]


class DataEntry(Checked):
    name: Name
    bytes: Count


class TrainingEntry(Checked):
    seed: int
    data: DataEntry | None
    model: Name | None


class CheckpointHead(Head):
    """The types of a manifest; a shard has one stamp."""

    NAME = MANIFEST_FILE
    KIND = "manifest of a checkpoint"
    VERSION = 1
    FORMAT: ClassVar[str] = "superscaler checkpoint"
    DIFFERS = "is damaged: it has {found}, not {kept}; nothing was loaded"
    REMEDY = ANOTHER
    MAY_LINK = False

    format: Literal["superscaler checkpoint"]
    version: int
    step: Count
    seed: int | None
    plan: str | None
    world: Count | None
    optimizer: OptimizerEntry | None
    scaler: ScalerEntry | None
    aliases: dict[Name, Name]
    training: TrainingEntry | None
    shards: dict[Shard, ShardFile]
    tensors: dict[Name, Entry]
    sha256: Hash

    @model_validator(mode="after")
    def _check_tensors(self) -> Self:
        """Raise ValueError unless pieces cover each element of a tensor once, in shards that can hold them."""
        size = sum(shard.bytes for shard in self.shards.values())
        for name, tensor in self.tensors.items():
            elements = math.prod(tensor.shape)
            if tensor.dtype not in DTYPES.values():
                raise ValueError(f"{name!r} is of {tensor.dtype!r}")
            if odd := {piece.shard for piece in tensor.pieces} - self.shards.keys():
                raise ValueError(f"{name!r} is in {odd.pop()!r}, which is not among its shards")
            if elements > size:
                raise ValueError(f"{name!r} has {elements:,} elements, more than its shards have bytes")
            if elements and not covers(tensor.shape, [piece.ranges for piece in tensor.pieces]):
                raise ValueError(f"the pieces of {name!r} overlap, or leave out some of its {elements:,} elements")
        return self

    @staticmethod
    def signed(data: Mapping[str, Any]) -> dict[str, Any]:
        return {**data, "sha256": hash_without(data, "sha256")}

    @staticmethod
    def stamps(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        return dict(data["shards"])


def lock(directory: Path, is_first: bool) -> int:
    """Lock a folder of checkpoints for a run, until the returned file is closed or the process ends. The first rank
    makes the folder, writes its process there, and removes leftovers of killed runs. Raises OSError, and InputError if
    another run holds the folder.
    """
    if is_first:
        directory.mkdir(parents=True, exist_ok=True)
    file = os.open(directory / LOCK_FILE, os.O_RDWR | (os.O_CREAT if is_first else 0), 0o666)
    try:
        if is_first:
            _flock(file, fcntl.LOCK_EX)
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            os.fsync(file)
            _sweep(directory)
        _flock(file, fcntl.LOCK_SH)
    except BlockingIOError:
        holder = brief(os.pread(file, 300, 0).decode(errors="replace")) or "an unknown process"
        os.close(file)
        raise InputError(
            f"another run saves into {directory}: {holder}. Wait until it ends, stop it, or choose another folder."
        ) from None
    except OSError:
        os.close(file)
        raise
    return file


def _flock(file: int, kind: int) -> None:
    """Lock a file unless another run did. On a file system without locks this does nothing."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        pass


def check_folder(directory: Path) -> None:
    """Raise InputError unless a run may save into a folder. The folder may be missing; it is not made."""
    made = [path for path in (directory, *directory.parents) if not os.path.lexists(path)]
    try:
        with writing(directory, "choose another folder"):
            file = lock(directory, is_first=True)
            if made:
                (directory / LOCK_FILE).unlink()
            os.close(file)
    finally:
        for path in made:
            with suppress(OSError):
                path.rmdir()


def _sweep(directory: Path) -> None:
    """Remove incomplete checkpoints that hold only files of a checkpoint, and unfinished files `latest`."""
    for folder in directory.iterdir():
        if _LEFT.fullmatch(folder.name) and folder.is_file():
            folder.unlink()
        is_ours = FOLDER.fullmatch(folder.name) and folder.is_dir() and not folder.is_symlink()
        if is_ours and all(_PARTS.fullmatch(name) for name in os.listdir(folder)):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove the files of a checkpoint, the manifest first, and the folder if it is then empty."""
    for name in sorted(os.listdir(folder), key=lambda name: name != MANIFEST_FILE):
        if name == MANIFEST_FILE or _PARTS.fullmatch(name):
            (folder / name).unlink()
    with suppress(OSError):
        folder.rmdir()


def new_folder(directory: Path, steps: int) -> str:
    """Make a new folder for a checkpoint and return its name. Raises OSError."""
    for number in count():
        name = f"step-{steps:08d}" + (f".{number}" if number else "")
        with suppress(FileExistsError):
            (directory / name).mkdir()
            return name
    raise AssertionError


def discard(folder: Path) -> None:
    """Remove a failed checkpoint, unless it is whole and the last one."""
    pointer = folder.parent / POINTER_FILE
    with suppress(OSError):
        if not pointer.is_file() or pointer.read_text().strip() != folder.name:
            _remove(folder)


def prune(directory: Path, keep: int | None) -> None:
    """Remove the oldest whole checkpoints above `keep`, never the one that `latest` names."""
    if keep is None:
        return
    named = (directory / POINTER_FILE).read_text().strip()
    others = [folder for folder in checkpoints(directory) if folder.name != named]
    for folder in others[: max(0, len(others) + 1 - keep)]:
        _remove(folder)


def reason(file: Path, error: Exception) -> str:
    """Return the file of a checkpoint that cannot be written, and the cause."""
    hint = "; is it on a disk that all ranks share?" if getattr(error, "errno", 0) == errno.ENOENT else ""
    return unwritable(file, error) + hint


def shard_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_shard(
    draft: Draft, rank: int, tensors: Mapping[str, Tensor], entries: Mapping[str, Any], hurry: Event | None = None
) -> None:
    """Write the shard of a rank, then its table: its stamp, and the entries of its tensors by the user's names."""
    name = shard_name(rank)
    stamp = draft.tensors(name, tensors, hurry)
    write_file(table_of(draft, rank), json.dumps({"shards": {name: stamp}, "tensors": entries}))


def table_of(draft: Draft, rank: int) -> Path:
    """Return the file that marks a shard as whole until the checkpoint is."""
    return (draft.path / shard_name(rank)).with_suffix(".json")


def commit(draft: Draft, head: Mapping[str, Any], ranks: Sequence[int]) -> None:
    """Write the manifest of a checkpoint with all its shards, then let `latest` name it."""
    made: dict[str, Any] = {"format": CheckpointHead.FORMAT, "version": CheckpointHead.VERSION, **head}
    made |= {"shards": {}, "tensors": {}}
    files = [table_of(draft, rank) for rank in ranks]
    for file in files:
        table = json.loads(file.read_text())
        made["shards"] |= table["shards"]
        for name, entry in table["tensors"].items():
            pieces = [{"shard": file.with_suffix(".safetensors").name, **piece} for piece in entry["pieces"]]
            made["tensors"].setdefault(name, {**entry, "pieces": []})["pieces"] += pieces
    draft.finish(made)
    sync(draft.path.parent)
    for file in files:
        file.unlink()
    write_file(draft.path.parent / POINTER_FILE, f"{draft.path.name}\n")


def pointed(directory: Path) -> Path:
    """Return the checkpoint that `latest` names."""
    file = directory / POINTER_FILE
    with reading(file, ANOTHER), file.open("rb") as stream:
        name = stream.read(_LONGEST).decode(errors="replace").strip()
    folder = directory / name if FOLDER.fullmatch(name) else directory
    if folder == directory or folder.is_symlink() or not (folder / MANIFEST_FILE).is_file():
        kept = ", ".join(map(str, checkpoints(directory)))
        hint = f"give one of the whole ones there: {kept}" if kept else "there is no whole one there"
        refuse(file, f"names {name[:80]!r}, which is no whole checkpoint", hint)
    return folder


def checkpoints(directory: Path) -> list[Path]:
    """Return the whole checkpoints in a folder, the oldest first."""
    found = [f for f in directory.glob(f"step-*/{MANIFEST_FILE}") if FOLDER.fullmatch(f.parent.name) and _is_own(f)]
    return [file.parent for file in sorted(found, key=lambda file: (file.stat().st_mtime_ns, file))]


def _is_own(file: Path) -> bool:
    return file.is_file() and not file.is_symlink() and not file.parent.is_symlink()
