"""`Program`: what each device does, as ordered instructions over local names. The waist between planning and running.

Names are local to a device. `view` is the shape of a local tensor in slots (sizes of all slots, flattened over dims).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from superscaler.ir.graph import Model, Op
from superscaler.ir.layout import Layout
from superscaler.ir.mask import Box

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Bring a resident tensor into the step: a slice of an input of the batch, of a constant, or a weight at rest."""

    out: str
    tensor: str
    box: Box


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a segment: `function` on detached aliases of `inputs`; `grads` tells which of them want a gradient, `saved`
    the numbers of the outputs whose gradients come back, `draws` the boxes of its random ops in order.
    """

    tag: str
    function: int
    inputs: tuple[str, ...]
    grads: tuple[bool, ...]
    outputs: tuple[str, ...]
    saved: tuple[int, ...]
    module: str
    draws: tuple[Box, ...] = ()


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the mirror of a segment: gradients of its outputs (None: not read) to gradients of its aliases.

    `wide` tells which of these become float32.
    """

    tag: str
    gradients: tuple[str | None, ...]
    outputs: tuple[str, ...]
    wide: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """out = the sub-box `ranges` of `source` (in slots), as a contiguous tensor of `shape`."""

    out: str
    source: str
    view: Shape
    ranges: Box
    shape: Shape


@dataclass(frozen=True, slots=True)
class Combine:
    """out = the sum of pieces, each placed at its box (in slots) in zeros; `shape` is the local shape of the result."""

    out: str
    pieces: tuple[tuple[str, Box], ...]
    view: Shape
    shape: Shape
    dtype: str


@dataclass(frozen=True, slots=True)
class Accumulate:
    """out = into + value; in place where `into` is a sum that nobody else holds."""

    out: str
    into: str
    value: str
    in_place: bool


@dataclass(frozen=True, slots=True)
class Collective:
    """Start a collective over `group` (its k-th device owns the k-th chunk); `work` becomes the handle to wait on.

    `take` is the slot that is gathered, `give` the one that is scattered (-1: none); the source has shape `local`, the
    result `shape`; `bytes` is what the source weighs.
    """

    kind: str
    work: str
    source: str | None
    group: tuple[int, ...]
    view: Shape
    take: int
    give: int
    local: Shape
    shape: Shape
    dtype: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Start one all_reduce of several tensors, flattened and joined; `works` become their handles."""

    works: tuple[str, ...]
    sources: tuple[str, ...]
    group: tuple[int, ...]
    dtype: str
    bytes: int

    kind = "all_reduce"


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send. Messages of one `point` of the order of all devices start together."""

    source: str
    peer: int
    message: int
    bytes: int
    point: int


@dataclass(frozen=True, slots=True)
class Recv:
    work: str
    peer: int
    message: int
    shape: Shape
    dtype: str
    point: int


@dataclass(frozen=True, slots=True)
class Wait:
    """out = the result of a started collective or receive, reshaped to `shape`."""

    out: str
    work: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class Update:
    """Run the optimizer on weights at rest, pairs (weight, gradient), and set buffers, pairs (buffer, value)."""

    pairs: tuple[tuple[str, str], ...]
    writes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of the step is the sum of the `counted` parts over all devices; the others are replicas."""

    parts: tuple[str, ...]
    counted: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Free:
    names: tuple[str, ...]


Instruction = (
    Load
    | Forward
    | Backward
    | Slice
    | Combine
    | Accumulate
    | Collective
    | Bucket
    | Send
    | Recv
    | Wait
    | Update
    | Loss
    | Free
)


@dataclass(frozen=True, slots=True)
class Function:
    """The ops of a segment with the box of each on a part: what emit turns into source, once per distinct text. Parts
    of equal sizes share a function, where what they compute does not depend on where they are (`Model.placed`).
    """

    ops: tuple[Op, ...]
    boxes: tuple[Box, ...]
    inputs: tuple[str, ...]
    input_of: Mapping[tuple[str, int], int]
    outputs: tuple[str, ...]
    module: str


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight at rest on a device. `counted`: its elements count here in global norms. `group`: the optimizer's."""

    name: str
    tensor: str
    box: Box
    trained: bool
    counted: bool
    group: int = 0


@dataclass(frozen=True, slots=True)
class Device:
    """What one device holds and does."""

    rank: int
    weights: tuple[Weight, ...]
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """How a tensor, or its gradient (`is_backward`), got from where it is made to where it is read, and why that way.

    `way`: local, collective or messages. `count` transfers, each over `group`, of which `together` share one bucket;
    all their sources weigh `bytes`, and all devices put `moved` bytes on links.
    """

    tensor: str
    is_backward: bool
    way: str
    kind: str
    group: tuple[int, ...]
    reason: str
    together: int
    count: int
    bytes: int
    moved: int


@dataclass(frozen=True, slots=True)
class PathStep:
    """A step of a path: it makes `layout`, puts `moved` bytes on links, and was taken to last `seconds`."""

    kind: str
    groups: tuple[tuple[int, ...], ...]
    layout: Layout
    moved: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Path:
    """How `count` tensors of `sizes` per slot, or their gradients, went from a layout to another in several steps."""

    is_backward: bool
    sizes: Shape
    dtype: str
    source: Layout
    steps: tuple[PathStep, ...]
    tensors: tuple[str, ...] = ()
    count: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    model: Model
    functions: tuple[Function, ...]
    devices: Sequence[Device]
    moves: tuple[Move, ...] = ()
    paths: tuple[Path, ...] = ()

    @property
    def world(self) -> int:
        return len(self.devices)

    def weights(self, rank: int) -> tuple[Weight, ...]:
        """Return what a device holds."""
        known = getattr(self.devices, "weights", None)
        return tuple(self.devices[rank].weights if known is None else known(rank))

    @property
    def distinct(self) -> list[tuple[Device, int]]:
        """Return devices whose code differs, each with the number of devices that run it (with data of their own)."""
        known = getattr(self.devices, "distinct", None)
        return [(device, 1) for device in self.devices] if known is None else list(known())

    @property
    def bytes_moved(self) -> int:
        """Return the bytes that all devices put on links: a ring's share for collectives, everything for messages."""
        return sum(move.moved for move in self.moves)


def links(kind: str, p: int) -> int:
    """Return how many times a collective of `p` devices puts one device's source on links, all devices together.

    >>> [links(kind, 4) for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast")]
    [6, 12, 3, 3]
    """
    return (p - 1) * {"all_reduce": 2, "all_gather": p}.get(kind, 1)
