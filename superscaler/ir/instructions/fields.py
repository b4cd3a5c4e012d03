"""Fields of instructions: the roles of the names and numbers in them, and the layout changes of collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from math import prod
from typing import Annotated, get_type_hints

from superscaler.ir.layout import Provenance
from superscaler.ir.names import Value

Shape = tuple[int, ...]


class Role(Enum):
    """The role of a field of an instruction. A field without a role is equal on all devices that run a program."""

    READ = "names that are read"
    WRITE = "names that are made"
    SUM = "names of sums that are added to in place; the first addition makes them"
    END = "names that nothing reads any more"
    LAST = "names that are read, and end with that"
    EVEN = "numbers that move evenly along a fold"
    GROUP = "devices of a collective, in order"
    PEER = "the device at the other end of a message"
    MESSAGE = "the number of a message, the same at both ends"
    NOTE = "a reason, for reports"

    # By identity: roles are looked up for each instruction.
    __hash__ = object.__hash__


# The roles of fields with names.
VALUES = (Role.READ, Role.LAST, Role.WRITE, Role.SUM, Role.END)

Read = Annotated[Value, Role.READ]
Reads = Annotated[tuple[Value, ...], Role.READ]
Gaps = Annotated[tuple[Value | None, ...], Role.READ]
Write = Annotated[Value, Role.WRITE]
Writes = Annotated[tuple[Value, ...], Role.WRITE]
Sums = Annotated[tuple[Value | None, ...], Role.SUM]
Group = Annotated[tuple[int, ...], Role.GROUP]
Notes = Annotated[tuple[Provenance, ...], Role.NOTE]


def roles(kind: type) -> Mapping[str, Role | None]:
    """Return the role of each field of a kind of instruction, None where it has none."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: next(iter(getattr(hints[f.name], "__metadata__", ())), None) for f in fields(kind)}


@dataclass(frozen=True, slots=True)
class CollectiveArg:
    """The layout change of one tensor in a collective.

    `gather_slot` is gathered, `scatter_slot` scattered, -1 for none. The source has `view` in slots and shape `local`,
    the result `shape`. `sizes`: those of uneven chunks of that slot in group order; all are padded to the largest.
    """

    view: Shape
    gather_slot: int
    scatter_slot: int
    local: Shape
    shape: Shape
    sizes: Shape = ()

    @property
    def slot(self) -> int:
        """Return the slot with chunks, the only one of a bucketed collective; -1 for none."""
        return max(self.gather_slot, self.scatter_slot)

    @property
    def elements(self) -> int:
        """Return the number of sent elements of its source, padding included."""
        slot = self.slot
        chunks = 1 if self.gather_slot >= 0 else len(self.sizes)
        return prod(self.view) // self.view[slot] * max(self.sizes) * chunks if self.sizes else prod(self.view)

    def leads(self, slot: int) -> bool:
        """Return whether the chunks of a slot lie in memory one after the other, or the slot is none."""
        return prod(self.view[: max(slot, 0)]) == 1
