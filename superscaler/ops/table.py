"""The rows of all operators, and what is asked of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from superscaler.ir.graph import Model, Op
from superscaler.ops import elementwise, layers, lookups, products, reductions, shapes
from superscaler.ops.row import Row

ROWS: dict[str, Row] = {
    **elementwise.ROWS, **products.ROWS, **shapes.ROWS, **lookups.ROWS, **reductions.ROWS, **layers.ROWS
}  # fmt: skip
# These are given the random numbers of their elements.
RANDOM = frozenset(target for target, row in ROWS.items() if row.random)
_UNKNOWN = Row()


def row_of(target: str) -> Row:
    """Return the row of an operator; of one that has none, a row without facts."""
    return ROWS.get(target, _UNKNOWN)


def placed(model: Model, op: Op) -> tuple[int, ...]:
    """Return the indices of an op on which it matters where a part starts, not only how large it is."""
    where = row_of(op.target).placed
    if where is None:
        return tuple(dict.fromkeys(i.until for i in op.indices if i.until is not None))
    if where == "made":
        read = {i for operand in op.inputs for i in operand.slots}
        return tuple(i for operand in op.outputs for i in operand.slots if i is not None and i not in read)
    number, dim = where
    slots = iter(op.inputs[number].slots)
    dims = [[next(slots) for _ in own] for own in model.tensors[op.inputs[number].tensor].slots]
    return tuple(i for i in dims[dim] if i is not None)


def with_linearity(ops: Iterable[Op]) -> list[Op]:
    """Return the ops with `linear`, and with `passes` for scalars that are linear in a sum: a scaled or added loss.

    Cutting them on the factor of the sum splits its value, so that no part waits for the whole of it.
    """
    sums: dict[str, set[str]] = {}
    found = []
    for op in ops:
        linear = row_of(op.target).linear(op)
        own = {i.factor for i in op.indices if i.mark == "summed"}
        passing = {f: g for g in reversed(linear) for k in g for f in sums.get(op.inputs[k].tensor, ())}
        scalar = all(not output.slots for output in op.outputs)
        passes = tuple(sorted((f, g) for f, g in passing.items() if op.find(f) is None)) if scalar else ()
        for output in op.outputs:
            sums[output.tensor] = own | set(passing)
        found.append(replace(op, linear=linear, passes=passes))
    return found
