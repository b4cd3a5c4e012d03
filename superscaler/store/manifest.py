"""The manifest of a checkpoint: its types, and the checks of all of it before any of it is used."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from superscaler.store.folder import hash_without
from superscaler.store.tensor_file import DTYPES

FORMAT, VERSION = "superscaler checkpoint", 1
_WORD = (1 << 64) - 1


def _printable(name: str) -> str:
    if not name.isprintable() or not name:
        raise ValueError(f"{name!r} is no name")
    return name


Name = Annotated[str, AfterValidator(_printable)]
Shard = Annotated[str, StringConstraints(pattern=r"^rank-\d{5,}\.safetensors$")]
Count = Annotated[int, Field(ge=0, lt=2**62)]
Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)


class ShardFile(_Part):
    bytes: Count
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class PieceEntry(_Part):
    """A piece of a tensor. `ranges`: per dim, the runs [start, end) of the tensor in it."""

    shard: Shard
    key: Name
    ranges: list[list[Annotated[list[Count], Field(min_length=2, max_length=2)]]]


class TensorEntry(_Part):
    shape: list[Count]
    dtype: Name
    states: list[Name]
    steps: Rate | None
    pieces: list[PieceEntry]


class OptimizerEntry(_Part):
    name: Name
    lr: list[Rate]


class ScalerEntry(_Part):
    """The result of `torch.amp.GradScaler.state_dict`."""

    scale: Rate
    growth_factor: Rate
    backoff_factor: Rate
    growth_interval: Count
    growth_tracker: Annotated[Count, Field(alias="_growth_tracker")]


class DataEntry(_Part):
    name: Name
    bytes: Count


class TrainingEntry(_Part):
    seed: int
    data: DataEntry | None
    model: Name | None


class Manifest(_Part):
    format: Literal["superscaler checkpoint"]
    version: Literal[1]
    step: Count
    seed: int | None
    plan: str | None
    world: Count | None
    optimizer: OptimizerEntry | None
    scaler: ScalerEntry | None
    aliases: dict[Name, Name]
    training: TrainingEntry | None
    shards: dict[Shard, ShardFile]
    tensors: dict[Name, TensorEntry]


def read_manifest(text: bytes) -> dict[str, Any]:
    """Return a manifest after all of it was checked. Raises ValueError with the fault."""
    found = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    if (found.get("format"), found.get("version")) != (FORMAT, VERSION):
        raise ValueError(
            f"it is of a {str(found.get('format'))[:80]!r} of version {str(found.get('version'))[:20]}, and this "
            f"superscaler reads {FORMAT} of version {VERSION}"
        )
    if found.get("sha256") != hash_without(found, "sha256"):
        raise ValueError("its hash differs")
    try:
        manifest = Manifest.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place[:200]!r}: {first['msg']}") from None
    for name, tensor in manifest.tensors.items():
        _check_tensor(name, tensor, manifest)
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)[:80]!r} is there twice")
    return found


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _check_tensor(name: str, tensor: TensorEntry, manifest: Manifest) -> None:
    """Raise ValueError unless pieces cover each element of a tensor once, in shards that can hold them."""
    if tensor.dtype not in DTYPES.values():
        raise ValueError(f"{name!r} is of {tensor.dtype!r}")
    for piece in tensor.pieces:
        if piece.shard not in manifest.shards:
            raise ValueError(f"{name!r} is in {piece.shard}, which is not among its shards")
    elements = math.prod(tensor.shape)
    if elements > sum(shard.bytes for shard in manifest.shards.values()):
        raise ValueError(f"{name!r} has {elements:,} elements, more than its shards have bytes")
    if elements and not covers(tensor.shape, [piece.ranges for piece in tensor.pieces]):
        raise ValueError(f"the pieces of {name!r} do not have each of its {elements:,} elements once")


def covers(shape: Sequence[int], pieces: Sequence[Sequence[Sequence[Sequence[int]]]]) -> bool:
    """Return whether pieces cover each element of a tensor once. Counts of elements do not show this: one may be there
    twice.

    Every index of every dim gets a random word; an element weighs the product of its dims' words, modulo 2**64. The
    pieces then weigh as much as the tensor if they cover each element once, and otherwise only with a chance of 2**-60.
    """
    draw = np.random.default_rng()
    words = [draw.integers(0, 2**63, size=size, dtype=np.uint64) * np.uint64(2) + np.uint64(1) for size in shape]
    sums = [[0, *np.cumsum(each, dtype=np.uint64).tolist()] for each in words]
    weight = 0
    for piece in pieces:
        if len(piece) != len(shape) or any(
            not 0 <= a <= b <= size for dim, size in zip(piece, shape, strict=True) for a, b in dim
        ):
            return False
        ends = [sum(total[b] - total[a] for a, b in dim) for dim, total in zip(piece, sums, strict=True)]
        weight += math.prod(ends)
    return (weight - math.prod(total[-1] for total in sums)) & _WORD == 0
