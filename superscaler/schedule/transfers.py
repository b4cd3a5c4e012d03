"""Transfers: each has sources and readers on devices, so that every read finds its elements with their whole value.

A transfer joins pieces (values on one device, after local sums) with readers (a box on a device, for any number of
parts). It is *joint* if every reader needs every piece; a joint transfer may become a collective. In any other transfer
each link is a message of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from superscaler.ir.grid import HOSTS
from superscaler.ir.mask import Box
from superscaler.schedule.dataflow import Key

FORWARD, BACKWARD, UPDATE, REGATHER = "F", "B", "U", "G"


class Place(NamedTuple):
    """An end of a transfer: output or alias `number` of segment instance (`segment`, `key`), or a weight at rest.

    Kind F: an output of the forward, or an alias that the forward reads. Kind B: the gradient of an alias that a
    backward makes, or of an output that it reads. Kind G: an alias that is regathered for the backward. Kind U: part
    `key` of the optimizer op with home number `segment`: the weight at rest, and piece `number` of its gradient or new
    value.
    """

    kind: str
    segment: int
    key: Key
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """A box of a tensor on a device: a piece held there, or a box that readers there require."""

    device: int
    box: Box
    places: tuple[Place, ...]


@dataclass(frozen=True, eq=False)
class Transfer:
    """A transfer of one tensor. `links` are pairs (piece, reader); a reader's value is the sum of its pieces, each at
    its box. It is compared by identity.

    `classes`: a number per piece, if not empty; pieces with equal numbers are replicas.
    """

    tensor: str
    kind: str
    pieces: tuple[End, ...]
    readers: tuple[End, ...]
    links: tuple[tuple[int, int], ...]
    classes: tuple[int, ...] = ()

    @cached_property
    def is_local(self) -> bool:
        return all(self.pieces[p].device == self.readers[r].device for p, r in self.links)

    @cached_property
    def is_joint(self) -> bool:
        return len(self.links) == len(self.pieces) * len(self.readers)

    @cached_property
    def microbatches(self) -> set[int]:
        """Return the microbatches in which its pieces are made."""
        return {place.key[1] for piece in self.pieces for place in piece.places}

    @cached_property
    def is_to_updates(self) -> bool:
        """Return whether only updates read it (gradients of weights)."""
        return self.kind == BACKWARD and all(place.kind == UPDATE for end in self.readers for place in end.places)

    @cached_property
    def is_from_rest(self) -> bool:
        """Return whether it moves weights at rest to other devices."""
        return all(place.kind == UPDATE for end in self.pieces for place in end.places) and not self.is_local

    @cached_property
    def is_regather(self) -> bool:
        """Return whether it regathers activations for a backward."""
        return all(place.kind == REGATHER for end in self.readers for place in end.places) and not self.is_local

    @cached_property
    def has_host(self) -> bool:
        return any(end.device >= HOSTS for end in (*self.pieces, *self.readers))

    @cached_property
    def is_one(self) -> bool:
        """Return whether it runs at one point of the order. Otherwise each of its messages runs when it can."""
        return self.is_joint or self.is_to_updates or bool(self.classes) or self.has_host

    @cached_property
    def like(self) -> Transfer:
        """Return one transfer for all with these boxes on these devices, in layers that are cut alike."""
        return self

    @cached_property
    def _shared(self) -> dict[str, Any]:
        """Return the attributes that all transfers like this one share."""
        return {name: getattr(self, name) for name in _SHARED}

    def of(self, tensor: str, made: Sequence[tuple[Place, ...]], read: Sequence[tuple[Place, ...]]) -> Transfer:
        """Return the transfer of a tensor like this one, whose places number those of `made` and `read`."""
        pieces, readers = (
            tuple([End(e.device, e.box, tuple([place for at in e.places for place in of[at.number]])) for e in ends])
            for ends, of in ((self.pieces, made), (self.readers, read))
        )
        found = Transfer(tensor, self.kind, pieces, readers, self.links, self.classes)
        found.__dict__.update(self._shared)
        return found


_SHARED = tuple(n for n, kind in vars(Transfer).items() if isinstance(kind, cached_property) and n != "_shared")
