"""The types of explain.json, and the conversion of its blocks to objects and back."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter

from superscaler.report.places import NO_GROUPS, Groups, Places
from superscaler.store.folder import Checked, Head
from superscaler.store.plan_head import REWRITE, Option

# The version of explain.json; other versions are refused.
VERSION = 5
# An unbounded integer: FLOPs of a large model exceed 63 bits.
Count = Annotated[int, Field(ge=0)]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Axis:
    """One cut of an op: into value parts, copies, microbatches, parts of a factor, or nested parts."""

    how: str
    parts: int
    factor: str = ""
    sizes: tuple[int, ...] = ()
    devices: Groups = NO_GROUPS
    axes: tuple[tuple[Axis, ...], ...] = ()


@dataclass(frozen=True)
class Split:
    """Ops of a block with equal cuts and places."""

    axes: tuple[Axis, ...]
    devices: Places
    ops: int
    of: tuple[str, ...]


@dataclass(frozen=True)
class Weights:
    """Weights of a block with equal cuts and places; `percent` for pieces of different sizes."""

    kind: str
    is_trained: bool
    pieces: int
    devices: Groups
    percent: tuple[int, ...] = ()
    bytes: int = 0
    held_bytes: int = 0
    of: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sent:
    """Transfers of one tensor of a block; local ones have a reason only."""

    direction: str
    way: str
    reason: str
    kind: str = ""
    tensor: str = ""
    layouts: str = ""
    groups: Groups = NO_GROUPS
    count: int = 0
    bytes: int = 0
    moved: int = 0
    seconds: float = 0.0
    bound: float = 0.0


@dataclass(frozen=True)
class Block:
    """Equal blocks. `asked`: calls of each verb by the plan; `again`: number of recomputed ops; `split`: number of ops
    with a split backward; `unsplit`: number of ops whose backward was to be split, but makes gradients of one kind
    only.
    """

    names: tuple[str, ...]
    ops: int
    devices: Places
    splits: tuple[Split, ...]
    weights: tuple[Weights, ...]
    moves: tuple[Sent, ...]
    asked: Mapping[str, int] = field(hash=False)
    again: int = 0
    split: int = 0
    unsplit: int = 0


@dataclass(frozen=True)
class Order:
    """Devices that run the same blocks, and the `order` of their microbatches."""

    devices: Places
    blocks: tuple[str, ...]
    order: str


T = TypeVar("T")


@functools.cache
def _cached(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(list[kind])


def _adapter(kind: Any) -> TypeAdapter[Any]:
    # Mypy takes no type variable for what a cache hashes.
    return _cached(kind)


def plain(kind: type[T], objects: Iterable[T]) -> list[dict[str, Any]]:
    """Return objects of a class as the data of explain.json, which leave out defaults."""
    found: list[dict[str, Any]] = _adapter(kind).dump_python(list(objects), mode="json", exclude_defaults=True)
    return found


def objects(kind: type[T], data: Iterable[Mapping[str, Any]]) -> list[T]:
    """Return the objects of a class in the data of explain.json."""
    found: list[T] = _adapter(kind).validate_python(data)
    return found


class Model(Checked):
    parameters: Count
    parameter_bytes: Count
    trained_parameters: Count
    buffers: Count
    flops: Count
    ops: Count
    optimizer: str
    options: list[dict[str, Option]]
    precision: str = ""


class Relaxation(Checked):
    name: str
    ops: list[str]


class Total(Checked):
    direction: Direction
    way: Literal["local", "collective", "messages", "copies"]
    kind: str
    count: Count
    bytes: Count
    moved: Count


class Step(Checked):
    kind: str
    groups: list[list[Count]]
    moved: Count
    seconds: float
    layout: str


class Path(Checked):
    direction: Direction
    tensors: list[str]
    count: Count
    sizes: list[Count]
    dtype: str
    layout: str
    steps: list[Step]


class Account(Head):
    VERSION = VERSION
    REMEDY = REWRITE

    version: int
    world: Count
    cluster: str
    model: Model
    blocks: list[Block]
    schedule: list[Order]
    relaxations: list[Relaxation]
    orders: list[str]
    summary: str
    counts: dict[str, Count]
    totals: list[Total]
    paths: list[Path]
    bytes_moved: Count
