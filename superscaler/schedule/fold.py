"""Folding: devices that do the same on other data are compiled once. Sixteen data-parallel copies become one and its
data.

A *fold axis* is an axis of the device mesh along which a plan looks the same everywhere: each op has a grid axis that
follows it, and two parts share data or not depending only on whether they are at the same place. Two sampled places
then determine everything. Every other device runs one of their programs, with its groups, peers and slices moved along
the axis. A host is at the place of its device.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from superscaler.ir.fold import KEPT, Fold
from superscaler.ir.graph import Graph
from superscaler.ir.grid import HOSTS, Axis, Grid, Ints
from superscaler.ir.model import Op, Operand
from superscaler.ir.orders import Group, changed
from superscaler.ir.parts import Address, rows_under


def find_fold(graph: Graph) -> Fold | None:
    """Return the fold of a plan with placed optimizer ops, or None if no axis of the mesh looks the same everywhere."""
    signatures: dict[str, Hashable] = {op.name: graph.grids[op.name].signature() for op in graph.model.ops}
    distinct = {signatures[op.name]: graph.grids[op.name] for op in graph.model.ops}
    found_in = {signature: list(leaves(grid)) for signature, grid in distinct.items()}
    if not all(found_in.values()):
        return None
    forward = dict.fromkeys(signatures[op.name] for op in graph.model.forward_ops)
    slim = [_by_mesh(grid, [*graph.mesh]) for signature in forward for _, grid in found_in[signature]]
    seed = max(slim, key=lambda d: (d.size, -d.ndim))
    slim += [_by_mesh(grid, [*graph.mesh]) for found in found_in.values() for _, grid in found]
    used = np.unique(np.concatenate([devices.reshape(-1) for devices in slim]))
    found: list[tuple[Ints, Ints]] = []
    for axis in range(seed.ndim):
        line = _Line.trace(slim, seed.ndim, axis, seed.shape[axis], int(used[-1]) + 1)
        if line is not None and (line.label[used] >= 0).all() and line.fits(graph, signatures, found_in):
            found.append((line.label, line.home))
    if not found:
        return None
    base = used
    for _, home in found:
        base = home[base]
    bases = {int(b): n for n, b in enumerate(np.unique(base))}
    widths = [int(label[used].max()) + 1 for label, _ in found]
    devices = np.full((len(bases), *widths), -1, dtype=np.int64)
    devices[(np.array([bases[int(b)] for b in base]), *(label[used] for label, _ in found))] = used
    return Fold(devices) if (devices >= 0).all() and devices.size == len(used) else None


Leaf = tuple[tuple[Axis, ...], Grid]


def leaves(grid: Grid, outer: tuple[Axis, ...] = ()) -> Iterator[Leaf]:
    """Yield the leaf grids of a tree, each with the axes above it; nothing where only some cells are grids."""
    if not grid.children:
        yield outer, grid
    elif len(grid.children) == grid.devices.size:
        found = [list(leaves(child, (*outer, *grid.axes))) for child in grid.children.values()]
        yield from (leaf for some in found for leaf in some if all(found))


def _by_mesh(grid: Grid, mesh: Sequence[str]) -> Ints:
    """Return the devices of a grid, or of its hosts, without axes on which all are equal, in the order of a mesh with
    its axes.
    """
    slim = grid.distinct % HOSTS
    kept = [at for at, width in enumerate(slim.shape) if width > 1]
    if all(grid.axes[at].name in mesh for at in kept):
        kept.sort(key=lambda at: mesh.index(grid.axes[at].name))
    return slim.squeeze().transpose([sorted(kept).index(at) for at in kept])


@dataclass(frozen=True)
class _Line:
    """An axis of the mesh: for each device its place along it, and the corresponding device at place 0."""

    width: int
    label: Ints
    home: Ints

    @staticmethod
    def trace(slim: Sequence[Ints], rank: int, axis: int, width: int, world: int) -> _Line | None:
        """Follow an axis of the seed through the other grids: grids with equally many axes have it under the same
        number.
        """
        label, home = (np.full(world, -1, dtype=np.int64) for _ in range(2))
        for devices in slim:
            if devices.ndim != rank or devices.shape[axis] != width or len(np.unique(devices)) < devices.size:
                continue
            new_home = np.broadcast_to(devices.take([0], axis), devices.shape)
            places = np.arange(width).reshape([-1 if a == axis else 1 for a in range(rank)])
            new_label = np.broadcast_to(places, devices.shape)
            known = label[devices] >= 0
            if known.all():
                continue
            if known.any():
                return None
            label[devices], home[devices] = new_label, new_home
        return _Line(width, label, home)

    def along(self, grid: Grid) -> int | None:
        """Return the axis of a grid that follows the line, None if no axis does."""
        devices = grid.unbroadcast % HOSTS
        label, home = self.label[devices], self.home[devices]
        for at, axis in enumerate(grid.axes):
            first = tuple(slice(None) if a == at else slice(0, 1) for a in range(devices.ndim))
            places = label[first]
            if places.size < self.width or not (label == places).all():
                continue
            places = places.reshape(-1)
            if axis.index is not None and not (
                np.array_equal(places, np.arange(self.width)) and len(set(axis.sizes)) == 1
            ):
                return None
            order = np.lexsort((home[first].reshape(-1), places))
            if len(order) % self.width or (np.bincount(places, minlength=self.width) * self.width != len(order)).any():
                return None
            alike = np.moveaxis(home.take(order, at), at, 0).reshape(self.width, -1, *np.delete(home.shape, at))
            return at if (alike == alike[:1]).all() else None
        return None

    def fits(
        self, graph: Graph, signatures: Mapping[str, Hashable], found_in: Mapping[Hashable, Sequence[Leaf]]
    ) -> bool:
        """Return whether every op follows the line, and data flow depends only on being at the same place along it."""
        cuts: dict[Hashable, list[list[Slicing]]] = {}
        for signature, found in found_in.items():
            for outer, grid in found:
                along = self.along(grid)
                if along is None:
                    return False
                own = [(a.index, a.sizes, at == along) for at, a in enumerate(grid.axes)]
                cuts.setdefault(signature, []).append([*((a.index, a.sizes, False) for a in outer), *own])
        if any(self._is_followed(cuts[signatures[op.name]], op) for op in graph.model.forward_ops):
            return False
        seen: set[Hashable] = set()
        for maker, output, reader, operand in _edges(graph):
            key = signatures[maker.name], output.slots, signatures[reader.name], operand.slots
            if key in seen:
                continue
            seen.add(key)
            for made, read in product(cuts[signatures[maker.name]], cuts[signatures[reader.name]]):
                for a, b in zip(output.slots, operand.slots, strict=True):
                    if not _is_even(_of(made, a), _of(read, b)):
                        return False
        return all(self._is_alike(graph.grids[name], paths) for name, paths in _ordered(graph) if paths)

    @staticmethod
    def _is_followed(cuts: Sequence[Sequence[Slicing]], op: Op) -> bool:
        """Return whether an index follows one that the line cuts. A followed index wraps around or grows along the
        axis, so it is not affine in the place.
        """
        firsts = {i.follows[0] for i in op.indices if i.follows}
        return any(is_along for some in cuts for first in firsts for _, is_along in _of(some, first))

    def _is_alike(self, grid: Grid, paths: Sequence[Address]) -> bool:
        """Return whether the parts of an op in an order are the same at all places along the line."""
        along = None if grid.children else self.along(grid)
        chosen = np.zeros(grid.devices.shape, dtype=bool)
        for lo, hi in (rows_under(grid, path) for path in paths if along is not None):
            chosen.reshape(-1)[lo:hi] = True
        return along is not None and bool((chosen == chosen.take([0], along)).all())


# (index that an axis cuts, sizes, whether the axis follows the line).
Slicing = tuple[int | None, tuple[int, ...], bool]


def _of(cuts: Sequence[Slicing], index: int | None) -> list[tuple[tuple[int, ...], bool]]:
    return [] if index is None else [(sizes, follows) for own, sizes, follows in cuts if own == index]


def _is_even(made: Sequence[tuple[tuple[int, ...], bool]], read: Sequence[tuple[tuple[int, ...], bool]]) -> bool:
    """Return whether the cuts of one slot on both sides overlap alike everywhere along the line.

    Both sides are cut along it in the same way. Or only one side is, and the other has the cuts outside of that one.
    """
    at = [next((k for k, (_, follows) in enumerate(cuts) if follows), None) for cuts in (made, read)]
    if at == [None, None]:
        return True
    if None not in at:
        return made[: (at[0] or 0) + 1] == read[: (at[1] or 0) + 1]
    cut, other, place = (made, read, at[0]) if at[1] is None else (read, made, at[1])
    return len(other) <= (place or 0) and list(other) == list(cut[: len(other)])


def _ordered(graph: Graph) -> Iterator[tuple[str, tuple[Address, ...]]]:
    return (member for order in graph.orders for group in (order.before, order.after) for member in group.members)


def _edges(graph: Graph) -> Iterator[tuple[Op, Operand, Op, Operand]]:
    """Yield all pairs of ops between which data flows. The home of a weight counts as its producer."""
    producers = {name: (op, op.outputs[j]) for name, (op, j) in graph.model.producers.items()}
    producers |= {op.inputs[0].tensor: (op, op.outputs[0]) for op in graph.model.ops if not op.is_forward}
    for op in graph.model.ops:
        for operand in op.inputs if op.is_forward else op.inputs[1:] if op.is_write else ():
            if operand.tensor in producers:
                yield *producers[operand.tensor], op, operand


def restrict(graph: Graph, fold: Fold, places: int = KEPT) -> Graph:
    """Return the graph with only the parts at the first places of each fold axis."""
    kept = {d for d, place in fold.places.items() if all(c < places for c in place[1:])}
    twin = graph.copy()
    twin.orders = changed(graph.orders, lambda group: _restricted_group(graph, group, kept))
    done: dict[Hashable, Grid] = {}
    for name, grid in twin.grids.items():
        signature = grid.signature()
        if signature not in done:
            done[signature] = grid.only(lambda _, grid: _places(grid, kept))
        twin.grids[name] = done[signature]
    return twin


def _places(grid: Grid, kept: set[int]) -> list[list[int]]:
    """Return, for each axis of a grid, the positions at which a kept device occurs. Grids of grids keep all."""
    if grid.children:
        return [list(range(len(axis.sizes))) for axis in grid.axes]
    wanted, devices, found = np.array(sorted(kept)), grid.devices, list[list[int]]()
    for at in range(devices.ndim):
        other = tuple(a for a in range(devices.ndim) if a != at)
        once = devices[tuple(slice(0, 1 if s == 0 and a != at else None) for a, s in enumerate(devices.strides))]
        found.append(np.flatnonzero(np.isin(once, wanted).any(axis=other)).tolist())
    return found


def _restricted_group(graph: Graph, group: Group, kept: set[int]) -> Group:
    """Return a group without the parts outside of the first places. A line is in a group as a whole or not at all."""

    def moved(grid: Grid, all_places: Sequence[Sequence[int]], path: Address) -> Address | None:
        ((level, cell),) = path
        places = all_places[:level]
        where = np.unravel_index(cell, [len(axis.sizes) for axis in grid.axes[:level]])
        if not all(int(c) in own for c, own in zip(where, places, strict=True)):
            return None
        own = [some.index(int(c)) for c, some in zip(where, places, strict=True)]
        return ((level, int(np.ravel_multi_index(own, [len(some) for some in places]))),)

    members = []
    for name, paths in group.members:
        grid = graph.grids[name]
        places = _places(grid, kept) if paths else []
        found = tuple(path for path in (moved(grid, places, path) for path in paths) if path is not None)
        members += [(name, found)] if found or not paths else []
    return replace(group, members=tuple(members))
