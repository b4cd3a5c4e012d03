"""What a transfer is made of: collectives, messages, cuts and joins over slots, in rounds. Data, and how it prints."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from superscaler.ir.mask import Box, intersect
from superscaler.ir.parts import HOSTS
from superscaler.materialize.collectives import Match
from superscaler.materialize.rvd.route import Route
from superscaler.schedule.transfers import Transfer


class Slot(NamedTuple):
    """A box of the tensor on a device; `item` tells what is made on the way apart, and starts with the pieces."""

    device: int
    item: int
    box: Box

    def __str__(self) -> str:
        """Return device, item and box.

        >>> str(Slot(1, 3, ((0, 4), (8, 16))))
        '1.3[0:4, 8:16]'
        """
        return f"{self.device}.{self.item}[{', '.join(f'{lo}:{hi}' for lo, hi in self.box)}]"


@dataclass(frozen=True, slots=True)
class Collective:
    """What each device gives (None: nothing, of a broadcast) and what it gets (None: nothing, one device does)."""

    how: Match
    slots: tuple[tuple[Slot | None, Slot | None], ...]
    why: str

    @property
    def sources(self) -> list[Slot]:
        return [source for source, _ in self.slots if source is not None]

    @property
    def outs(self) -> list[Slot]:
        return [out for _, out in self.slots if out is not None]

    def __str__(self) -> str:
        kind, group, take, give = self.how.kind, self.how.group, self.how.take, self.how.give
        along = (f" along {take}" if take >= 0 else "") + (f" to {give}" if give >= 0 else "")
        return f"{kind}{along} over {', '.join(map(str, group))}: {_sum(self.sources)} -> {_sum(self.outs)}"


@dataclass(frozen=True, slots=True)
class Message:
    """Send the box of `out` to its device."""

    source: Slot
    out: Slot
    why: str

    @property
    def is_copy(self) -> bool:
        """Tell whether it goes between a device and its host."""
        return self.source.device ^ HOSTS == self.out.device

    def __str__(self) -> str:
        return f"send {self.source} -> {self.out}"


@dataclass(frozen=True, slots=True)
class Cut:
    """Take a box out of another on its device."""

    source: Slot
    out: Slot

    def __str__(self) -> str:
        return f"cut {self.source} -> {self.out}"


@dataclass(frozen=True, slots=True)
class Join:
    """Add up slots on a device, each placed at its box in zeros."""

    sources: tuple[Slot, ...]
    out: Slot

    def __str__(self) -> str:
        return f"join {_sum(self.sources)} -> {self.out}"


Step = Collective | Message | Cut | Join


@dataclass(frozen=True, slots=True)
class Lowered:
    """How a transfer gets what it moves to its readers. The steps of a round start together, when all that the round
    before it sent is there. `ends` has the slots that each reader joins in the end, where it is first read; `route` is
    the path that was searched, if the rounds follow one.
    """

    rounds: tuple[tuple[Step, ...], ...]
    ends: tuple[tuple[Slot, ...], ...]
    route: Route | None = None

    def __str__(self) -> str:
        lines = [f"round {n}: {step}" for n, steps in enumerate(self.rounds) for step in steps]
        return "\n".join([*lines, *(f"reader {r}: {_sum(slots)}" for r, slots in enumerate(self.ends))])


def slots_of(transfer: Transfer) -> list[Slot]:
    """Return the slots of its pieces."""
    return [Slot(piece.device, p, piece.box) for p, piece in enumerate(transfer.pieces)]


def common(have: Box, want: Box) -> Box:
    """Return what two boxes that meet have in common."""
    found = intersect(have, want)
    assert found is not None
    return found


def _sum(slots: Iterable[Slot]) -> str:
    return " + ".join(map(str, slots)) or "nothing"
