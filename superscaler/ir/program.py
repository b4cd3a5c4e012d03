"""`Program`: the instructions of each device over local names. The waist between planning and running.

Names are local to a device. `view` is the shape of a local tensor in slots (sizes of all slots, flattened over dims).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from superscaler.ir.fields import VALUES as VALUES
from superscaler.ir.fields import CollectiveArg as CollectiveArg
from superscaler.ir.fields import Gaps, Group, Notes, Read, Reads, Sums, Write, Writes, roles
from superscaler.ir.fields import Role as Role
from superscaler.ir.fields import Shape as Shape
from superscaler.ir.layout import Provenance
from superscaler.ir.mask import Box
from superscaler.ir.model import Model
from superscaler.ir.names import ONE as ONE
from superscaler.ir.names import Task as Task
from superscaler.ir.names import Value as Value
from superscaler.ir.op import Function as Function


@dataclass(frozen=True, slots=True)
class Load:
    """Load a resident tensor: a slice of an input of the batch, of a constant, or a weight at rest."""

    out: Write
    tensor: str
    box: Annotated[Box, Role.EVEN]


@dataclass(frozen=True, slots=True)
class Forward:
    """Run a part of a segment: `function` on detached aliases of `inputs`. `at`: the start of the part on each
    coordinate of the function.
    """

    task: Task
    function: int
    at: Annotated[Shape, Role.EVEN]
    inputs: Reads
    outputs: Writes


@dataclass(frozen=True, slots=True)
class Backward:
    """Run the mirror of a part: gradients of its saved outputs (None: nobody read them) to gradients of its aliases
    (None: nobody reads them). Gradients of weights are added to their `sums` over parts and microbatches where these
    exist; then they are no outputs. `again`: the regathered inputs, which the tape did not keep.

    In a split backward, `half` is `input` (it keeps the tensors that the other half needs) or `weight` (it is given
    nothing more).
    """

    task: Task
    gradients: Gaps
    outputs: Annotated[tuple[Value | None, ...], Role.WRITE]
    half: str = ""
    again: Reads = ()
    sums: Sums = ()


@dataclass(frozen=True, slots=True)
class Slice:
    """out = the sub-box `ranges` of `source` (in slots), as a contiguous tensor of `shape`."""

    out: Write
    source: Read
    view: Shape
    ranges: Annotated[Box, Role.EVEN]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Combine:
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
class Accumulate:
    """out = into + value, or the `largest` of both; in place if `into` is a sum with no other holder."""

    out: Write
    into: Read
    value: Read
    in_place: bool
    largest: bool = False


@dataclass(frozen=True, slots=True)
class Collective:
    """Start a collective over `group` (its k-th device owns the k-th chunk) of one tensor, or of several that are
    flattened and joined.

    `works`: the handles to wait on; None on devices without a result if only the device at place `root` of the group
    gets one. `bytes`: of the sources, padded. An all_reduce gives the sum, or the `largest`. `wide`: the dtype of the
    sources and results, in which they are added, if they are sent in another one. `given`: the dtype of the sources of
    an all_gather, if they are rounded to another one, in which the results stay.
    """

    kind: str
    works: Annotated[tuple[Value | None, ...], Role.WRITE]
    sources: Gaps
    group: Group
    ways: tuple[CollectiveArg, ...]
    dtype: str
    bytes: int
    largest: bool = False
    notes: Notes = field(default=(), compare=False)
    root: int = -1
    wide: str = ""
    given: str = ""


@dataclass(frozen=True, slots=True)
class Send:
    """Start to send. Messages with one `point` (in the order of all devices) start together."""

    source: Read
    peer: Annotated[int, Role.PEER]
    message: Annotated[int, Role.MESSAGE]
    bytes: int
    point: Annotated[int, Role.MESSAGE]
    notes: Notes = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Recv:
    work: Write
    peer: Annotated[int, Role.PEER]
    message: Annotated[int, Role.MESSAGE]
    shape: Shape
    dtype: str
    point: Annotated[int, Role.MESSAGE]


@dataclass(frozen=True, slots=True)
class Copy:
    """Start to copy a value from the device to the memory of its host, or (not `to_host`) back."""

    work: Write
    source: Read
    to_host: bool
    bytes: int
    notes: Notes = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class Offload:
    """Start to copy the tape of a task to the memory of its host; then the device keeps no more of it than `alive`,
    values that the forward read or made and that stay. The backward refuses a tape on the host.
    """

    task: Task
    alive: Reads = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start to copy the tape of a task back to the device."""

    task: Task


@dataclass(frozen=True, slots=True)
class Wait:
    """out = the result of a started collective, receive or copy, reshaped to `shape`. The handle `work` ends."""

    out: Write
    work: Annotated[Value, Role.LAST]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Update:
    """Run the optimizer on `weights` at rest with their `gradients`, and set `buffers` to `values`.

    `is_early`: another update follows on the device. `goes_on`: weights whose names hold the next iteration's values
    afterwards.
    """

    weights: Reads
    gradients: Reads
    buffers: Reads = ()
    values: Reads = ()
    is_early: bool = False
    goes_on: Writes = ()


