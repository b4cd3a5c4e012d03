"""The storages of a device while its program runs: who holds each, and the bytes that are alive by category."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import torch

from superscaler.ir.mask import Box
from superscaler.ir.program import Shape, Value
from superscaler.simulate.works import Tape

# What bytes are for. Activations: what autograd keeps. Gathered: weights that other devices brought. Values: tensors
# between segments, and their gradients. Inside: what an instruction makes, or frees again, while it runs.
CATEGORIES = (
    "weights", "gathered", "optimizer", "gradients", "activations", "values", "communication", "inside"
)  # fmt: skip
WEIGHTS, GATHERED, OPTIMIZER, GRADIENTS, ACTIVATIONS, VALUES, COMMUNICATION, INSIDE = range(len(CATEGORIES))
# Those which a tape counts as activations while it holds them.
_KEPT = (VALUES, COMMUNICATION)


@dataclass(eq=False, slots=True)
class Storage:
    """Memory that names, tapes or operations hold. `born`, `died`: numbers of instructions; -1: before the step."""

    bytes: int
    category: int
    name: Value | None = None
    is_on_host: bool = False
    tape: Tape | None = None
    holders: int = 0
    tapes: int = 0
    born: int = -1
    died: int | None = None


class Storages:
    """The storages of a device. `at`: the number of the instruction that runs; `during`: the most bytes in each."""

    def __init__(self) -> None:
        self.at = -1
        self.total = self.on_host = self.most_on_host = 0
        self.alive = [0] * len(CATEGORIES)
        self.every: list[Storage] = []
        self.names: dict[Value, Storage] = {}
        self.during: list[int] = []
        self.rows: list[tuple[int, ...]] = []

    def begin(self, at: int) -> None:
        self.at = at
        self.during.append(self.total)

    def end(self) -> None:
        self.reach(0)
        self.rows.append(tuple(self.alive))

    def reach(self, more: int) -> None:
        """Note that so many bytes are alive beside the storages."""
        self.during[-1] = max(self.during[-1], self.total + more)

    def hold(self, storage: Storage) -> Storage:
        if not storage.holders:
            storage.born = self.at
            self.every.append(storage)
            self._add(storage, storage.bytes)
        storage.holders += 1
        return storage

    def drop(self, storage: Storage) -> None:
        storage.holders -= 1
        if not storage.holders:
            storage.died = self.at
            self._add(storage, -storage.bytes)

    def keep(self, storage: Storage) -> None:
        """Hold a storage by a tape."""
        self.hold(storage)
        storage.tapes += 1
        if storage.tapes == 1 and storage.category in _KEPT and not storage.is_on_host:
            self.alive[storage.category] -= storage.bytes
            self.alive[ACTIVATIONS] += storage.bytes

    def release(self, storage: Storage) -> None:
        """Drop a storage that a tape held."""
        storage.tapes -= 1
        if not storage.tapes and storage.category in _KEPT and not storage.is_on_host:
            self.alive[ACTIVATIONS] -= storage.bytes
            self.alive[storage.category] += storage.bytes
        self.drop(storage)

    def bind(self, name: Value, storage: Storage) -> None:
        """Let a name hold a storage."""
        self.hold(storage)
        if name in self.names:
            self.drop(self.names[name])
        self.names[name] = storage

    def free(self, name: Value) -> None:
        if name in self.names:
            self.drop(self.names.pop(name))

    def become(self, storage: Storage, category: int, name: Value) -> None:
        """Move a storage that communication filled to another category."""
        if storage.category == COMMUNICATION and not storage.tapes and not storage.is_on_host:
            self.alive[COMMUNICATION] -= storage.bytes
            self.alive[category] += storage.bytes
            storage.category, storage.name = category, name

    def _add(self, storage: Storage, size: int) -> None:
        if storage.is_on_host:
            self.on_host += size
            self.most_on_host = max(self.most_on_host, self.on_host)
            return
        self.total += size
        self.alive[ACTIVATIONS if storage.tapes and storage.category in _KEPT else storage.category] += size


def is_view(view: Shape, ranges: Box, shape: Shape, known: dict[object, bool]) -> bool:
    """Return whether the slice of a contiguous tensor is a view of it."""
    sizes = tuple(hi - lo for lo, hi in ranges)
    key = view, sizes, shape
    if key not in known:
        whole = torch.empty(view, device="meta")
        piece = whole
        for dim, size in enumerate(sizes):
            piece = piece.narrow(dim, 0, size)
        known[key] = piece.reshape(shape).untyped_storage()._cdata == whole.untyped_storage()._cdata
    return known[key]


def elements(box: Iterable[tuple[int, int]]) -> int:
    return prod(hi - lo for lo, hi in box)
