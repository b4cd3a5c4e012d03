"""Fields of instructions: the roles of the names and numbers in them, how these move evenly along loops and folds, and
the layout changes of collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache, lru_cache
from math import prod
from operator import mul
from typing import Annotated, Any, TypeVar, get_type_hints

from superscaler.ir.layout import Provenance
from superscaler.ir.names import Value

Shape = tuple[int, ...]
T = TypeVar("T")
# What moves, as a function of its place along each axis.
Move = Callable[..., Any]


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
    TASK = "the part of a segment that is run, or whose tape moves"
    NOTE = "a reason, for reports"

    # By identity: roles are looked up for each instruction.
    __hash__ = object.__hash__


# The roles of fields with names.
VALUES = (Role.READ, Role.LAST, Role.WRITE, Role.SUM, Role.END)
# Those of fields with microbatches: names and tasks.
KEYS = (*VALUES, Role.TASK)

Read = Annotated[Value, Role.READ]
Reads = Annotated[tuple[Value, ...], Role.READ]
Gaps = Annotated[tuple[Value | None, ...], Role.READ]
Write = Annotated[Value, Role.WRITE]
Writes = Annotated[tuple[Value, ...], Role.WRITE]
Sums = Annotated[tuple[Value | None, ...], Role.SUM]
Group = Annotated[tuple[int, ...], Role.GROUP]
Notes = Annotated[tuple[Provenance, ...], Role.NOTE]


@cache
def roles(kind: type) -> Mapping[str, Role | None]:
    """Return the role of each field of a kind of instruction, None where it has none."""
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: next(iter(getattr(hints[f.name], "__metadata__", ())), None) for f in fields(kind)}


def mover(samples: Sequence[Any]) -> Move | None:
    """Return the numbers in any nesting as a function of the place along each axis, from those at place 0 and at place
    1 of each axis; None if all are equal. A flag holds if it does at place 1 of each axis that is moved along.

    Raises ValueError for tuples of different lengths.

    >>> mover([(("x", (0, 4)),), (("x", (4, 8)),)])(3)
    (('x', (12, 16)),)
    """
    first, *others = samples
    if samples.count(first) == len(samples):
        return None
    if isinstance(first, tuple | list):
        return _name_mover(*samples) if isinstance(first, Value) else _elements(samples)
    if isinstance(first, bool):
        return lambda *place: first and all(other for other, at in zip(others, place, strict=True) if at)
    if not isinstance(first, int):
        return lambda *_: first
    steps = [other - first for other in others]
    return lambda *place: first + sum(map(mul, steps, place))


# A name is in several instructions of a loop.
@lru_cache(1 << 16)
def _name_mover(*samples: Value) -> Move:
    return lru_cache(1)(_elements(samples))


def _elements(samples: Sequence[Any]) -> Move:
    first, moves = samples[0], map(mover, zip(*samples, strict=True))
    return _made(first, first, moves, getattr(first, "_make", type(first)))


def moving(
    samples: Sequence[Any], by: Collection[Role | None], move: Callable[[Role | None, Sequence[Any]], Move | None]
) -> Move:
    """Return an instruction as a function of the place. `by`: the roles of the fields that move, each by its `move`."""
    first = samples[0]
    kind: type = type(first)
    named = roles(kind)
    moves = (move(role, [getattr(i, name) for i in samples]) if role in by else None for name, role in named.items())
    return _made(first, [getattr(first, name) for name in named], moves, lambda values: kind(*values))


def _made(whole: Any, parts: Sequence[Any], moves: Iterable[Move | None], make: Callable[[list[Any]], Any]) -> Move:
    moving = [(n, move) for n, move in enumerate(moves) if move is not None]

    def moved(*place: int) -> Any:
        found = [*parts]
        for n, move in moving:
            found[n] = move(*place)
        return make(found)

    return moved if moving else lambda *_: whole


def evenly(samples: Sequence[T], place: Sequence[int]) -> T:
    """Return numbers in any nesting at a place, from those at place 0 and at place 1 of each axis."""
    move = mover(samples)
    return samples[0] if move is None else move(*place)


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
