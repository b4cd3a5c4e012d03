"""Meetings: which ends of communication belong together.

The two ends of a message have one sender, one receiver and one number. The n-th collectives of all members of a group
are one; the same devices in another order are another group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from superscaler.ir.grid import Ints
from superscaler.ir.program import Instruction, Meets


class Message(NamedTuple):
    """The key of a message, equal at both ends."""

    sender: int
    receiver: int
    number: int


class Turn(NamedTuple):
    """The key of a collective, equal at all members: the number of earlier ones over its group."""

    group: tuple[int, ...]
    number: int


def message(i: Instruction, rank: int) -> Message:
    """Return the key of a message that a device sends or receives."""
    return Message(rank, i.peer, i.message) if i.is_send else Message(i.peer, rank, i.message)


def meetings(code: Sequence[Instruction], rank: int) -> Iterator[tuple[int, Instruction, Message | Turn]]:
    """Yield the communication with other devices that a device starts: its place in the code, and its key."""
    turns = Counter[tuple[int, ...]]()
    for at, i in enumerate(code):
        if i.meets is Meets.PEER:
            yield at, i, message(i, rank)
        elif i.meets is Meets.GROUP:
            yield at, i, Turn(i.group, turns[i.group])
            turns[i.group] += 1


@dataclass(frozen=True, eq=False)
class Ends:
    """The devices that each device of a cohort meets in one communication.

    `groups` [groups, members]: each once, in order; `group`, `place` [devices]: of a device, the number of its group
    and its place in it.
    """

    groups: Ints
    group: Ints
    place: Ints

    @staticmethod
    def of(devices: Ints, groups: Ints) -> Ends:
        """Return the ends of communication from the group of each device."""
        distinct, group = np.unique(groups, axis=0, return_inverse=True)
        return Ends(distinct, group.reshape(-1), np.argmax(groups == devices[:, None], axis=1))

    @staticmethod
    def of_pairs(devices: Ints, peers: Ints, is_send: bool) -> Ends:
        """Return the ends of messages, in groups (sender, receiver)."""
        pairs = (devices, peers) if is_send else (peers, devices)
        return Ends.of(devices, np.stack(pairs, axis=1))


def rows_of(cohorts: Sequence[Ints], world: int) -> tuple[Ints, Ints]:
    """Return the cohort of each device of the world, and its row in that; -1 for a device of none."""
    found = np.full((2, world), -1)
    for number, devices in enumerate(cohorts):
        found[0, devices], found[1, devices] = number, np.arange(len(devices))
    return found[0], found[1]
