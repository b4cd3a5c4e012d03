"""Operators that become several, each with a rule: what they couple is then a sum, exact however it is cut."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from superscaler.frontend.trace import Call, Spec, Trace, Var, overload, without_data

_MEAN = 1


class Steps:
    """The calls that a call becomes, in order, named after it."""

    def __init__(self, trace: Trace, call: Call) -> None:
        self.trace = trace
        self.call = call
        self.calls: list[Call] = []

    def add(
        self, name: str, /, *args: Any, out: str = "", word: str = "", spec: Spec | None = None, **kwargs: Any
    ) -> Var:
        """Append a call of an ATen operator (or `ss.` one of ours) that makes `out`: by default a new tensor, with
        `word` or the operator's name in its name. What makes the first result has the name of the call.

        `spec` is of what torch cannot tell, or not as it will be.
        """
        result = out or self.trace.derive(self.call.name, word or name.removeprefix("ss.").split(".")[0].strip("_"))
        target, specs = name if name.startswith("ss.") else f"aten.{name}", self.trace.specs
        if spec is None and not out:
            made = overload(target)(*without_data(args, specs), **without_data(kwargs, specs))
            spec = Spec(tuple(made.shape), made.dtype)
        specs[result] = spec or specs[result]
        own = self.call.name if result == self.call.outputs[0] else result
        self.calls.append(replace(self.call.becomes(target, *args, **kwargs), name=own, outputs=(result,)))
        return Var(result)


def linear(trace: Trace, call: Call) -> list[Call]:
    """linear(x, w, b) -> add(linear(x, w), b): a bias is added once, however the product is cut."""
    x, weight, bias = call.args[0], call.args[1], call.argument(2, "bias")
    if bias is None:
        return [call.becomes(call.target, x, weight)]
    return _added(Steps(trace, call), "linear.default", (x, weight), bias)


def added_product(trace: Trace, call: Call) -> list[Call]:
    """addmm(b, x, w) -> add(mm(x, w), b), each scaled where the call says so; so for batches and vectors."""
    bias, *factors = call.args[:3]
    name = {"addmm": "mm", "baddbmm": "bmm", "addmv": "mv", "addr": "outer"}[call.target.split(".")[1]]
    scales = call.kwargs.get("alpha", 1), call.kwargs.get("beta", 1)
    return _added(Steps(trace, call), f"{name}.default", tuple(factors), bias, *scales)


def _added(
    steps: Steps, name: str, factors: tuple[Any, ...], bias: Var, alpha: float = 1, beta: float = 1
) -> list[Call]:
    product = steps.add(name, *factors, word="product")
    if alpha != 1:
        product = steps.add("mul.Tensor", product, alpha, word="alpha")
    if beta != 1:
        bias = steps.add("mul.Tensor", bias, beta, word="beta")
    steps.add("add.Tensor", product, bias, out=steps.call.outputs[0])
    return steps.calls


def cross_entropy(trace: Trace, call: Call) -> list[Call]:
    """A mean over the labels that count -> their count, and the sum over it: exact however the labels are cut."""
    (logits, labels), out = call.args[:2], call.outputs[0]
    ignore, smoothing = call.argument(4, "ignore_index", -100), call.argument(5, "label_smoothing", 0.0)
    shape, given = trace.specs[logits.name].shape, trace.specs[out]
    if call.argument(2, "weight") is not None or call.argument(3, "reduction", _MEAN) != _MEAN or len(shape) < 2:
        return [call]
    steps, is_class = Steps(trace, call), not trace.specs[labels.name].dtype.is_floating_point
    # Half precision cannot count beyond 256 (bfloat16) or 2048 (float16).
    wide = Spec((), torch.promote_types(trace.specs[logits.name].dtype, torch.float32))
    end = "" if given.dtype != wide.dtype and out != trace.loss else out
    if smoothing or not is_class:
        # Without a rule for the sum: the losses, and their sum over how many count.
        named = {"ignore_index": ignore, "label_smoothing": smoothing}
        each = steps.add("cross_entropy_loss.default", logits, labels, None, 0, word="losses", **named)
        if not is_class:
            steps.add("mean.default", each, out=out)
            return steps.calls
        total = steps.add("sum.default", each)
        count = steps.add("ss.count_labels", labels, ignore, spec=wide, word="count")
        loss = steps.add("div.Tensor", total, count, spec=wide, out=end, word="wide")
    else:
        count = steps.add("ss.count_labels", labels, ignore, spec=wide, word="count")
        name = "ss.cross_entropy" if "cross_entropy" in call.target else "ss.nll_loss"
        loss = steps.add(name, logits, labels, count, ignore, spec=wide, out=end, word="wide")
    if not end:
        steps.add("_to_copy.default", loss, out=out, dtype=given.dtype)
    return steps.calls


def mean_of_losses(trace: Trace, call: Call) -> list[Call]:
    """A mean loss without a rule of its own -> the losses of the elements, and their mean."""
    position = [a.name for a in call.function._schema.arguments].index("reduction")
    if call.argument(position, "reduction", _MEAN) != _MEAN:
        return [call]
    steps = Steps(trace, call)
    at = call.args[position : position + 1]
    args = (*call.args[:position], *(0 for _ in at), *call.args[position + 1 :])
    kwargs = call.kwargs if at else {**call.kwargs, "reduction": 0}
    losses = steps.add(call.target.removeprefix("aten."), *args, word="losses", **kwargs)
    steps.add("mean.default", losses, out=call.outputs[0])
    return steps.calls


def strided(trace: Trace, call: Call) -> list[Call]:
    """x[k::n] -> x viewed as (..., n) and of that dim k only: the dim before it can be cut."""
    x, dim, step = call.args[0], call.argument(1, "dim", 0), call.argument(4, "step", 1)
    shape, given = trace.specs[x.name].shape, trace.specs[call.outputs[0]]
    dim, first = dim % len(shape), call.argument(2, "start") or 0
    if step == 1 or shape[dim] % step or not 0 <= first < step or given.shape[dim] != shape[dim] // step:
        return [call]
    steps = Steps(trace, call)
    apart = steps.add("view.default", x, (*shape[:dim], shape[dim] // step, step, *shape[dim + 1 :]))
    picked = steps.add("slice.Tensor", apart, dim + 1, first, first + 1)
    steps.add("view.default", picked, given.shape, out=call.outputs[0])
    return steps.calls


def masked_put(trace: Trace, call: Call) -> list[Call]:
    """x[mask] = value, where the value does not depend on the place in the mask -> where(mask, value, x)."""
    x, indices, value = call.args[:3]
    mask, shape = indices[0], trace.specs[x.name].shape
    is_mask = len(indices) == 1 and trace.specs[mask.name].dtype == torch.bool
    ones = len(shape) - len(trace.specs[mask.name].shape) if is_mask else 0
    if not is_mask or call.argument(3, "accumulate") or len(trace.specs[value.name].shape) > ones:
        return [call]
    steps = Steps(trace, call)
    if ones:
        mask = steps.add("view.default", mask, (*trace.specs[mask.name].shape, *[1] * ones), word="mask")
    steps.add("where.self", mask, value, x, out=call.outputs[0])
    return steps.calls


def bernoulli(trace: Trace, call: Call) -> list[Call]:
    """bernoulli(p) -> uniform < p, in the dtype of the result."""
    steps, spec = Steps(trace, call), trace.specs[call.outputs[0]]
    drawn = steps.add("ss.uniform", spec.shape, spec=Spec(spec.shape, torch.float32))
    compare, p = ("lt.Scalar", call.args[1]) if call.target == "aten.bernoulli.p" else ("lt.Tensor", call.args[0])
    below = steps.add(compare, drawn, p)
    steps.add("_to_copy.default", below, out=call.outputs[0], dtype=spec.dtype)
    draw, *between, cast = steps.calls
    # The numbers are drawn by the name of the call.
    return [replace(draw, name=call.name), *between, replace(cast, name=draw.name)]


def batch_norm(trace: Trace, call: Call) -> list[Call]:
    """Batch normalization by the statistics of the whole batch, and the running ones as torch updates them.

    functional(x, weight, bias, mean, variance, training, momentum, eps) -> result, _, _, new mean, new variance
    """
    args = call.args[:8] if call.target == "aten.batch_norm.default" else call.args
    x, weight, bias, *running, is_training, momentum, eps = args
    if not is_training:
        return [call]
    steps, narrow = Steps(trace, call), trace.specs[x.name]
    dtype, channels = torch.promote_types(narrow.dtype, torch.float32), narrow.shape[1]
    others = tuple(d for d in range(len(narrow.shape)) if d != 1)
    wide = x if narrow.dtype == dtype else steps.add("_to_copy.default", x, dtype=dtype)
    mean = steps.add("mean.dim", wide, others, True)
    centered = steps.add("sub.Tensor", wide, mean)
    variance = steps.add("mean.dim", steps.add("mul.Tensor", centered, centered), others, True)
    scale = steps.add("rsqrt.default", steps.add("add.Tensor", variance, eps))
    result = steps.add("mul.Tensor", centered, scale)
    for name, parameter in (("mul.Tensor", weight), ("add.Tensor", bias)):
        if parameter is not None:
            aligned = steps.add("view.default", parameter, (channels, *[1] * (len(others) - 1)))
            result = steps.add(name, result, aligned)
    if narrow.dtype != dtype:
        steps.add("_to_copy.default", result, dtype=narrow.dtype)
    trace.specs[call.outputs[0]] = narrow
    steps.calls[-1] = replace(steps.calls[-1], name=call.name, outputs=call.outputs[:1])
    count = prod(narrow.shape) / channels
    both = (mean, 1.0), (variance, count / max(count - 1, 1))
    # Without running statistics there are no results beside the first.
    for old, (new, unbiased), out in zip(running, both, call.outputs[3:], strict=False):
        fresh = steps.add("mul.Tensor", steps.add("view.default", new, (channels,)), momentum * unbiased)
        steps.add("add.Tensor", steps.add("mul.Tensor", old, 1.0 - momentum), fresh, out=out)
    return steps.calls
