"""The storages of a device while its program runs: the owners of each, and the bytes that are alive by category.

`buffers`: the storages of communication from its start to its wait, as `comm/distributed.py` makes them under NCCL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch

from superscaler.collectives import KINDS, Ends
from superscaler.ir.mask import Box
from superscaler.ir.model import width
from superscaler.ir.program import Collective, CollectiveArg, Shape, Value
from superscaler.simulate.works import Tape, block

# What bytes are for. Activations: what autograd keeps. Gathered: weights that other devices brought. Values: tensors
# between segments, and their gradients. Temporary: what an instruction makes, or frees again, while it runs.
CATEGORIES = (
    "weights", "gathered", "optimizer", "gradients", "activations", "values", "communication", "temporary"
)  # fmt: skip
WEIGHTS, GATHERED, OPTIMIZER, GRADIENTS, ACTIVATIONS, VALUES, COMMUNICATION, TEMPORARY = range(len(CATEGORIES))
# Those which a tape counts as activations while it holds them.
_KEPT = (VALUES, COMMUNICATION)


@dataclass(eq=False, slots=True)
class Storage:
    """Memory held by names, tapes or operations. `born`, `died`: numbers of instructions; -1: before the step."""

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
    """The storages of a device. `at`: the number of the current instruction; `during`: the most bytes in each."""

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
        """Record so many live bytes beside the storages."""
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
        """Let a tape hold a storage."""
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


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of a collective on one device, in bytes.

    inside   the most while it starts, besides the remaining ones
    shared   bytes that its handles hold until the wait of the first handle, or (`last`) of the last one
    result   the storage of the results, 0 if each wait makes its own
    made     the bytes that each wait makes
    sources  whether the sources are read until then; `source`: the result is the source itself
    """

    inside: int = 0
    shared: int = 0
    last: int = 0
    result: int = 0
    made: tuple[int, ...] = field(default=())
    sources: bool = False
    source: bool = False


def buffers(i: Collective, place: int) -> Buffers:
    """Return the buffers of a collective on the device at a place of its group."""
    p, is_one, size = len(i.group), len(i.ways) == 1 and not i.wide, width(i.dtype)
    way, ascending = i.ways[0], tuple(sorted(i.group)) == tuple(i.group)
    given = [block(size * way.elements) for way in i.ways]
    results = tuple(block(size * prod(way.shape)) for way in i.ways)
    flat = given[0] if is_one else block(size * sum(way.elements for way in i.ways))
    ends = KINDS[i.kind].ends
    if p == 1:
        return Buffers(result=flat) if ends == (Ends.PART, Ends.ALL) or not is_one else Buffers(source=True)
    match ends:
        case Ends.PART, Ends.ALL | Ends.ONE:
            return Buffers(result=flat)
        case Ends.ONE, Ends.ALL:
            return Buffers(source=True) if i.root == place or i.sources[0] is not None else Buffers(result=results[0])
        case Ends.TILE, Ends.ONE if place != i.root:
            return Buffers(sources=True)
        case Ends.TILE, Ends.ALL | Ends.ONE:
            found = _gathered(i, p, is_one, ascending, flat, results)
            # Rounded slices are copies.
            return replace(found, shared=flat, sources=False) if i.given else found
        case Ends.PART, Ends.TILE if i.wide:
            # Narrowed, joined and exchanged; the waits add them.
            return Buffers(shared=2 * flat)
        case Ends.PART, Ends.TILE:
            return _scattered(i, is_one, ascending, given, flat, block(flat // p))
        case _:
            # Chunks that lie one after the other, in the order of the ranks, are sent as they are.
            leads = way.leads(way.scatter_slot)
            is_read = leads and ascending
            return Buffers(0 if leads else flat, shared=flat * (2 - is_read), made=results, sources=is_read)


def _scattered(i: Collective, is_one: bool, ascending: bool, given: Sequence[int], flat: int, result: int) -> Buffers:
    # Chunks that do not lie one after the other are copied; those in another order than the ranks are stacked.
    copied = sum(size for size, way in zip(given, i.ways, strict=True) if not way.leads(way.scatter_slot) or way.sizes)
    if not is_one:
        # The copies are joined, and freed before the result is made.
        return Buffers(max(copied - result, 0 if ascending else flat), shared=flat, result=result)
    is_read = ascending and not copied
    return Buffers(copied, shared=flat * (not is_read), result=result, sources=is_read)


def _gathered(i: Collective, p: int, is_one: bool, ascending: bool, flat: int, results: tuple[int, ...]) -> Buffers:
    way = i.ways[0]
    if not is_one:
        return Buffers(shared=flat, last=p * flat, made=results)
    if way.sizes:
        return Buffers(shared=flat if _is_padded(way) else 0, last=p * flat, made=results, sources=True)
    if way.leads(way.gather_slot) and ascending:
        return Buffers(result=p * flat, sources=True)
    return Buffers(last=p * flat, made=results, sources=True)


def _is_padded(way: CollectiveArg) -> bool:
    return way.slot >= 0 and way.view[way.slot] != max(way.sizes)
