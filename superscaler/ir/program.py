"""`Program`: the instructions of each device over local names. The waist between planning and running."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from superscaler.ir.instructions.facts import Facts as Facts
from superscaler.ir.instructions.facts import Meets as Meets
from superscaler.ir.instructions.fields import KEYS as KEYS
from superscaler.ir.instructions.fields import VALUES as VALUES
from superscaler.ir.instructions.fields import CollectiveArg as CollectiveArg
from superscaler.ir.instructions.fields import Role as Role
from superscaler.ir.instructions.fields import Shape as Shape
from superscaler.ir.instructions.fields import Write
from superscaler.ir.instructions.fields import roles as roles
from superscaler.ir.instructions.kinds import KINDS as KINDS
from superscaler.ir.instructions.kinds import Accumulate as Accumulate
from superscaler.ir.instructions.kinds import Backward as Backward
from superscaler.ir.instructions.kinds import Collective as Collective
from superscaler.ir.instructions.kinds import Combine as Combine
from superscaler.ir.instructions.kinds import Copy as Copy
from superscaler.ir.instructions.kinds import Fetch as Fetch
from superscaler.ir.instructions.kinds import Forward as Forward
from superscaler.ir.instructions.kinds import Free as Free
from superscaler.ir.instructions.kinds import Give as Give
from superscaler.ir.instructions.kinds import Instruction as Instruction
from superscaler.ir.instructions.kinds import Load as Load
from superscaler.ir.instructions.kinds import Loss as Loss
from superscaler.ir.instructions.kinds import Offload as Offload
from superscaler.ir.instructions.kinds import Recv as Recv
from superscaler.ir.instructions.kinds import Send as Send
from superscaler.ir.instructions.kinds import Slice as Slice
from superscaler.ir.instructions.kinds import Tasked as Tasked
from superscaler.ir.instructions.kinds import Update as Update
from superscaler.ir.instructions.kinds import Wait as Wait
from superscaler.ir.layout import Provenance
from superscaler.ir.mask import Box
from superscaler.ir.model import Model
from superscaler.ir.names import ONE as ONE
from superscaler.ir.names import Task as Task
from superscaler.ir.names import Value as Value
from superscaler.ir.op import Function as Function

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


def calls(code: Iterable[Instruction]) -> Iterator[tuple[int, Forward]]:
    """Yield the instructions of code that run functions, each with its number."""
    return ((at, i) for at, i in enumerate(code) if isinstance(i, Forward))


def loads(code: Iterable[Instruction]) -> Iterator[Load]:
    """Yield the instructions of code that load what rests."""
    return (i for i in code if isinstance(i, Load))


def updates(code: Iterable[Instruction]) -> Iterator[tuple[int, Update]]:
    """Yield the instructions of code that run the optimizer, each with its number."""
    return ((at, i) for at, i in enumerate(code) if isinstance(i, Update))


def gives(code: Iterable[Instruction]) -> Iterator[Give]:
    """Yield the instructions of code that give parts of outputs."""
    return (i for i in code if isinstance(i, Give))


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

    name: Write
    tensor: str
    box: Annotated[Box, Role.EVEN]
    trained: bool
    counted: Annotated[bool, Role.EVEN]
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
        name = i.kind if i.group else type(i).__name__
        if 0 <= i.function < len(self.functions) and (ops := self.functions[i.function].ops):
            return f"{name} {i.task} ({ops[0].name}..{ops[-1].name})"
        shown = [str(v) for v in (writes(i) or names(i, Role.READ))[:3]]
        return f"{name} {i.task}" if i.task else f"{name} of {', '.join(shown)}"
