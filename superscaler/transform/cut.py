"""What `op_trans` does to the grid of an op: one more axis where all its cells are cut alike, else a child grid."""

from __future__ import annotations

from math import prod

import numpy as np

from superscaler.errors import TransformError
from superscaler.ir.graph import Op
from superscaler.ir.parts import Axis, Grid, flat_cells
from superscaler.ir.transformed import Entry, Graph, Parts, Path
from superscaler.transform.algorithms import Algorithm, Box


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
    chosen = parts.cells.reshape(-1)
    boxes = _boxes(graph, op, parts.prefix, grid)
    axes = {cell: algorithm.axis(op, boxes[cell]) for cell in set(chosen.tolist())}
    axis = next(iter(axes.values()))
    if axis.is_microbatch and any(a.is_microbatch for a in (*graph.grids[op.name].axes, *grid.axes)):
        raise TransformError(f"op_trans at {where} cuts {op.name} into microbatches, but it is one already; split it.")
    note = " (replicated: no index to cut)" if factor is not None and axis.index is None and not axis.value else ""
    graph.journal.append(Entry("op_trans", op.name, f"{algorithm}{note}", where))
    if len(axes) == len(boxes) and len(set(axes.values())) == 1 and not grid.children:
        return _append(grid, parts, axis, where)
    if parts.cells.size == 1:
        return _child(parts, axis, where)
    raise TransformError(
        f"op_trans at {where} cuts {len(axes)} of the {len(boxes)} parts of {op.name}, or cuts them differently; "
        "transform these one by one: op_trans(graph, list(parts), ...)."
    )


def _append(grid: Grid, parts: Parts, axis: Axis, where: str) -> Parts:
    width = len(axis.sizes)
    grid.devices = np.repeat(grid.devices.reshape(*grid.devices.shape, 1), width, axis=-1)
    grid.axes, grid.replaced_at = (*grid.axes, axis), where
    cells = parts.cells[..., None] * width + np.arange(width)
    return Parts(parts.op, grid, parts.prefix, cells, len(grid.axes))


def _child(part: Parts, axis: Axis, where: str) -> Parts:
    cell = int(part.cells.reshape(-1)[0])
    device = part.grid.devices.reshape(-1)[cell]
    child = Grid((axis,), np.full(len(axis.sizes), device), replaced_at=where)
    part.grid.children[cell] = child
    return Parts(part.op, child, (*part.prefix, (part.level, cell)), np.arange(len(axis.sizes)), 1)


def _boxes(graph: Graph, op: Op, prefix: Path, grid: Grid) -> list[Box]:
    """Return the boxes of all cells of a grid of the op's tree."""
    box: Box = tuple((0, i.size) for i in op.indices)
    here = graph.grids[op.name]
    for _, cell in prefix:
        box = cell_boxes(here, box)[cell]
        here = here.children[cell]
    return cell_boxes(grid, box)


def cell_boxes(grid: Grid, box: Box) -> list[Box]:
    """Return the boxes of the cells of a grid that covers `box`, ignoring children."""
    lo, hi, *_ = flat_cells(grid, box, -1)
    pairs = np.stack([lo, hi], axis=-1).tolist()
    return [tuple((a, b) for a, b in row) for row in pairs] if prod(lo.shape) else [()] * len(lo)