@dataclass(frozen=True, slots=True)
class Give:
    """Return `value` from the step on this device, as the part of an output tensor at `box`."""

    value: Read
    tensor: str
    box: Annotated[Box, Role.EVEN]
    shape: Shape


@dataclass(frozen=True, slots=True)
class Loss:
    """End the step. Its loss is the sum of the `counted` parts over all devices; the others are replicas. With several
    iterations, `of` has the iteration of each part, and each iteration has a loss.
    """

    parts: Reads
    counted: Annotated[tuple[bool, ...], Role.EVEN]
    of: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Free:
    names: Annotated[tuple[Value, ...], Role.END]


Instruction = (
    Load | Forward | Backward | Slice | Combine | Accumulate | Collective | Send | Recv | Copy | Offload | Fetch | Wait
    | Update | Give | Loss | Free
)  # fmt: skip
# Those with a task.
Tasked = Forward | Backward | Offload | Fetch
KINDS: tuple[type, ...] = Instruction.__args__
# The role of each field of each kind of instruction, None where it has none; and the fields of each role.
ROLES = {kind: roles(kind) for kind in KINDS}
FIELDS = {(k, role): tuple(n for n, r in ROLES[k].items() if r is role) for k in KINDS for role in (None, *Role)}
_READS, _WRITES, _ENDED = (
    {kind: FIELDS[kind, one] + FIELDS[kind, other] for kind in KINDS}
    for one, other in ((Role.READ, Role.LAST), (Role.WRITE, Role.SUM), (Role.LAST, Role.END))
)


def names(i: Instruction, role: Role) -> tuple[Value, ...]:
    """Return the names in the fields of an instruction with a role."""
    return _values(i, FIELDS[type(i), role])


def reads(i: Instruction) -> tuple[Value, ...]:
    return _values(i, _READS[type(i)])


def ended(i: Instruction) -> tuple[Value, ...]:
    """Return the names that do not exist after an instruction."""
    return _values(i, _ENDED[type(i)])


def writes(i: Instruction) -> tuple[Value, ...]:
    """Return the names that an instruction makes, those of sums last."""
    return _values(i, _WRITES[type(i)])


def _values(i: Instruction, some: Sequence[str]) -> tuple[Value, ...]:
    found: list[Value] = []
    for name in some:
        value = getattr(i, name)
        if isinstance(value, Value):
            found.append(value)
        elif value:
            found += [v for v in value if v is not None]
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight at rest on a device, or on its `host`. `counted`: its elements count here in global norms. `group`: of
    the optimizer.
    """

    name: Value
    tensor: str
    box: Box
    trained: bool
    counted: bool
    group: int = 0
    host: bool = False


@dataclass(frozen=True, slots=True)
class Device:
    """The weights and the instructions of one device."""

    rank: int
    weights: tuple[Weight, ...]
    instructions: Sequence[Instruction]


@dataclass(frozen=True, slots=True)
class Program:
    """A model, its functions and the code of all devices. `notes` count transfers without an instruction (those that
    stay on a device), and those along a path. `mesh`: the sizes of the axes along which the devices lie in order, if
    the plan names them.
    """

    model: Model
    functions: tuple[Function, ...]
    devices: Sequence[Device]
    notes: Mapping[Provenance, int] = field(default_factory=dict)
    mesh: Mapping[str, int] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return len(self.devices)

    def weights(self, rank: int) -> tuple[Weight, ...]:
        """Return the weights of a device."""
        known = getattr(self.devices, "weights", None)
        return tuple(self.devices[rank].weights if known is None else known(rank))

    @property
    def groups(self) -> list[tuple[list[int], list[Device]]]:
        """Return groups of devices that run one program on different data, each with its sampled devices."""
        known = getattr(self.devices, "groups", None)
        return [([device.rank], [device]) for device in self.devices] if known is None else known

    @property
    def distinct(self) -> list[tuple[Device, int]]:
        """Return devices with different code, each with the number of devices that run it (with data of their own)."""
        return [(device, len(ranks)) for ranks, (device, *_) in self.groups]

    def changed(self, change: Callable[[Device], Device]) -> Program:
        """Return the program with other devices. In a folded program `change` is called for the compiled ones."""
        known = getattr(self.devices, "changed", None)
        return replace(self, devices=tuple(map(change, self.devices)) if known is None else known(change))

    def describe(self, i: Instruction) -> str:
        """Return a short text for an instruction: its kind, and the op or value that it concerns."""
        if isinstance(i, Forward) and 0 <= i.function < len(self.functions) and self.functions[i.function].ops:
            ops = self.functions[i.function].ops
            return f"Forward {i.task} ({ops[0].name}..{ops[-1].name})"
        task = getattr(i, "task", None)
        shown = [str(v) for v in (writes(i) or names(i, Role.READ))[:3]]
        kind = i.kind if isinstance(i, Collective) else type(i).__name__
        return f"{kind} {task}" if task else f"{kind} of {', '.join(shown)}"
