"""Rewrite calls until each has a rule with one meaning: no aliases, no fused biases, no hidden means, no dead code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from superscaler.errors import CaptureError
from superscaler.frontend.fold import compact, kind_of_mask, rename
from superscaler.frontend.trace import Call, Spec, Trace, Var

# A rewrite returns the calls to run instead, or the name of the tensor that the result equals.
Rewrite = Callable[[Trace, Call], list[Call] | str]
_MEAN, _SUM = 1, 2


def normalize(trace: Trace) -> None:
    """Apply the rewrites in order, then drop what the loss does not depend on."""
    remove_dead(trace)
    same: dict[str, str] = {}
    calls: list[Call] = []
    for old in _spread(trace):
        call = rename(old, same)
        result = _rewrite(trace, call)
        if isinstance(result, str):
            same[call.outputs[0]] = result
        else:
            calls += result
    trace.calls = calls
    trace.loss = same.get(trace.loss, trace.loss)
    remove_dead(trace)
    _refuse_random(trace)


def _spread(trace: Trace) -> Iterator[Call]:
    """Yield the calls, with one expansion per operand instead of `broadcast_tensors`."""
    for call in trace.calls:
        if call.target != "aten.broadcast_tensors.default":
            yield call
            continue
        for output, operand in zip(call.outputs, call.args[0], strict=True):
            args = (operand, trace.specs[output].shape)
            yield replace(call, name=output, target="aten.expand.default", args=args, outputs=(output,))


def remove_dead(trace: Trace) -> None:
    """Drop calls, inputs and constants that the loss does not depend on. Parameters stay, read or not."""
    live = {trace.loss}
    calls = []
    for call in reversed(trace.calls):
        if live.intersection(call.outputs):
            live.update(call.reads())
            calls.append(call)
    trace.calls = calls[::-1]
    for name in [n for n, kind in trace.kinds.items() if kind in ("constant", "buffer") and n not in live]:
        del trace.kinds[name], trace.specs[name]
        trace.values.pop(name, None)


def _refuse_random(trace: Trace) -> None:
    for call in trace.calls:
        if call.function is not None and torch.Tag.nondeterministic_seeded in call.function.tags:
            raise CaptureError(
                f"{call.source or call.module or 'the model'} draws random numbers by {call.target}, and devices would "
                "draw different ones; only dropout is supported: use torch.nn.functional.dropout, or set its rate to 0."
            )


def _rewrite(trace: Trace, call: Call) -> list[Call] | str:
    rewrite = TABLE.get(call.target)
    if rewrite is not None:
        return rewrite(trace, call)
    return _keep(trace, call)


def _keep(trace: Trace, call: Call) -> list[Call] | str:
    del trace
    return [call]


def _input(call: Call) -> str:
    """Return the tensor that a call with one main operand works on."""
    name: str = call.args[0].name
    return name


def _alias(trace: Trace, call: Call) -> str:
    del trace
    return _input(call)


def _alias_if_equal(trace: Trace, call: Call) -> list[Call] | str:
    """Drop views and casts that change neither shape nor dtype."""
    if trace.specs[_input(call)] == trace.specs[call.outputs[0]]:
        return _input(call)
    return [call]


def _synonym(trace: Trace, call: Call) -> list[Call]:
    """Call an operator that has two names by the one that has rules."""
    del trace
    _, name, overload = call.target.split(".")
    return [replace(call, target=f"aten.{_SYNONYMS[name]}.{overload}")]


def _cast_like(trace: Trace, call: Call) -> list[Call] | str:
    """`type_as` reads nothing of the tensor whose dtype it takes."""
    cast = {"dtype": trace.specs[call.outputs[0]].dtype}
    call = replace(call, target="aten._to_copy.default", args=call.args[:1], kwargs=cast)
    return _alias_if_equal(trace, call)


def _copy(trace: Trace, call: Call) -> list[Call] | str:
    """`copy(old, new)` is new, in the shape and dtype of old."""
    source, result = call.args[1].name, trace.specs[call.outputs[0]]
    if trace.specs[source] == result:
        return str(source)
    cast = {"dtype": result.dtype}
    if trace.specs[source].shape == result.shape:
        return [replace(call, target="aten._to_copy.default", args=(call.args[1],), kwargs=cast)]
    if trace.specs[source].dtype == result.dtype:
        return [replace(call, target="aten.expand.default", args=(call.args[1], result.shape), kwargs={})]
    return [call]


def _reshape(trace: Trace, call: Call) -> list[Call] | str:
    """`squeeze` and its like drop whatever has size 1, which in a part may be more: say the shape."""
    if isinstance(kept := _alias_if_equal(trace, call), str):
        return kept
    shape = trace.specs[call.outputs[0]].shape
    return [replace(call, target="aten.view.default", args=(call.args[0], shape), kwargs={})]


def _concatenate(trace: Trace, call: Call) -> list[Call] | str:
    """Leave out operands without elements, such as the rest of a rotary embedding over all of a head."""
    operands = tuple(v for v in call.args[0] if 0 not in trace.specs[v.name].shape)
    if len(operands) == 1 and trace.specs[operands[0].name] == trace.specs[call.outputs[0]]:
        return str(operands[0].name)
    return [replace(call, args=(operands, *call.args[1:]))] if operands else [call]


def _where(trace: Trace, call: Call) -> list[Call] | str:
    """A choice that a constant makes for all elements is no choice."""
    condition, *options = call.args
    known = trace.values.get(condition.name) if trace.kinds.get(condition.name) == "constant" else None
    if known is None or compact(known).numel() != 1:
        return [call]
    chosen, result = options[0 if bool(compact(known)) else 1], trace.specs[call.outputs[0]]
    if not isinstance(chosen, Var) or trace.specs[chosen.name].dtype != result.dtype:
        return [call]
    args = (chosen, result.shape)
    return _alias_if_equal(trace, replace(call, target="aten.expand.default", args=args, kwargs={}))


def _lookup(trace: Trace, call: Call) -> list[Call]:
    """x[rows, columns] with constants that name every row and column once, in order (as masks are read), is a view."""
    operand, indices = call.args[0], call.args[1]
    known = [trace.values.get(v.name) for v in indices if isinstance(v, Var) and trace.kinds.get(v.name) == "constant"]
    shape = trace.specs[operand.name].shape
    if len(known) != len(shape) or len(indices) != len(shape):
        return [call]
    last = -len(trace.specs[call.outputs[0]].shape) - 1
    for value, size in zip(known, shape, strict=True):
        assert value is not None
        at = next((d for d in range(-value.dim(), 0) if value.shape[d] > 1), last + 1)
        if value.numel() != size or at <= last or value.flatten().tolist() != list(range(size)):
            return [call]
        last = at
    return [replace(call, target="aten.view.default", args=(operand, trace.specs[call.outputs[0]].shape))]


def _linear(trace: Trace, call: Call) -> list[Call]:
    """linear(x, w, b) -> add(linear(x, w), b): a bias is added once, however the product is cut."""
    x, weight, bias = call.args[0], call.args[1], call.argument(2, "bias")
    if bias is None:
        return [replace(call, args=(x, weight), kwargs={})]
    return _product_and_bias(trace, call, "aten.linear.default", (x, weight), bias)


def _addmm(trace: Trace, call: Call) -> list[Call]:
    """addmm(b, x, w) -> add(mm(x, w), b), each scaled where the call says so; baddbmm likewise."""
    bias, x, weight = call.args[:3]
    target = "aten.bmm.default" if call.target == "aten.baddbmm.default" else "aten.mm.default"
    product, total = _product_and_bias(trace, call, target, (x, weight), bias)
    scaled = []
    terms = []
    for term, word in zip(total.args, ("alpha", "beta"), strict=True):
        factor = call.kwargs.get(word, 1)
        if factor != 1:
            name = trace.derive(call.name, word)
            trace.specs[name] = trace.specs[term.name]
            args = (term, factor)
            scaled.append(replace(call, name=name, target="aten.mul.Tensor", args=args, kwargs={}, outputs=(name,)))
            term = Var(name)
        terms.append(term)
    return [product, *scaled, replace(total, args=tuple(terms))]


def _product_and_bias(trace: Trace, call: Call, target: str, args: tuple[Any, ...], bias: Var) -> list[Call]:
    product = trace.derive(call.name, "product")
    trace.specs[product] = trace.specs[call.outputs[0]]
    first = replace(call, name=product, target=target, args=args, kwargs={}, outputs=(product,))
    return [first, replace(call, target="aten.add.Tensor", args=(Var(product), bias), kwargs={})]


def _dropout(trace: Trace, call: Call) -> list[Call] | str:
    x, p, is_training = call.args[0], call.args[1], call.argument(2, "train", True)
    if not p or is_training is False:
        return _input(call)
    result = call.outputs[0]
    trace.specs[result] = trace.specs[x.name]
    call = replace(call, target="ss.dropout", function=None, args=(x, float(p)), kwargs={}, outputs=(result,))
    return [call]


def _attention(trace: Trace, call: Call) -> list[Call]:
    """Say a constant causal mask as `is_causal`; write the arguments of attention in one order."""
    q, k, v = call.args[:3]
    mask, p = call.argument(3, "attn_mask"), call.argument(4, "dropout_p", 0.0)
    causal, scale = bool(call.argument(5, "is_causal", False)), call.kwargs.get("scale")
    if not causal and (kind := _mask(trace, mask)):
        causal, mask = kind == "causal", None
    if p:
        args = (q, k, v, mask, float(p), causal, scale)
        return [replace(call, target="ss.attention_dropout", function=None, args=args, kwargs={})]
    options = {"scale": scale, "enable_gqa": call.kwargs.get("enable_gqa") or None}
    kwargs = {name: value for name, value in options.items() if value is not None}
    return [replace(call, function=None, args=(q, k, v, mask, 0.0, causal), kwargs=kwargs)]


def _mask(trace: Trace, mask: Var | None) -> str:
    """Return the kind of a constant mask, found once although every layer reads it."""
    if mask is None or trace.kinds.get(mask.name) != "constant" or mask.name not in trace.values:
        return ""
    if mask.name not in trace.masks:
        trace.masks[mask.name] = kind_of_mask(trace.values[mask.name])
    return trace.masks[mask.name]


def _cross_entropy(trace: Trace, call: Call) -> list[Call]:
    """A mean over the labels that count -> their count, and the sum over it: exact however the labels are cut."""
    logits, labels = call.args[:2]
    weight, reduction = call.argument(2, "weight"), call.argument(3, "reduction", _MEAN)
    ignore, smoothing = call.argument(4, "ignore_index", -100), call.argument(5, "label_smoothing", 0.0)
    classes = trace.specs[labels.name].dtype.is_floating_point
    if weight is not None or smoothing or classes or reduction != _MEAN or len(trace.specs[logits.name].shape) < 2:
        return [call]
    count = trace.derive(call.name, "count")
    # Half precision cannot count beyond 256 (bfloat16) or 2048 (float16).
    dtype = torch.promote_types(trace.specs[logits.name].dtype, torch.float32)
    trace.specs[count] = trace.specs[call.outputs[0]] = Spec((), dtype)
    call = replace(call, function=None, kwargs={})
    first = replace(call, name=count, target="ss.count_labels", args=(labels, ignore), outputs=(count,))
    args = (logits, labels, Var(count), ignore)
    return [first, replace(call, target="ss.cross_entropy", args=args)]


def _mean_of_losses(trace: Trace, call: Call) -> list[Call]:
    """A mean loss without a rule of its own -> the losses of the elements, and their mean."""
    parameters = [a.name for a in call.function._schema.arguments]
    position = parameters.index("reduction")
    if call.argument(position, "reduction", _MEAN) != _MEAN:
        return [call]
    args = (*call.args[:position], *([0] if position < len(call.args) else []), *call.args[position + 1 :])
    kwargs = call.kwargs if position < len(call.args) else {**call.kwargs, "reduction": 0}
    losses = trace.derive(call.name, "losses")
    shape = torch.broadcast_shapes(*(trace.specs[name].shape for name in call.reads()))
    trace.specs[losses] = Spec(tuple(shape), trace.specs[call.outputs[0]].dtype)
    first = replace(call, name=losses, args=args, kwargs=kwargs, outputs=(losses,))
    return [first, replace(call, target="aten.mean.default", args=(Var(losses),), kwargs={})]


def _names(*names: str) -> tuple[str, ...]:
    return tuple(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names)


_SYNONYMS = {
    "absolute": "abs", "clip": "clamp", "divide": "div", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "multiply": "mul", "negative": "neg", "not_equal": "ne", "subtract": "sub",
    "true_divide": "div",
}  # fmt: skip

TABLE: Mapping[str, Rewrite] = {
    **{f"aten.{name}.{kind}": _synonym for name in _SYNONYMS for kind in ("default", "Tensor", "Scalar")},
    "aten.type_as.default": _cast_like,
    **dict.fromkeys(_names("alias", "clone", "contiguous", "lift_fresh_copy", "lift_fresh"), _alias),
    **dict.fromkeys(
        _names("_to_copy", "view", "reshape", "_unsafe_view", "expand", "slice.Tensor", "unsqueeze"), _alias_if_equal
    ),
    **dict.fromkeys(
        _names("squeeze", "squeeze.dim", "squeeze.dims", "flatten.using_ints", "unflatten.int", "view_as"), _reshape
    ),
    "aten.copy.default": _copy,
    "aten.cat.default": _concatenate,
    "aten.index.Tensor": _lookup,
    **dict.fromkeys(_names("where.self", "where.ScalarOther", "where.ScalarSelf"), _where),
    "aten.linear.default": _linear,
    **dict.fromkeys(_names("addmm", "baddbmm"), _addmm),
    "aten.native_dropout.default": _dropout,
    "aten.dropout.default": _dropout,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.cross_entropy_loss.default": _cross_entropy,
    **dict.fromkeys(
        _names("l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
        _mean_of_losses,
    ),
    **dict.fromkeys(
        _names("binary_cross_entropy", "binary_cross_entropy_with_logits"),
        _mean_of_losses,
    ),
}
