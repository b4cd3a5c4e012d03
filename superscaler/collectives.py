"""The collectives of programs, a row each: what the members of a group hold before, and what they read afterwards.

All else follows from a row: which transfers it does, the steps of paths that it is, its seconds and bytes on links, its
buffers, the text of its call, and the names under which runs are watched and profiled. Only the certificate has its own
table (`certify/meanings.py`), since it must not share a mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum


class Ends(Enum):
    """What the members of a group have of a value, on one side of a collective."""

    ONE = "one member has it"
    TILE = "each member has a slice, in the order of the group"
    PART = "each member has a part of the value, which is their sum"
    ALL = "each member has the whole"

    # By identity: rows are looked up for each instruction.
    __hash__ = object.__hash__


ONE, TILE, PART, ALL = Ends


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes that n devices send in a collective, per byte of a device's source.

    `sent` by each device of n; over s servers with g devices each, `inside` by each device in its server and `across`
    by each server, if one follows the other. `laps`: the number of times that the data goes around.
    """

    laps: int
    sent: Callable[[int], float]
    inside: Callable[[int, int], float]
    across: Callable[[int, int], float]


# Messages of a group: (sender, receiver, share of the source) of each.
Messages = Callable[[tuple[int, ...]], list[tuple[int, int, float]]]


@dataclass(frozen=True, slots=True)
class Kind:
    """A collective, by what its members hold and what they read afterwards.

    `why`: the reason why a transfer is one. `links`: the bytes on links of p devices together, in units of one source.
    `traffic`: how they are sent, for its seconds. `fewest`: the members that it needs. `is_uneven`: chunks may be
    uneven, and are padded then. `is_bucketed`: several are sent as one (a function of its name in `comm/buckets.py`).
    `takes_largest`: it can give the largest of the parts instead of their sum. `narrows`: it can send a value in
    another dtype than the one in which it is added or kept.
    """

    name: str
    held: Ends
    read: Ends
    why: str
    links: Callable[[int], int]
    traffic: Traffic | Messages
    fewest: int = 2
    is_uneven: bool = False
    is_bucketed: bool = False
    takes_largest: bool = False
    narrows: bool = False

    @property
    def ends(self) -> tuple[Ends, Ends]:
        return self.held, self.read

    @property
    def sums(self) -> bool:
        return self.held is PART

    @property
    def gathers(self) -> bool:
        """Return whether slices are joined to the whole."""
        return self.held is TILE and self.read is not TILE

    @property
    def rounds(self) -> bool:
        """Return whether slices may be rounded before they are gathered."""
        return self.gathers and self.narrows


def _share(n: int) -> float:
    return (n - 1) / n


def _once(p: int) -> int:
    return p - 1


# From the first to all others, or from all others to the first; a ring, or a chain of servers.
_CHAIN = Traffic(1, lambda _: 1, lambda *_: 1, lambda *_: 1)
# Of several that do a transfer the first is taken.
KINDS: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            "all_reduce", PART, ALL, "each holds a part of the value and reads the whole", lambda p: 2 * (p - 1),
            Traffic(2, lambda n: 2 * _share(n), lambda g, _: 2 * _share(g), lambda _, s: 2 * _share(s)),
            is_bucketed=True, takes_largest=True,
        ),
        Kind(
            "all_gather", TILE, ALL, "each holds a slice and reads the whole tensor", lambda p: p * (p - 1),
            Traffic(1, lambda n: n - 1, lambda g, s: (g - 1) * s, lambda g, s: g * (s - 1)),
            is_uneven=True, is_bucketed=True, narrows=True,
        ),
        Kind(
            "reduce_scatter", PART, TILE, "each holds a part of the value and reads a slice of the whole", _once,
            Traffic(1, _share, lambda g, _: _share(g), lambda _, s: _share(s)),
            is_uneven=True, is_bucketed=True, narrows=True,
        ),
        Kind(
            "all_to_all", TILE, TILE, "each holds a slice of one dim and reads a slice of another", _once,
            Traffic(1, _share, lambda g, _: _share(g), lambda g, s: g * _share(s)),
        ),
        Kind("broadcast", ONE, ALL, "one holds it and several others read it", _once, _CHAIN, fewest=3),
        Kind(
            "reduce", PART, ONE, "each holds a part of the value and one of them reads the whole", _once, _CHAIN,
            is_bucketed=True,
        ),
        Kind(
            "rd_gather", TILE, ONE, "each holds a slice and one of them reads the whole tensor", _once,
            # Clusters price groups with the only receiver last.
            lambda group: [(d, group[-1], 1) for d in group[:-1]], fewest=3,
        ),
    )
}  # fmt: skip
