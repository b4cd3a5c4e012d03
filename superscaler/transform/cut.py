"""What `op_trans` does to the grid of an op: one more axis where all its cells are cut alike, else a child grid."""

from __future__ import annotations

from math import prod

import numpy as np

from superscaler.errors import TransformError
from superscaler.ir.graph import Op
from superscaler.ir.parts import Axis, Grid, covers
from superscaler.ir.transformed import Entry, Graph, Parts
from superscaler.transform.algorithms import Algorithm


def cut(graph: Graph, parts: Parts, algorithm: Algorithm, where: str) -> Parts:
    """Apply an algorithm to all cells of a grid, or to one. Returns the new parts with one more axis, (*parts, new)."""
    # A factor may have been renamed since the handle was made.
    op, grid = graph.op(parts.op.name), parts.grid
    parts.check()
    if not parts.cells.size:
        raise TransformError(f"op_trans at {where} selects none of the parts of {op.name}; select at least one.")
    factor = getattr(algorithm, "factor", None)
    if factor is not None:
        graph.check_factor(str(factor))
    sizes = _sizes(graph, op, parts)
    made = {some: algorithm.axis(op, some) for some in sizes}
    axis = made[sizes[0]]
    if axis.is_microbatch and any(a.is_microbatch for a in (*graph.grids[op.name].axes, *grid.axes)):
        raise TransformError(f"op_trans at {where} cuts {op.name} into microbatches, but it is one already; split it.")
    if axis.is_microbatch and not op.is_forward:
        raise TransformError(
            f"op_trans at {where} cuts {op.name} into microbatches, but an update runs once, at the end of a step; "
            "cut graph.forward_ops into microbatches, and an update by Split or Replicate."
        )
    note = " (replicated: no index to cut)" if factor is not None and axis.index is None and not axis.value else ""
    graph.journal.append(Entry("op_trans", op.name, f"{algorithm}{note}", where))
    count = prod(len(a.sizes) for a in grid.axes)
    chosen = count if covers(parts.cells, count) else len(np.unique(parts.cells))
    if chosen == count and len(set(made.values())) == 1 and not grid.children:
        return _append(grid, parts, axis, where)
    if parts.cells.size == 1:
        return _child(parts, axis, where)
    raise TransformError(
        f"op_trans at {where} cuts {chosen} of the {count} parts of {op.name}, or cuts them differently; "
        "transform these one by one: op_trans(graph, list(parts), ...)."
    )


def _append(grid: Grid, parts: Parts, axis: Axis, where: str) -> Parts:
    width = len(axis.sizes)
    grid.devices = np.broadcast_to(grid.devices[..., None], (*grid.devices.shape, width))
    grid.axes, grid.replaced_at = (*grid.axes, axis), where
    cells = parts.cells[..., None] * width + np.arange(width)
    return Parts(parts.op, grid, parts.prefix, cells, len(grid.axes))


def _child(part: Parts, axis: Axis, where: str) -> Parts:
    cell = int(part.cells.reshape(-1)[0])
    device = part.grid.devices.reshape(-1)[cell]
    child = Grid((axis,), np.full(len(axis.sizes), device), replaced_at=where)
    part.grid.children[cell] = child
    return Parts(part.op, child, (*part.prefix, (part.level, cell)), np.arange(len(axis.sizes)), 1)


def _sizes(graph: Graph, op: Op, parts: Parts) -> list[tuple[int, ...]]:
    """Return the distinct extents of the chosen cells, over the op's indices."""
    grid = graph.grids[op.name]
    start = tuple(i.size for i in op.indices)
    for _, cell in parts.prefix:
        start = cell_extents(grid, start, cell)
        grid = grid.children[cell]
    if parts.cells.size < prod(len(a.sizes) for a in grid.axes):
        return list(dict.fromkeys(cell_extents(grid, start, cell) for cell in parts.cells.reshape(-1).tolist()))
    found = {start: None}
    for axis in grid.axes:
        if axis.index is not None:
            at = axis.index
            found = {(*sizes[:at], size, *sizes[at + 1 :]): None for sizes in found for size in axis.sizes}
    return list(found)


def cell_extents(grid: Grid, start: tuple[int, ...], cell: int) -> tuple[int, ...]:
    """Return the extents of one cell of a grid that covers `start`."""
    sizes = list(start)
    where = np.unravel_index(cell, [len(a.sizes) for a in grid.axes]) if grid.axes else ()
    for axis, coordinate in zip(grid.axes, where, strict=True):
        if axis.index is not None:
            sizes[axis.index] = axis.sizes[int(coordinate)]
    return tuple(sizes)
