"""Through which inputs of an op partial values may pass: all at once in a sum, one at a time in a product."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from superscaler.ir.graph import Op, Ref

Groups = tuple[tuple[int, ...], ...]

_SUMS = ("add.Tensor", "sub.Tensor", "cat.default", "stack.default")
_PRODUCTS = ("mul.Tensor", "matmul.default", "mm.default", "bmm.default", "linear.default", "einsum.default")
_ALONE = (
    "neg.default", "view.default", "_unsafe_view.default", "unsqueeze.default", "expand.default",
    "transpose.int", "permute.default", "t.default", "clone.default", "sum.default",
    "sum.dim_IntList", "mean.default", "mean.dim", "div.Tensor", "slice.Tensor", "select.int",
)  # fmt: skip


def linear_groups(op: Op) -> Groups:
    """Return the sets of inputs in which an op is linear (not affine), as `Op.linear` wants them."""
    name = op.target.removeprefix("aten.")
    everything = tuple(range(len(op.inputs)))
    if name in _SUMS:
        # A number among the terms makes it affine.
        whole = all(isinstance(a, Ref | list | tuple) for a in op.args[: 1 if name[0] in "c" else 2])
        return (everything,) if whole else ()
    if name in _PRODUCTS:
        return tuple((k,) for k in everything)
    is_cast = name == "_to_copy.default" and "float" in str(dict(op.kwargs).get("dtype"))
    if (is_cast or name in _ALONE) and op.args and op.args[0] == Ref(0):
        return ((0,),)
    return ()


def with_linearity(ops: Iterable[Op]) -> list[Op]:
    """Return the ops with `linear`, and with `passes` for scalars that are linear in a sum: a scaled or added loss.

    Cutting them on the factor of the sum splits its value, so that no part waits for the whole of it.
    """
    sums: dict[str, set[str]] = {}
    found = []
    for op in ops:
        linear = linear_groups(op)
        own = {i.factor for i in op.indices if i.mark == "summed"}
        passing = {f: g for g in reversed(linear) for k in g for f in sums.get(op.inputs[k].tensor, ())}
        scalar = all(not output.slots for output in op.outputs)
        passes = tuple(sorted((f, g) for f, g in passing.items() if op.find(f) is None)) if scalar else ()
        for output in op.outputs:
            sums[output.tensor] = own | set(passing)
        found.append(replace(op, linear=linear, passes=passes))
    return found
