"""The cut of parts: an algorithm's axis is checked, and becomes one more axis of a grid, or a child grid of a cell."""

from dataclasses import replace
from math import prod
from numbers import Integral

import numpy as np

from superscaler.errors import InputError, TransformError, named, unknown
from superscaler.ir.graph import Graph
from superscaler.ir.grid import Axis, Grid, covers
from superscaler.ir.journal import Entry
from superscaler.ir.model import Op
from superscaler.ir.op import MARKS, is_named
from superscaler.ir.parts import Parts
from superscaler.specs.arguments import fits
from superscaler.transform.algorithms import Algorithm, why_whole


def cut(graph: Graph, parts: Parts, algorithm: Algorithm, where: str) -> Parts:
    """Apply an algorithm to all cells of a grid, or to one. Returns the new parts with one more axis, (*parts, new)."""
    # A factor may have been renamed since the handle was made.
    op, grid = graph.op(parts.op.name), parts.grid
    parts.check()
    if not parts.cells.size:
        raise TransformError(f"op_trans at {where} selects none of the parts of {op.name}; select at least one.")
    factor = getattr(algorithm, "factor", ())
    factors = [str(name) for name in (factor if isinstance(factor, tuple | list) else (factor,))]
    if hasattr(algorithm, "factor") and not factors:
        raise InputError(f"op_trans at {where}: {algorithm} names no factor; name one, or make copies by Replicate.")
    # A batch of one has no factor; one part is the whole.
    for name in factors if getattr(algorithm, "parts", 0) != 1 else ():
        _check_factor(graph, name, where)
    sizes = _sizes(graph, op, parts)
    made = {some: _axis(op, algorithm, some, where) for some in sizes}
    if all(axis.index is not None and len(axis.sizes) == 1 for axis in made.values()) and len(set(made.values())) > 1:
        # One part of each of parts that differ in size.
        made = {some: replace(axis, index=None, sizes=(1,)) for some, axis in made.items()}
    axis = made[sizes[0]]
    is_copied = factor and axis.index is None and not axis.partial_inputs
    note = f" (replicated: it {why_whole(op, factors)})" if is_copied else ""
    graph.journal.append(Entry("op_trans", op.name, f"{algorithm}{note}", where))
    if axis.is_microbatch and not op.is_forward:
        graph.policy = replace(graph.policy, reduced={**graph.policy.reduced, op.name: len(axis.sizes)})
        return parts
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


def _check_factor(graph: Graph, name: str, where: str) -> None:
    factor, at, which = name.partition("@")
    if factor not in graph.model.factors and not any(is_named(known, factor) for known in graph.model.factors):
        several = any(is_named(known, f"*.{factor}") for known in graph.model.factors)
        hint = f" Write '*.{factor}' for all that end so." if several else ""
        # Of many blocks a pattern stands for the factors that end alike.
        ends = {f"*.{known.rpartition('.')[2]}" for known in graph.model.factors if "." in known and not several}
        raise InputError(
            f"op_trans at {where}: {unknown('factor', factor, {*graph.model.factors, *ends})}{hint} A dim of size 1, "
            "as of a batch of one, has no factor: it comes in one part only."
        )
    if at and not (which.isdigit() or which in MARKS):
        raise InputError(f"op_trans at {where}: '{name}': {unknown('index', which, [*MARKS, '0, 1, ...'])}")


def _axis(op: Op, algorithm: Algorithm, sizes: tuple[int, ...], where: str) -> Axis:
    """Return the axis that an algorithm (possibly a user's) makes of a part. Raises TransformError for a result that is
    no axis, loses elements, or computes another value.
    """
    try:
        axis = algorithm.cut(op, sizes)
    except TransformError as error:
        raise TransformError(f"op_trans at {where}: {error}") from None
    wrong = _wrong(op, axis, sizes)
    if wrong:
        raise TransformError(f"op_trans at {where}: {type(algorithm).__name__} of {op.name} ({op.target}) {wrong}")
    plain = {type(axis.sizes), type(axis.index)} <= {tuple, int, type(None)} and {*map(type, axis.sizes)} == {int}
    index = None if axis.index is None else int(axis.index)
    return axis if plain else replace(axis, index=index, sizes=tuple(map(int, axis.sizes)))


