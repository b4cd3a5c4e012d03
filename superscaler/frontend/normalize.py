"""Rewrite calls until each has a rule with one meaning: no aliases, no fused biases, no hidden means, no dead code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from superscaler.errors import CaptureError
from superscaler.frontend import decompose
from superscaler.frontend.constants import compact, kind_of_mask, rename
from superscaler.frontend.trace import Call, Spec, Trace, Var, aten

_PRODUCTS = aten(True, "linear mm bmm matmul mv scaled_dot_product_attention")
# A rewrite returns the calls to run instead, or the name of the tensor that the result equals.
Rewrite = Callable[[Trace, Call], list[Call] | str]


def normalize(trace: Trace) -> None:
    """Apply the rewrites in order, then drop what no result depends on."""
    remove_dead(trace)
    same: dict[str, str] = {}
    calls: list[Call] = []
    for old in _spread(trace):
        call = rename(old, same)
        result = TABLE[call.target](trace, call) if call.target in TABLE else [call]
        if isinstance(result, str):
            same[call.outputs[0]] = result
        else:
            calls += result
    trace.calls = calls
    trace.rename_results(same)
    remove_dead(trace)
    _refuse_random(trace)
    _refuse_complex(trace)
    _refuse_mixed(trace)


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
    """Drop calls, inputs and constants that no result depends on. Parameters stay, read or not."""
    live = {*trace.results, *trace.writes}
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
        if _is_random(call):
            raise CaptureError(
                f"{call.source or call.module or 'the model'} draws random numbers by {call.target}, and devices would "
                "draw different ones; use dropout, rand, randn or bernoulli, or draw it outside and pass it in."
            )


def _is_random(call: Call) -> bool:
    """Tell whether an operator draws numbers; recurrent layers and their like draw only where they drop something."""
    if call.function is None or torch.Tag.nondeterministic_seeded not in call.function.tags:
        return False
    names = [a.name for a in call.function._schema.arguments]
    rates = [call.argument(k, name) for k, name in enumerate(names) if name in ("dropout", "dropout_p")]
    return not rates or any(rates)


def _refuse_complex(trace: Trace) -> None:
    """Raise CaptureError for complex tensors, through which no gradient is tracked."""
    read = {name for call in trace.calls for name in call.reads()}
    places = {name: call.source or call.module for call in trace.calls for name in call.outputs}
    for name in [*(n for n in trace.kinds if n in read), *places]:
        if trace.specs[name].dtype.is_complex:
            raise CaptureError(
                f"{places.get(name) or 'the model'} has {name} in complex numbers, which are not supported; compute "
                "with real ones (torch.view_as_real holds both parts in a last dim of 2)."
            )


def _refuse_mixed(trace: Trace) -> None:
    """Raise CaptureError for products of different floating dtypes, which the tensors without data of export allow."""
    for call in trace.calls:
        specs = [trace.specs[name] for name in call.reads()]
        dtypes = {str(s.dtype).removeprefix("torch.") for s in specs if s.dtype.is_floating_point}
        if call.target in _PRODUCTS and len(dtypes) > 1:
            raise CaptureError(
                f"{call.source or call.module or 'the model'} multiplies tensors of {' and '.join(sorted(dtypes))} "
                f"({call.target}); torch wants one dtype: cast one of them, or capture with autocast."
            )


def _input(call: Call) -> str:
    """Return the tensor that a call with one main operand works on."""
    name: str = call.args[0].name
    return name


def _alias(trace: Trace, call: Call) -> str:
    return _input(call)


def _alias_if_equal(trace: Trace, call: Call) -> list[Call] | str:
    """Drop views and casts that change neither shape nor dtype."""
    if trace.specs[_input(call)] == trace.specs[call.outputs[0]]:
        return _input(call)
    return [call]


def _slice(trace: Trace, call: Call) -> list[Call] | str:
    if isinstance(kept := _alias_if_equal(trace, call), str):
        return kept
    return decompose.strided(trace, call)


def _synonym(trace: Trace, call: Call) -> list[Call]:
    """Call an operator that has two names by the one that has rules."""
    _, name, overload = call.target.split(".")
    return [replace(call, target=f"aten.{_SYNONYMS[name]}.{overload}")]


def _cast_like(trace: Trace, call: Call) -> list[Call] | str:
    """`type_as` reads nothing of the tensor whose dtype it takes."""
    return _alias_if_equal(trace, _cast(trace, call, call.args[0]))


def _copy(trace: Trace, call: Call) -> list[Call] | str:
    """`copy(old, new)` is new, in the shape and dtype of old."""
    source, result = call.args[1], trace.specs[call.outputs[0]]
    given = trace.specs[source.name]
    if given == result:
        return str(source.name)
    if given.shape == result.shape:
        return [_cast(trace, call, source)]
    if given.dtype == result.dtype:
        return [call.becomes("aten.expand.default", source, result.shape)]
    name = trace.derive(call.name, "cast")
    trace.specs[name] = Spec(given.shape, result.dtype)
    cast = replace(_cast(trace, call, source), name=name, outputs=(name,))
    return [cast, call.becomes("aten.expand.default", Var(name), result.shape)]


def _reshape(trace: Trace, call: Call) -> list[Call] | str:
    """`squeeze` and its like drop whatever has size 1, which in a part may be more: say the shape."""
    if isinstance(kept := _alias_if_equal(trace, call), str):
        return kept
    return [call.becomes("aten.view.default", call.args[0], trace.specs[call.outputs[0]].shape)]


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
    return _alias_if_equal(trace, call.becomes("aten.expand.default", chosen, result.shape))


def _lookup(trace: Trace, call: Call) -> list[Call]:
    """x[rows, columns] with constants that name every row and column once, in order (as masks are read), is a view.

    x[..., [2, 3]] is a slice.
    """
    operand, indices = call.args[0], call.args[1]
    known = [trace.values.get(v.name) for v in indices if isinstance(v, Var) and trace.kinds.get(v.name) == "constant"]
    shape = trace.specs[operand.name].shape
    if len(known) == 1 and sum(v is not None for v in indices) == 1 and known[0] is not None and known[0].dim() == 1:
        dim = next(d for d, v in enumerate(indices) if v is not None)
        rows = [row % shape[dim] for row in known[0].tolist()] if known[0].dtype == torch.int64 else []
        if rows and rows == list(range(rows[0], rows[0] + len(rows))):
            return [call.becomes("aten.slice.Tensor", operand, dim, rows[0], rows[-1] + 1)]
    if len(known) != len(shape) or len(indices) != len(shape):
        return [call]
    last = -len(trace.specs[call.outputs[0]].shape) - 1
    for value, size in zip(known, shape, strict=True):
        assert value is not None
        at = next((d for d in range(-value.dim(), 0) if value.shape[d] > 1), last + 1)
        if value.numel() != size or at <= last or value.flatten().tolist() != list(range(size)):
            return [call]
        last = at
    return [call.becomes("aten.view.default", operand, trace.specs[call.outputs[0]].shape)]


def _dropout(trace: Trace, call: Call) -> list[Call] | str:
    x, p, is_training = call.args[0], call.args[1], call.argument(2, "train", True)
    if not p or is_training is False:
        return _input(call)
    result = call.outputs[0]
    trace.specs[result] = trace.specs[x.name]
    return [replace(call.becomes("ss.dropout", x, float(p)), outputs=(result,))]


def _attention(trace: Trace, call: Call) -> list[Call]:
    """Say a constant causal mask as `is_causal`; write the arguments of attention in one order."""
    q, k, v = call.args[:3]
    mask, p = call.argument(3, "attn_mask"), call.argument(4, "dropout_p", 0.0)
    causal, scale = bool(call.argument(5, "is_causal", False)), call.kwargs.get("scale")
    if not causal and (kind := _mask(trace, mask)):
        causal, mask = kind == "causal", None
    if p:
        return [call.becomes("ss.attention_dropout", q, k, v, mask, float(p), causal, scale)]
    options = {"scale": scale, "enable_gqa": call.kwargs.get("enable_gqa") or None}
    kwargs = {name: value for name, value in options.items() if value is not None}
    return [call.becomes(call.target, q, k, v, mask, 0.0, causal, **kwargs)]


def _mask(trace: Trace, mask: Var | None) -> str:
    """Return the kind of a constant mask, found once although every layer reads it."""
    if mask is None or trace.kinds.get(mask.name) != "constant" or mask.name not in trace.values:
        return ""
    if mask.name not in trace.masks:
        trace.masks[mask.name] = kind_of_mask(trace.values[mask.name])
    return trace.masks[mask.name]


def _cast(trace: Trace, call: Call, source: Var) -> Call:
    """Return the call that makes the result of `call` of another tensor by a change of dtype."""
    return call.becomes("aten._to_copy.default", source, dtype=trace.specs[call.outputs[0]].dtype)


def _ours(trace: Trace, call: Call) -> list[Call]:
    """An operator that capture put there, or that not every device has for every dtype: the runtime has its own."""
    return [call.becomes(f"ss.{call.target.split('.')[1]}", *call.args, **call.kwargs)]


def _random(distribution: str) -> Rewrite:
    """Return the rewrite of operators that draw a tensor of random numbers from nothing."""

    def rewrite(trace: Trace, call: Call) -> list[Call]:
        return [call.becomes(f"ss.{distribution}", trace.specs[call.outputs[0]].shape)]

    return rewrite


def _eval_norm(trace: Trace, call: Call) -> list[Call]:
    """A batch norm with given statistics, without the empty results beside it."""
    made = call.becomes("aten.batch_norm.default", *call.args[:5], False, *call.args[5:], False, **call.kwargs)
    return [replace(made, outputs=call.outputs[:1])]


_SYNONYMS = {
    "absolute": "abs", "clip": "clamp", "divide": "div", "greater": "gt", "greater_equal": "ge", "less": "lt",
    "less_equal": "le", "multiply": "mul", "negative": "neg", "not_equal": "ne", "subtract": "sub",
    "true_divide": "div",
}  # fmt: skip

TABLE: Mapping[str, Rewrite] = {
    **{f"aten.{name}.{kind}": _synonym for name in _SYNONYMS for kind in ("default", "Tensor", "Scalar")},
    "aten.type_as.default": _cast_like,
    **aten(_alias, "alias clone contiguous lift_fresh_copy lift_fresh"),
    **aten(_alias_if_equal, "_to_copy view reshape _unsafe_view expand unsqueeze"),
    "aten.slice.Tensor": _slice,
    **aten(_reshape, "squeeze squeeze.dim squeeze.dims flatten.using_ints unflatten.int view_as"),
    "aten.copy.default": _copy,
    "aten.cat.default": _concatenate,
    "aten.index.Tensor": _lookup,
    **aten(_where, "where.self where.ScalarOther where.ScalarSelf"),
    "aten.linear.default": decompose.linear,
    **aten(decompose.added_product, "addmm baddbmm addmv addr"),
    "superscaler.experts.default": _ours,
    "aten.histc.default": _ours,
    **aten(decompose.batch_norm, "batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit.no_stats"),
    **aten(_random("uniform"), "rand rand_like"),
    **aten(_random("normal"), "randn randn_like"),
    **aten(decompose.bernoulli, "bernoulli bernoulli.p"),
    **aten(_dropout, "dropout native_dropout"),
    "aten.scaled_dot_product_attention.default": _attention,
    **aten(decompose.cross_entropy, "cross_entropy_loss nll_loss_nd"),
    "aten._native_batch_norm_legit_no_training.default": _eval_norm,
    "aten.index_put.default": decompose.masked_put,
    **aten(decompose.mean_of_losses, "l1_loss smooth_l1_loss huber_loss soft_margin_loss kl_div poisson_nll_loss"),
    **aten(decompose.mean_of_losses, "binary_cross_entropy binary_cross_entropy_with_logits"),
    **aten(decompose.mean_of_losses, "hinge_embedding_loss margin_ranking_loss"),
}
