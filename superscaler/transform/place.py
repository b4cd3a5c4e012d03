"""Placement on a mesh, by the names that algorithms gave the cuts; and of recomputed ops and copies, by other ops."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import numpy as np

from superscaler.cluster import Mesh
from superscaler.errors import InputError, unknown
from superscaler.ir.graph import Graph
from superscaler.ir.grid import Axis, Grid, Ints, covers, read_by
from superscaler.ir.model import Op
from superscaler.ir.orders import Group, changed
from superscaler.ir.parts import Parts
from superscaler.transform.algorithms import Replicate
from superscaler.transform.cut import cut


def leaves(graph: Graph, op: Op) -> list[Parts]:
    """Return handles on all present parts of an op: one, unless it was cut irregularly."""
    return list(_leaves(graph.parts(op)))


def _leaves(parts: Parts) -> Iterator[Parts]:
    children = parts.grid.children
    own = np.setdiff1d(parts.cells, list(children)) if children else parts.cells
    if own.size:
        yield Parts(parts.op, parts.grid, parts.prefix, own, parts.level)
    for cell, child in children.items():
        shape = [len(a.sizes) for a in child.axes]
        cells = np.arange(prod(shape)).reshape(shape)
        yield from _leaves(Parts(parts.op, child, (*parts.prefix, (parts.level, cell)), cells, len(shape)))


def spread(graph: Graph, parts: Parts, mesh: Mesh, where: str) -> tuple[Parts, Ints]:
    """Return parts with replicas along the mesh axes that do not cut them, and the mesh position of each."""
    parts.check()
    op, sizes = parts.op, mesh.sizes
    named = {axis.name for grid, _ in _grids(graph, parts) for axis in grid.axes if axis.name}
    for name in (name for name in named if name not in sizes):
        raise InputError(
            f"op_assign at {where}: {op.name} is cut along {name}, but {unknown('axis of the mesh', name, sizes)}"
        )
    if op.is_forward:
        graph.cut_along |= named
        copied = [name for name, size in sizes.items() if size > 1 and name not in {*named, *graph.only_copied}]
        if copied and any(_is_nameless_cut(axis) for grid, _ in _grids(graph, parts) for axis in grid.axes):
            graph.only_copied |= dict.fromkeys(copied, op.name)
    for name in (name for name in sizes if name not in named):
        parts = cut(graph, parts, Replicate(sizes[name], axis=name), where)
    places: dict[str, tuple[int, Ints]] = {}
    for axis, at in _above(graph, parts):
        count, place = places.get(axis.name, (1, np.array(0)))
        # Places `at` are among those that the cuts above leave.
        width = max(sizes.get(axis.name, 1) // count, 1) if axis.at else len(axis.sizes)
        places[axis.name] = count * width, place * width + (np.array(axis.at)[at] if axis.at else at)
    for name, size in sizes.items():
        count, place = places[name]
        if count != size:
            raise InputError(
                f"op_assign at {where}: {op.name} is cut into {count} along {name}, but the mesh is {mesh}; "
                "make the two numbers equal."
            )
        if place.max() >= size:
            raise InputError(
                f"op_assign at {where}: {op.name} is at place {place.max()} of {name}, but the mesh is {mesh}; "
                f"choose 0 to {size - 1}."
            )
    number = np.array(0)
    for name, size in sizes.items():
        number = number * size + places[name][1]
    # All parts in the shape of their grid; the numbers repeat along its axes.
    shape = parts.grid.devices.shape
    return (replace(parts, cells=parts.cells.reshape(shape)) if covers(parts.cells, prod(shape)) else parts), number


def _is_nameless_cut(axis: Axis) -> bool:
    is_cut = axis.index is not None or axis.partial_inputs
    return bool(is_cut and not axis.name and not axis.is_microbatch and len(axis.sizes) > 1)


def check_axes_cut(graph: Graph) -> None:
    """Raise InputError for an axis of a mesh that cuts no op, beside a cut that names none: its devices do the same."""
    for name, op in graph.only_copied.items():
        if name not in graph.cut_along:
            entries = [e for e in graph.journal if e.op == op and e.verb == "op_trans"]
            e = next((e for e in entries if not e.detail.startswith(("Replicate", "Microbatch"))), entries[0])
            raise InputError(
                f"op_trans at {e.where}: {e.detail} of {op} names no axis, so that its parts share a device, and no op "
                f"is cut along {name} of the mesh: all devices along {name} would compute the same. Name it, as "
                f"Split(..., axis='{name}'); for copies on purpose write Replicate(n, axis='{name}')."
            )


def check_cut_first(graph: Graph) -> None:
    """Raise InputError for an op that was placed along a mesh axis before it was cut along it."""
    for op in graph.model.ops:
        grid = graph.grids[op.name]
        named = [(axis.name, at) for at, axis in enumerate(grid.axes) if axis.name and len(axis.sizes) > 1]
        if len({name for name, _ in named}) == len(named):
            continue
        placed = {name for name, at in named if grid.distinct.shape[at] > 1}
        late = (name for name, at in named if name in placed and grid.distinct.shape[at] == 1 and not grid.axes[at].at)
        for name in late:
            raise InputError(
                f"{op.name} is cut along {name} at {grid.replaced_at}, but it was placed before, so that the parts of "
                f"this cut share a device; op_assign it once it is cut."
            )


def _above(graph: Graph, parts: Parts) -> Iterator[tuple[Axis, Ints]]:
    """Yield the axes of the grids above parts and of their own, outer first, each with their coordinates along it."""
    return (found for grid, cells in _grids(graph, parts) for found in _along(grid, cells))


def _grids(graph: Graph, parts: Parts) -> Iterator[tuple[Grid, Ints]]:
    """Yield the grids above parts and their own, outer first, each with their cells."""
    grid: Grid = graph.grids[parts.op.name]
    for _, cell in parts.prefix:
        yield grid, np.array(cell)
        grid = grid.children[cell]
    yield grid, parts.cells


def _along(grid: Grid, cells: Ints) -> Iterator[tuple[Axis, Ints]]:
    """Yield the axes of a grid with the coordinates of cells: of all cells with length 1 along the other axes."""
    shape = tuple(len(a.sizes) for a in grid.axes)
    is_all = covers(cells, prod(shape))
    found = np.ogrid[tuple(map(slice, shape))] if is_all else np.unravel_index(cells, shape) if shape else ()
    return zip(grid.axes, found, strict=True)


def place_twins(graph: Graph) -> None:
    """Give untouched recomputed ops the grids of their ops and their place in orders, and copies the parts of their
    first readers.
    """
    _check_orders(graph)
    for twin in (twin for twins in graph.model.twins.values() for twin in twins):
        if not graph.grids[twin.name].is_touched:
            graph.grids[twin.name] = graph.grids[twin.origin]
    copies = [op for op in graph.forward_ops if op.is_copy and not graph.grids[op.name].is_touched]
    for op in reversed(copies):
        reader, k = graph.model.uses[op.outputs[0].tensor][0]
        graph.grids[op.name] = read_by(graph.grids[reader.name], reader.inputs[k].slots)

    first = {name: twins[0].name for name, twins in graph.model.twins.items()}
    mirrored = {name: twin.name for name, twin in graph.twins.items() if twin.has_mirror}

    def of_twins(group: Group) -> Group:
        if group.kind == "F":
            return group
        names = first if group.kind == "R" else mirrored
        members = tuple((names.get(name, name), paths) for name, paths in group.members)
        return replace(group, kind="F" if group.kind == "R" else group.kind, members=members)

    if graph.twins:
        graph.orders = changed(graph.orders, of_twins)


def _check_orders(graph: Graph) -> None:
    """Raise InputError for an order of an op that no longer exists."""
    groups = ((group.members, order.where) for order in graph.orders for group in (order.before, order.after))
    for members, where in dict(groups).items():
        for name, _ in members:
            try:
                graph.op(name)
            except InputError as error:
                raise InputError(f"op_order at {where}: {error}") from None