def _wrong(op: Op, axis: Axis, sizes: tuple[int, ...]) -> str:
    """Return the violation of an axis on a part of these sizes, and the remedy; '' if there is none."""
    if not isinstance(axis, Axis):
        return f"gives {axis!r}; its method cut must return an Axis."
    listed = axis.sizes if isinstance(axis.sizes, tuple | list) else ()
    kinds = {*map(type, listed)}
    if not kinds or not all(issubclass(kind, Integral) for kind in kinds) or min(listed) < 1:
        return f"makes parts of sizes {axis.sizes}; give one or more, each an integer of at least 1."
    if not isinstance(axis.name, str):
        return f"has the name {named(axis.name)}; give the name of an axis of a mesh, as 'dp', or leave it out."
    if not isinstance(axis.at, tuple) or (axis.at and (not fits(axis.at, tuple[int, ...]) or min(axis.at) < 0)):
        return f"has the places {named(axis.at)}; give a tuple of numbers from 0, as (0, 1)."
    if axis.at and len(axis.at) != len(listed):
        return f"has the places {axis.at} for {len(listed)} parts; give each one from 0 on."
    if not isinstance(axis.partial_inputs, tuple) or (
        axis.partial_inputs and not fits(axis.partial_inputs, tuple[int, ...])
    ):
        return f"shares out the addends of {named(axis.partial_inputs)}; give a tuple of numbers of inputs, as (0,)."
    if not isinstance(axis.is_microbatch, bool):
        return f"has is_microbatch {named(axis.is_microbatch)}; give True or False."
    if axis.mirror not in ("copy", "route"):
        return f"has an {unknown('mirror', str(axis.mirror), ['copy', 'route'])}"
    if axis.index is None:
        linear = ", ".join(map(str, op.linear)) or "none"
        if axis.partial_inputs and axis.partial_inputs not in op.linear:
            return f"shares out the addends of inputs {axis.partial_inputs}; the op is linear in: {linear}."
        return ""
    if not isinstance(axis.index, Integral) or not 0 <= axis.index < len(op.indices):
        return f"cuts index {axis.index!r}, but the op has {len(op.indices)}, numbered from 0; give one of these."
    index, extent = op.indices[axis.index], sizes[axis.index]
    cuts = f"cuts index {axis.index} ({index.factor})"
    if index.mark == "frozen":
        return f"{cuts}, which the op needs whole; cut another one, or replicate it (index None)."
    if index.follows:
        return f"{cuts}, which follows index {index.follows[0]}; cut that one."
    if axis.partial_inputs:
        return f"{cuts} and shares out the addends of inputs {axis.partial_inputs}; do one after the other."
    if sum(axis.sizes) != extent:
        return f"{cuts} into {axis.sizes}, {sum(axis.sizes)} elements, but the part has {extent}; cover {extent}."
    return ""


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
        start = _cell_extents(grid, start, cell)
        grid = grid.children[cell]
    if parts.cells.size < prod(len(a.sizes) for a in grid.axes):
        return list(dict.fromkeys(_cell_extents(grid, start, cell) for cell in parts.cells.reshape(-1).tolist()))
    found = {start: None}
    for axis in grid.axes:
        if axis.index is not None:
            at, distinct = axis.index, dict.fromkeys(axis.sizes)
            found = {(*sizes[:at], size, *sizes[at + 1 :]): None for sizes in found for size in distinct}
    return list(found)


def _cell_extents(grid: Grid, start: tuple[int, ...], cell: int) -> tuple[int, ...]:
    """Return the extents of one cell of a grid that covers `start`."""
    sizes = list(start)
    where = np.unravel_index(cell, [len(a.sizes) for a in grid.axes]) if grid.axes else ()
    for axis, coordinate in zip(grid.axes, where, strict=True):
        if axis.index is not None:
            sizes[axis.index] = axis.sizes[int(coordinate)]
    return tuple(sizes)
