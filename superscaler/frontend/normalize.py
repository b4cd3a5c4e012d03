"""Rewrite calls until each has a rule with one meaning: no aliases, no fused biases, no hidden means, no dead code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx import Node

from superscaler.errors import CaptureError
from superscaler.frontend import decompose, ours
from superscaler.frontend.constants import compact, kind_of_mask
from superscaler.frontend.trace import (
    Steps,
    Trace,
    argument,
    dtype_of,
    outputs,
    place_of,
    reads,
    shape_of,
    target_of,
)
from superscaler.ops.row import aten

_ATEN = torch.ops.aten
_PRODUCTS = aten(True, "linear mm bmm matmul mv scaled_dot_product_attention")
# A rewrite is called with the arguments of a call, and returns what its readers read instead: of several results, the
# first ones. None leaves the call as it is by then.
Rewrite = Callable[..., Node | Sequence[Node | None] | None]


def normalize(trace: Trace) -> None:
    """Apply the rewrites in order, then drop what no result depends on."""
    remove_dead(trace)
    for node in trace.calls():
        rewrite, steps = TABLE.get(target_of(node)), Steps(trace, node)
        found = rewrite(steps, *node.args, **node.kwargs) if rewrite else None
        if found is not None:
            steps.finish(*([found] if isinstance(found, Node) else found))
    remove_dead(trace)
    _refuse_random(trace)
    _refuse_frequencies(trace)
    _refuse_complex(trace)
    _refuse_mixed(trace)


def remove_dead(trace: Trace) -> None:
    """Drop calls, buffers and constants that no result depends on. Parameters and inputs stay, read or not."""
    for node in reversed(trace.calls()):
        if not any(result.users for result in outputs(node)):
            trace.replace(node)
    for leaf in trace.leaves("constant", "buffer"):
        if not leaf.users and leaf.name not in trace.writes:
            trace.graph.erase_node(leaf)
            trace.values.pop(leaf.name, None)


def _refuse_random(trace: Trace) -> None:
    for node in trace.calls():
        if _is_random(node):
            raise CaptureError(
                f"{place_of(node)} draws random numbers by {node.target}, and devices would "
                "draw different ones; use dropout, rand, randn or bernoulli, or draw it outside and pass it in."
            )


def _refuse_frequencies(trace: Trace) -> None:
    """Raise CaptureError for gradients divided by how often the whole batch has a row, which no part of it knows."""
    for node in trace.calls():
        if target_of(node) == "aten.embedding.default" and argument(node, 3, "scale_grad_by_freq"):
            raise CaptureError(
                f"{place_of(node)} looks rows up with scale_grad_by_freq=True, which is not supported; leave it out or "
                "count the rows in the model and scale by that."
            )


def _is_random(node: Node) -> bool:
    """Tell whether an operator draws numbers; recurrent layers and their like draw only where they drop something."""
    operator: Any = node.target
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    names = [a.name for a in operator._schema.arguments]
    rates = [argument(node, k, name) for k, name in enumerate(names) if name in ("dropout", "dropout_p")]
    return not rates or any(rates)


def _refuse_complex(trace: Trace) -> None:
    """Raise CaptureError for complex tensors, through which no gradient is tracked."""
    calls = trace.calls()
    for node in [*(leaf for leaf in trace.leaves() if leaf.users), *(x for call in calls for x in outputs(call))]:
        if dtype_of(node).is_complex:
            raise CaptureError(
                f"{place_of(node)} has {node.name} in complex numbers, which are not supported; compute "
                "with real ones (torch.view_as_real holds both parts in a last dim of 2)."
            )


def _refuse_mixed(trace: Trace) -> None:
    """Raise CaptureError for products of different floating dtypes, which the tensors without data of export allow."""
    for node in trace.calls():
        dtypes = {str(d).removeprefix("torch.") for d in map(dtype_of, reads(node)) if d.is_floating_point}
        if len(dtypes) > 1 and target_of(node) in _PRODUCTS:
            raise CaptureError(
                f"{place_of(node)} multiplies tensors of {' and '.join(sorted(dtypes))} "
                f"({node.target}); torch wants one dtype: cast one of them, or capture with autocast."
            )


def _alias(do: Steps, x: Node, *_: Any, **__: Any) -> Node:
    return x


def _alias_if_equal(do: Steps, x: Node, *_: Any, **__: Any) -> Node | None:
    """Drop views and casts that change neither shape nor dtype."""
    return x if shape_of(x) == shape_of(do.node) and dtype_of(x) == dtype_of(do.node) else None


def _slice(do: Steps, x: Node, *bounds: Any, **named: Any) -> Node | None:
    return _alias_if_equal(do, x) or decompose.strided(do, x, *bounds, **named)


def _copy(do: Steps, old: Node, new: Node, non_blocking: bool = False) -> Node:
    """`copy(old, new)` is new, in the shape and dtype of old."""
    wanted = do.node
    if dtype_of(new) != dtype_of(wanted):
        new = do(_ATEN._to_copy.default, new, dtype=dtype_of(wanted), word="cast")
    return new if shape_of(new) == shape_of(wanted) else do(_ATEN.expand.default, new, shape_of(wanted))


def _reshape(do: Steps, x: Node, *_: Any, **__: Any) -> Node:
    """`squeeze` and its like drop whatever has size 1, which in a part may be more: say the shape."""
    return _alias_if_equal(do, x) or do(_ATEN.view.default, x, shape_of(do.node))


def _concatenate(do: Steps, operands: Sequence[Node], *dim: Any, **named: Any) -> Node | None:
    """Leave out operands without elements, such as the rest of a rotary embedding over all of a head."""
    full = [x for x in operands if 0 not in shape_of(x)]
    if len(full) == 1 and _alias_if_equal(do, full[0]):
        return full[0]
    do.node.args = (full or operands, *dim)
    return None


def _where(do: Steps, condition: Node, *options: Any) -> Node | None:
    """A choice that a constant makes for all elements is no choice."""
    known = do.trace.constant(condition)
    if known is None or compact(known).numel() != 1:
        return None
    chosen = options[0 if bool(compact(known)) else 1]
    if not isinstance(chosen, Node) or dtype_of(chosen) != dtype_of(do.node):
        return None
    return _alias_if_equal(do, chosen) or do(_ATEN.expand.default, chosen, shape_of(do.node))


def _lookup(do: Steps, x: Node, indices: Sequence[Node | None]) -> Node | None:
    """x[rows, columns] with constants that name every row and column once, in order (as masks are read), is a view.

    x[..., [2, 3]] is a slice.
    """
    known = [value for v in indices if (value := do.trace.constant(v)) is not None]
    shape = shape_of(x)
    if len(known) == 1 and sum(v is not None for v in indices) == 1 and known[0].dim() == 1:
        dim = next(d for d, v in enumerate(indices) if v is not None)
        rows = [row % shape[dim] for row in known[0].tolist()] if known[0].dtype == torch.int64 else []
        if rows and rows == list(range(rows[0], rows[0] + len(rows))):
            return do(_ATEN.slice.Tensor, x, dim, rows[0], rows[-1] + 1)
    if len(known) != len(shape) or len(indices) != len(shape):
        return None
    last = -len(shape_of(do.node)) - 1
    for value, size in zip(known, shape, strict=True):
        at = next((d for d in range(-value.dim(), 0) if value.shape[d] > 1), last + 1)
        if value.numel() != size or at <= last or value.flatten().tolist() != list(range(size)):
            return None
        last = at
    return do(_ATEN.view.default, x, shape_of(do.node))


def _dropout(do: Steps, x: Node, p: float, train: bool | None = True) -> Node:
    return x if not p or train is False else do(ours.dropout, x, float(p))


def _attention(
    do: Steps,
    query: Node,
    key: Node,
    value: Node,
    attn_mask: Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> None:
    """Say a constant causal mask as `is_causal`; write the arguments of attention in one order."""
    if not is_causal and (kind := _mask(do.trace, attn_mask)):
        is_causal, attn_mask = kind == "causal", None
    args = (query, key, value, attn_mask, float(dropout_p), bool(is_causal))
    named = {"scale": scale, "enable_gqa": enable_gqa or None}
    if dropout_p:
        do.becomes(ours.attention_dropout, *args, scale)
    else:
        function = _ATEN.scaled_dot_product_attention.default
        do.becomes(function, *args, **{n: v for n, v in named.items() if v is not None})


def _mask(trace: Trace, mask: Node | None) -> str:
    """Return the kind of a constant mask, found once although every layer reads it."""
    known = trace.constant(mask)
    if mask is None or known is None:
        return ""
    if "mask" not in mask.meta:
        mask.meta["mask"] = kind_of_mask(known)
    return str(mask.meta["mask"])


def _becomes(function: Callable[..., Any]) -> Rewrite:
    return lambda do, *args, **kwargs: do.becomes(function, *args, **kwargs)


def _draws(function: Callable[..., Any]) -> Rewrite:
    """Return the rewrite of operators that draw a tensor of random numbers from nothing."""
    return lambda do, *_, **__: do.becomes(function, shape_of(do.node))


def _eval_norm(do: Steps, *args: Any) -> Node:
    """A batch norm with given statistics, without the empty results beside it."""
    return do(_ATEN.batch_norm.default, *args[:5], False, *args[5:], False)


TABLE: Mapping[str, Rewrite] = {
    **aten(_alias, "alias clone lift_fresh_copy lift_fresh"),
    **aten(_alias_if_equal, "_to_copy view _unsafe_view expand unsqueeze"),
    "aten.slice.Tensor": _slice,
    **aten(_reshape, "squeeze squeeze.dim squeeze.dims"),
    "aten.copy.default": _copy,
    "aten.cat.default": _concatenate,
    "aten.index.Tensor": _lookup,
    **aten(_where, "where.self where.ScalarOther where.ScalarSelf"),
    "aten.linear.default": decompose.linear,
    "aten.addmm.default": decompose.added(_ATEN.mm.default),
    "aten.baddbmm.default": decompose.added(_ATEN.bmm.default),
    "aten.addmv.default": decompose.added(_ATEN.mv.default),
    "aten.addr.default": decompose.added(_ATEN.outer.default),
    # Not every device has it for every dtype: the runtime has its own.
    "aten.histc.default": _becomes(ours.histc),
    **aten(decompose.batch_norm, "batch_norm _native_batch_norm_legit_functional _native_batch_norm_legit.no_stats"),
    **aten(_draws(ours.uniform), "rand rand_like"),
    **aten(_draws(ours.normal), "randn randn_like"),
    **aten(decompose.bernoulli, "bernoulli bernoulli.p"),
    **aten(_dropout, "dropout native_dropout"),
    "aten.scaled_dot_product_attention.default": _attention,
    **aten(decompose.cross_entropy, "cross_entropy_loss nll_loss_nd"),
    "aten._native_batch_norm_legit_no_training.default": _eval_norm,
    "aten.index_put.default": decompose.masked_put,
    **aten(decompose.mean_of_losses, "l1_loss smooth_l1_loss huber_loss soft_margin_loss"),
    **aten(decompose.mean_of_losses, "binary_cross_entropy binary_cross_entropy_with_logits"),
}
