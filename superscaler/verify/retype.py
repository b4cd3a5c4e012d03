"""Retyping: the plan for the same model in another floating-point type, whose steps can be compared."""

from dataclasses import replace
from typing import Any

from superscaler.ir.graph import Graph
from superscaler.ir.model import Model, Op
from superscaler.ops.table import row_of

FLOATS = ("float32", "bfloat16", "float16")


def retype(graph: Graph, dtype: str | None, dropout: bool) -> Graph:
    """Return the same plan for a model whose floating-point tensors and casts are all of `dtype` (None: as they are).

    Without `dropout`, all its probabilities are zero, so that the result can be compared. What is communicated how is
    chosen by the sizes of the dtypes there were, so that the same exchanges are compared as train.
    """
    return graph.copy(retype_model(graph.model, dtype, dropout))


def retype_model(model: Model, dtype: str | None, dropout: bool) -> Model:
    tensors = dict(model.tensors)
    for name, tensor in model.tensors.items():
        if dtype is not None and tensor.dtype in FLOATS:
            tensors[name] = replace(tensor, dtype=dtype, trained_as=tensor.trained.dtype)
    ops = tuple(_retyped_op(op, dtype, dropout) for op in model.ops)
    return replace(model, tensors=tensors, ops=ops)


def _retyped_op(op: Op, dtype: str | None, dropout: bool) -> Op:
    args, kwargs = op.args, op.kwargs
    if not dropout and (rate := row_of(op.target).rate) is not None:
        args = (*args[:rate], 0.0, *args[rate + 1 :])
    casts = {f"torch.{name}": f"torch.{dtype}" for name in FLOATS if dtype}

    def swap(value: Any) -> Any:
        return casts.get(value, value) if isinstance(value, str) else value

    return replace(op, args=tuple(map(swap, args)), kwargs=tuple((k, swap(v)) for k, v in kwargs))
