"""The rows of all operators, and queries on them."""

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from superscaler.ir.mask import Box, extents
from superscaler.ir.model import Op, PTensor
from superscaler.ir.program import Function
from superscaler.ops import elementwise, layers, lookups, products, reductions, shapes
from superscaler.ops.call import ranges_of
from superscaler.ops.row import Row

ROWS: dict[str, Row] = {
    **elementwise.ROWS, **products.ROWS, **shapes.ROWS, **lookups.ROWS, **reductions.ROWS, **layers.ROWS
}  # fmt: skip
# Operators that get the random numbers of their elements.
RANDOM = frozenset(target for target, row in ROWS.items() if row.random)
_UNKNOWN = Row()
# Operators that get the ranges of their parts.
PLACED = frozenset(target for target, row in ROWS.items() if row.placed is not _UNKNOWN.placed)


def row_of(target: str) -> Row:
    """Return the row of an operator, or a row without facts."""
    return ROWS.get(target, _UNKNOWN)


def reads_inputs(op: Op) -> bool:
    """Return whether the backward of an op needs at most its inputs, and none of its results."""
    return bool(op.linear) and len(op.inputs) < 3


def parts_of(op: Op, box: Box, tensors: Mapping[str, PTensor]) -> dict[tuple[int, int], Box]:
    """Return the ranges of a part that its operator must know, by operand and dim; whole dims are left out."""
    found = {key: ranges_of(op, box, tensors, *key) for key in row_of(op.target).placed(op, tensors)}
    return {key: own for key, (own, whole) in found.items() if extents(own) != whole}


def with_linearity(ops: Iterable[Op]) -> list[Op]:
    """Return the ops with `linear`, and with `passes` for scalars, and stacks of scalars, that are linear in a sum: a
    scaled or added loss.

    Cutting them on the factor of the sum splits its value, so that no part waits for the whole of it.
    """
    sums: dict[str, set[str]] = {}
    stacks = set[str]()
    found = []
    for op in ops:
        linear = row_of(op.target).linear(op)
        own = {i.factor for i in op.indices if i.mark == "summed"}
        passing = {f: g for g in reversed(linear) for k in g for f in sums.get(op.inputs[k].tensor, ())}
        is_few = all(not output.slots for output in op.outputs) or _is_stack(op, stacks)
        passes = tuple(sorted((f, g) for f, g in passing.items() if op.find(f) is None)) if is_few else ()
        stacks.update(output.tensor for output in op.outputs if is_few and output.slots)
        for output in op.outputs:
            sums[output.tensor] = own | set(passing)
        found.append(replace(op, linear=linear, passes=passes))
    return found


def _is_stack(op: Op, stacks: Container[str]) -> bool:
    """Return whether an op stacks scalars, or makes as many numbers of such a stack."""
    if op.target == "aten.stack.default":
        return not any(operand.slots for operand in op.inputs)
    given = [operand for operand in op.inputs if operand.tensor in stacks]
    return bool(given) and all(len(output.slots) == len(given[0].slots) for output in op.outputs)


def biased_products(ops: Sequence[Op], outputs: Container[str], tensors: Mapping[str, PTensor]) -> dict[str, Op]:
    """Return the matrix products of a segment that become one call with the addition of a bias, by the name of that
    addition. It must be the only reader of the product, and add a tensor of one dim and the same dtype, as long as the
    last dim of the product.
    """
    uses = Counter(o.tensor for op in ops for o in op.inputs)
    made = {op.outputs[0].tensor: op for op in ops if row_of(op.target).biased}
    found = {}
    for op in ops:
        if op.target != "aten.add.Tensor" or op.kwargs or len(op.inputs) != 2:
            continue
        product, bias = (tensors[o.tensor] for o in op.inputs)
        is_alone = uses[product.name] == 1 and product.name not in outputs
        is_bias = (bias.shape, bias.trained.dtype) == (product.shape[-1:], product.trained.dtype)
        if product.name in made and is_alone and is_bias:
            found[op.name] = made[product.name]
    return found


def unfused(ops: Iterable[Op], products: Mapping[str, Op]) -> list[Op]:
    """Return the ops of a segment that have a line of their own: all but fused products."""
    fused = {product.name for product in products.values()}
    return [op for op in ops if op.name not in fused]


def ops_of_lines(function: Function, tensors: Mapping[str, PTensor]) -> list[Op]:
    """Return the op of each line of a segment, as they run."""
    return unfused(function.ops, biased_products(function.ops, function.outputs, tensors))
