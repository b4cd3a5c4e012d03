"""The classes of instructions.

Names are local to a device. `view` is the shape of a local tensor in slots (sizes of all slots, flattened over dims).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Annotated

from superscaler.ir.instructions.facts import Facts, Meets
from superscaler.ir.instructions.fields import (
    CollectiveArg,
    Gaps,
    Group,
    Notes,
    Read,
    Reads,
    Role,
    Shape,
    Sums,
    Write,
    Writes,
)  # fmt: skip
from superscaler.ir.mask import Box
from superscaler.ir.model import width
from superscaler.ir.names import Task, Value


@dataclass(frozen=True, slots=True)
class Load(Facts):
    """Load a resident tensor: a slice of an input of the batch, of a constant, or a weight at rest."""

    out: Write
    tensor: str
    box: Annotated[Box, Role.EVEN]


@dataclass(frozen=True, slots=True)
class Forward(Facts):
    """Run a part of a segment: `function` on detached aliases of `inputs`. `at`: the start of the part on each
    coordinate of the function.
    """

    runs_segment = True
    task: Annotated[Task, Role.TASK] = field()
    function: int = field()
    at: Annotated[Shape, Role.EVEN]
    inputs: Reads
    outputs: Writes


@dataclass(frozen=True, slots=True)
class Backward(Facts):
    """Run the mirror of a part: gradients of its saved outputs (None: nobody read them) to gradients of its aliases
    (None: nobody reads them). Gradients of weights are added to their `sums` over parts and microbatches where these
    exist; then they are no outputs. `again`: the regathered inputs, which the tape did not keep.

    In a split backward, `half` is `input` (it keeps the tensors that the other half needs) or `weight` (it is given
    nothing more).
    """

    runs_segment = True
    is_mirror = True
    needs_tape = True
    task: Annotated[Task, Role.TASK] = field()
    gradients: Gaps
    outputs: Annotated[tuple[Value | None, ...], Role.WRITE]
    half: str = ""
    again: Reads = ()
    sums: Sums = ()


@dataclass(frozen=True, slots=True)
class Slice(Facts):
    """out = the sub-box `ranges` of `source` (in slots), as a contiguous tensor of `shape`."""

    is_between = True
    out: Write
    source: Read
    view: Shape
    ranges: Annotated[Box, Role.EVEN]
    shape: Shape

    @property
    def whole(self) -> Value:
        return self.source


@dataclass(frozen=True, slots=True)
class Combine(Facts):
    """out = the sum of pieces, each placed at its box (in slots) in zeros; `shape` is the local shape of the result.
    With `largest`, it is the largest of the pieces instead.
    """

    out: Write
    pieces: Reads
    boxes: Annotated[tuple[Box, ...], Role.EVEN]
    view: Shape
    shape: Shape
    dtype: str
    largest: bool = False


@dataclass(frozen=True, slots=True)
class Accumulate(Facts):
    """out = into + value, or the `largest` of both; in place if `into` is a sum with no other holder."""

    out: Write
    into: Read
    value: Read
    in_place: bool
    largest: bool = False

    @property
    def grows(self) -> Value | None:
        return self.into if self.in_place else None


@dataclass(frozen=True, slots=True)
class Collective(Facts):
    """Start a collective over `group` (its k-th device owns the k-th chunk) of one tensor, or of several that are
    flattened and joined.

    `works`: the handles to wait on; None on devices without a result if only the device at place `root` of the group
    gets one. `bytes`: of the sources, padded. An all_reduce gives the sum, or the `largest`. `wide`: the dtype of the
    sources and results, in which they are added, if they are sent in another one. `given`: the dtype of the sources of
    an all_gather, if they are rounded to another one, in which the results stay.
    """

    meets = Meets.GROUP
    kind: str = field()
    works: Annotated[tuple[Value | None, ...], Role.WRITE]
    sources: Gaps
    group: Group = field()
    ways: tuple[CollectiveArg, ...]
    dtype: str
    bytes: int = field()
    largest: bool = False
    notes: Notes = field(default=(), compare=False)
    root: int = -1
    wide: str = ""
    given: str = ""

    @property
    def handles(self) -> tuple[Value | None, ...]:
        return self.works

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple([way.elements * width(self.dtype) for way in self.ways])

    @property
    def sent(self) -> str:
        return self.dtype

    @property
    def rounded(self) -> str:
        return self.dtype if self.given else ""

    @property
    def agreed(self) -> tuple[object, ...]:
        return self.kind, self.dtype, self.bytes


@dataclass(frozen=True, slots=True)
class Send(Facts):
    """Start to send. Messages with one `point` (in the order of all devices) start together."""

    meets = Meets.PEER
    kind = "send"
    is_send = True
    source: Read
    peer: Annotated[int, Role.PEER] = field()
    message: Annotated[int, Role.MESSAGE] = field()
    bytes: int = field()
    point: Annotated[int, Role.MESSAGE] = field()
    notes: Notes = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Recv(Facts):
    meets = Meets.PEER
    kind = "send"
    work: Write
    peer: Annotated[int, Role.PEER] = field()
    message: Annotated[int, Role.MESSAGE] = field()
    shape: Shape
    dtype: str
    point: Annotated[int, Role.MESSAGE] = field()

    @property
    def bytes(self) -> int:
        return prod(self.shape) * width(self.dtype)

    @property
    def handles(self) -> tuple[Value | None, ...]:
        return (self.work,)


@dataclass(frozen=True, slots=True)
class Copy(Facts):
    """Start to copy a value from the device to the memory of its host, or (not `to_host`) back."""

    meets = Meets.HOST
    work: Write
    source: Read
    to_host: bool = field()
    bytes: int = field()
    notes: Notes = field(default=(), compare=False)

    @property
    def kind(self) -> str:
        return "to_host" if self.to_host else "to_device"

    @property
    def handles(self) -> tuple[Value | None, ...]:
        return (self.work,)


@dataclass(frozen=True, slots=True)
class Offload(Facts):
    """Start to copy the tape of a task to the memory of its host; then the device keeps no more of it than `alive`,
    values that the forward read or made and that stay. The backward refuses a tape on the host.
    """

    meets = Meets.HOST
    kind = "to_host"
    to_host = True
    task: Annotated[Task, Role.TASK] = field()
    alive: Reads = ()


@dataclass(frozen=True, slots=True)
class Fetch(Facts):
    """Start to copy the tape of a task back to the device."""

    meets = Meets.HOST
    kind = "to_device"
    needs_tape = True
    task: Annotated[Task, Role.TASK] = field()


@dataclass(frozen=True, slots=True)
class Wait(Facts):
    """out = the result of a started collective, receive or copy, reshaped to `shape`. The handle `work` ends."""

    is_wait = True
    out: Write
    work: Annotated[Value, Role.LAST]
    shape: Shape

    @property
    def whole(self) -> Value:
        return self.work

    @property
    def handles(self) -> tuple[Value | None, ...]:
        return (self.work,)


@dataclass(frozen=True, slots=True)
class Update(Facts):
    """Run the optimizer on `weights` at rest with their `gradients`, and set `buffers` to `values`.

    `is_early`: another update follows on the device. `goes_on`: weights whose names hold the next iteration's values
    afterwards.
    """

    updates = True
    outlives = True
    weights: Reads = field()
    gradients: Reads
    buffers: Reads = ()
    values: Reads = ()
    is_early: bool = False
    goes_on: Writes = ()


@dataclass(frozen=True, slots=True)
class Give(Facts):
    """Return `value` from the step on this device, as the part of an output tensor at `box`."""

    outlives = True
    value: Read
    tensor: str
    box: Annotated[Box, Role.EVEN]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Loss(Facts):
    """End the step. Its loss is the sum of the `counted` parts over all devices; the others are replicas. With several
    iterations, `of` has the iteration of each part, and each iteration has a loss.
    """

    meets = Meets.ALL
    outlives = True
    parts: Reads
    counted: Annotated[tuple[bool, ...], Role.EVEN]
    of: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Free(Facts):
    is_between = True
    frees = True
    names: Annotated[tuple[Value, ...], Role.END]


Instruction = (
    Load | Forward | Backward | Slice | Combine | Accumulate | Collective | Send | Recv | Copy | Offload | Fetch | Wait
    | Update | Give | Loss | Free
)  # fmt: skip
# Those with a task.
Tasked = Forward | Backward | Offload | Fetch
KINDS: tuple[type, ...] = Instruction.__args__
