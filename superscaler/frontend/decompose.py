"""Operators that become several, each with a rule: what they couple is then a sum, exact however it is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.fx import Node

from superscaler.frontend import ours
from superscaler.frontend.trace import Steps, argument, dtype_of, outputs, shape_of

_MEAN = 1
_ATEN = torch.ops.aten


def linear(do: Steps, input: Node, weight: Node, bias: Node | None = None) -> Node | None:
    """linear(x, w, b) -> add(linear(x, w), b): a bias is added once, however the product is cut."""
    if bias is None:
        do.becomes(_ATEN.linear.default, input, weight)
        return None
    return do(_ATEN.add.Tensor, do(_ATEN.linear.default, input, weight, word="product"), bias)


def added(product: Callable[..., Any]) -> Callable[..., Node]:
    """addmm(b, x, w) -> add(mm(x, w), b), each scaled where the call says so; so for batches and vectors."""

    def rewrite(do: Steps, bias: Node, first: Node, second: Node, *, beta: float = 1, alpha: float = 1) -> Node:
        result = do(product, first, second, word="product")
        if alpha != 1:
            result = do(_ATEN.mul.Tensor, result, alpha, word="alpha")
        if beta != 1:
            bias = do(_ATEN.mul.Tensor, bias, beta, word="beta")
        return do(_ATEN.add.Tensor, result, bias)

    return rewrite


def cross_entropy(
    do: Steps,
    logits: Node,
    labels: Node,
    weight: Node | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Node | None:
    """A mean over the labels that count -> their count, and the sum over it: exact however the labels are cut."""
    if weight is not None or reduction != _MEAN or len(shape_of(logits)) < 2:
        return None
    # Half precision cannot count beyond 256 (bfloat16) or 2048 (float16).
    wide, is_class = torch.promote_types(dtype_of(logits), torch.float32), not dtype_of(labels).is_floating_point
    loss = _ATEN.cross_entropy_loss.default
    if label_smoothing or not is_class:
        # Without a rule for the sum: the losses, and their sum over how many count.
        named: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        each = do(loss, logits, labels, None, 0, word="losses", **named)
        if not is_class:
            return do(_ATEN.mean.default, each)
        total = do(_ATEN.sum.default, each)
        found = do(_ATEN.div.Tensor, total, _count(do, labels, ignore_index, wide), word="wide")
    else:
        count = _count(do, labels, ignore_index, wide)
        function = ours.cross_entropy if do.node.target is loss else ours.nll_loss
        found = do(function, logits, labels, count, ignore_index, word="wide")
    if dtype_of(do.node) != wide and do.node is not do.trace.loss:
        return do(_ATEN._to_copy.default, found, dtype=dtype_of(do.node))
    return found


def _count(do: Steps, labels: Node, ignore: int, dtype: torch.dtype) -> Node:
    count = do(ours.count_labels, labels, ignore, word="count")
    count.meta["val"] = count.meta["val"].to(dtype)
    return count


def mean_of_losses(do: Steps, *args: Any, **kwargs: Any) -> Node | None:
    """A mean loss without a rule of its own -> the losses of the elements, and their mean."""
    function: Any = do.node.target
    position = [a.name for a in function._schema.arguments].index("reduction")
    if argument(do.node, position, "reduction", _MEAN) != _MEAN:
        return None
    if position < len(args):
        args = (*args[:position], 0, *args[position + 1 :])
    else:
        kwargs["reduction"] = 0
    return do(_ATEN.mean.default, do(function, *args, word="losses", **kwargs))


def strided(do: Steps, x: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    """x[k::n] -> x viewed as (..., n) and of that dim k only: the dim before it can be cut."""
    shape, first = shape_of(x), start or 0
    dim %= len(shape)
    if step == 1 or shape[dim] % step or not 0 <= first < step or shape_of(do.node)[dim] != shape[dim] // step:
        return None
    apart = do(_ATEN.view.default, x, (*shape[:dim], shape[dim] // step, step, *shape[dim + 1 :]))
    picked = do(_ATEN.slice.Tensor, apart, dim + 1, first, first + 1)
    return do(_ATEN.view.default, picked, shape_of(do.node))


def masked_put(do: Steps, x: Node, indices: Sequence[Any], values: Node, accumulate: bool = False) -> Node | None:
    """x[mask] = value, where the value does not depend on the place in the mask -> where(mask, value, x)."""
    mask = indices[0]
    if len(indices) != 1 or dtype_of(mask) != torch.bool or accumulate:
        return None
    ones = len(shape_of(x)) - len(shape_of(mask))
    if len(shape_of(values)) > ones:
        return None
    if ones:
        mask = do(_ATEN.view.default, mask, (*shape_of(mask), *[1] * ones), word="mask")
    return do(_ATEN.where.self, mask, values, x)


def bernoulli(do: Steps, x: Node, p: float | None = None, **_: Any) -> Node:
    """bernoulli(p) -> uniform < p, in the dtype of the result."""
    drawn = do(ours.uniform, shape_of(do.node))
    below = do(_ATEN.lt.Tensor, drawn, x) if p is None else do(_ATEN.lt.Scalar, drawn, p)
    cast = do(_ATEN._to_copy.default, below, dtype=dtype_of(do.node))
    # The numbers are drawn by the name of the call.
    drawn.meta["op"], cast.meta["op"] = do.node.name, drawn.name
    return cast


def batch_norm(
    do: Steps, x: Node, weight: Node | None, bias: Node | None, *args: Any
) -> tuple[Node | None, ...] | None:
    """Batch normalization by the statistics of the whole batch, and the running ones as torch updates them.

    functional(x, weight, bias, mean, variance, training, momentum, eps) -> result, _, _, new mean, new variance
    """
    *running, is_training, momentum, eps = args[:5]
    if not is_training:
        return None
    narrow, shape = dtype_of(x), shape_of(x)
    dtype, channels = torch.promote_types(narrow, torch.float32), shape[1]
    others = [d for d in range(len(shape)) if d != 1]
    wide = x if narrow == dtype else do(_ATEN._to_copy.default, x, dtype=dtype)
    mean = do(_ATEN.mean.dim, wide, others, True)
    centered = do(_ATEN.sub.Tensor, wide, mean)
    variance = do(_ATEN.mean.dim, do(_ATEN.mul.Tensor, centered, centered), others, True)
    scale = do(_ATEN.rsqrt.default, do(_ATEN.add.Tensor, variance, eps))
    result = do(_ATEN.mul.Tensor, centered, scale)
    for function, parameter in ((_ATEN.mul.Tensor, weight), (_ATEN.add.Tensor, bias)):
        if parameter is not None:
            result = do(function, result, do(_ATEN.view.default, parameter, (channels, *[1] * (len(others) - 1))))
    if narrow != dtype:
        result = do(_ATEN._to_copy.default, result, dtype=narrow)
    count = prod(shape) / channels
    both = (mean, 1.0), (variance, count / max(count - 1, 1))
    fresh: list[Node] = []
    # Without running statistics there are no results beside the first.
    for old, (new, unbiased), _ in zip(running, both, outputs(do.node)[3:], strict=False):
        part = do(_ATEN.mul.Tensor, do(_ATEN.view.default, new, (channels,)), momentum * unbiased)
        fresh.append(do(_ATEN.add.Tensor, do(_ATEN.mul.Tensor, old, 1.0 - momentum), part))
    return result, None, None, *fresh
