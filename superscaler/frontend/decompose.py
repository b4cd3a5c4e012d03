"""Operators that become several, each with a rule: what they couple is then a sum, exact however it is cut."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from superscaler.frontend.trace import Call, Spec, Trace, Var


class Steps:
    """The calls that a call becomes, in order, named after it."""

    def __init__(self, trace: Trace, call: Call) -> None:
        self.trace = trace
        self.call = replace(call, function=None, kwargs={})
        self.calls: list[Call] = []

    def add(self, name: str, args: tuple[Any, ...], spec: Spec, out: str = "", **kwargs: Any) -> Var:
        """Append a call of an ATen operator (or `ss.` one of ours) that makes `out`, a new tensor by default."""
        word = name.removeprefix("ss.").split(".")[0].strip("_")
        result = out or self.trace.derive(self.call.name, word)
        self.trace.specs[result] = spec
        target = name if name.startswith("ss.") else f"aten.{name}"
        # The first keeps the call's name, by which random numbers are drawn.
        own = self.call.name if not self.calls else self.trace.derive(self.call.name, "result") if out else result
        self.calls.append(replace(self.call, name=own, target=target, args=args, kwargs=kwargs, outputs=(result,)))
        return Var(result)

    def rename_last(self, out: str) -> None:
        """Let the last call make `out`."""
        self.trace.specs[out] = self.trace.specs[self.calls[-1].outputs[0]]
        self.calls[-1] = replace(self.calls[-1], outputs=(out,))


def bernoulli(trace: Trace, call: Call) -> list[Call]:
    """bernoulli(p) -> uniform < p, in the dtype of the result."""
    steps, spec = Steps(trace, call), trace.specs[call.outputs[0]]
    drawn = steps.add("ss.uniform", (spec.shape,), Spec(spec.shape, torch.float32))
    compare, p = ("lt.Scalar", call.args[1]) if call.target == "aten.bernoulli.p" else ("lt.Tensor", call.args[0])
    below = steps.add(compare, (drawn, p), Spec(spec.shape, torch.bool))
    steps.add("_to_copy.default", (below,), spec, call.outputs[0], dtype=spec.dtype)
    return steps.calls


def batch_norm(trace: Trace, call: Call) -> list[Call]:
    """Batch normalization by the statistics of the whole batch, and the running ones as torch updates them.

    functional(x, weight, bias, mean, variance, training, momentum, eps) -> result, _, _, new mean, new variance
    """
    args = call.args[:8] if call.target == "aten.batch_norm.default" else call.args
    x, weight, bias, *running, is_training, momentum, eps = args
    if not is_training:
        return [call]
    steps, narrow = Steps(trace, call), trace.specs[x.name]
    spec = Spec(narrow.shape, torch.promote_types(narrow.dtype, torch.float32))
    channels, others = spec.shape[1], tuple(d for d in range(len(spec.shape)) if d != 1)
    row, column = Spec((channels,), spec.dtype), Spec((channels, *[1] * (len(others) - 1)), spec.dtype)
    kept = Spec((1, *column.shape), spec.dtype)
    wide = x if narrow == spec else steps.add("_to_copy.default", (x,), spec, dtype=spec.dtype)
    mean = steps.add("mean.dim", (wide, others, True), kept)
    centered = steps.add("sub.Tensor", (wide, mean), spec)
    variance = steps.add("mean.dim", (steps.add("mul.Tensor", (centered, centered), spec), others, True), kept)
    scale = steps.add("rsqrt.default", (steps.add("add.Tensor", (variance, eps), kept),), kept)
    result = steps.add("mul.Tensor", (centered, scale), spec)
    for name, parameter in (("mul.Tensor", weight), ("add.Tensor", bias)):
        if parameter is not None:
            aligned = steps.add("view.default", (parameter, column.shape), column)
            result = steps.add(name, (result, aligned), spec)
    if narrow != spec:
        steps.add("_to_copy.default", (result,), narrow, dtype=narrow.dtype)
    steps.rename_last(call.outputs[0])
    count = prod(spec.shape) / channels
    both = (mean, 1.0), (variance, count / max(count - 1, 1))
    # Without running statistics there are no results beside the first.
    for old, (new, unbiased), out in zip(running, both, call.outputs[3:], strict=False):
        fresh = steps.add("mul.Tensor", (steps.add("view.default", (new, row.shape), row), momentum * unbiased), row)
        steps.add("add.Tensor", (steps.add("mul.Tensor", (old, 1.0 - momentum), row), fresh), row, out)
    return steps.calls
