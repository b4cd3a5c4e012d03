"""Simplifications by the values of constants: choices, lookups of rows in order, and causal masks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from superscaler.frontend.base.trace import Trace, dtype_of, shape_of, target_of
from superscaler.frontend.rewrites import custom_ops as ours
from superscaler.frontend.rewrites.constants import compact
from superscaler.frontend.rewrites.decompositions import expanded
from superscaler.frontend.rewrites.documents import DocumentMask, document_mask
from superscaler.ops.row import aten

_ATEN = torch.ops.aten


def simplify(trace: Trace) -> None:
    """Simplify calls by the values of their constants."""
    for node in trace.calls():
        if target_of(node) in _SIMPLER:
            _SIMPLER[target_of(node)](trace, node, *node.args, **node.kwargs)


def _where(trace: Trace, node: Node, condition: Node, *options: Any) -> None:
    """Remove a choice that a constant makes for all elements."""
    known = trace.constant(condition)
    if known is not None and compact(known).numel() == 1:
        chosen = options[0 if bool(compact(known)) else 1]
        if isinstance(chosen, Node) and dtype_of(chosen) == dtype_of(node):
            trace.rewrite(node, expanded, chosen, shape_of(node))


def _lookup(trace: Trace, node: Node, x: Node, indices: Sequence[Node | None]) -> None:
    """x[rows, columns] with constants that name every row and column once, in order (as masks are read), is a view.

    x[..., [2, 3]] is a slice, and x[arange(b), i] a gather, which can be cut on b.
    """
    known = [value for v in indices if (value := trace.constant(v)) is not None]
    shape = shape_of(x)
    if len(known) == 1 and sum(v is not None for v in indices) == 1 and known[0].dim() == 1:
        dim = next(d for d, v in enumerate(indices) if v is not None)
        rows = known[0] % shape[dim] if known[0].dtype == torch.int64 else known[0][:0]
        if len(rows) and _is_range(rows, start := int(rows[0])):
            return trace.rewrite(node, _ATEN.slice.Tensor, x, dim, start, start + len(rows))
    if known and (gather := _paired(trace, shape, indices)):
        return trace.rewrite(node, gather, x, next(v for v in indices if v is not None and not _counts(trace, v)))
    if len(known) != len(shape) or len(indices) != len(shape):
        return None
    last = -len(shape_of(node)) - 1
    for value, size in zip(known, shape, strict=True):
        at = next((d for d in range(-value.dim(), 0) if value.shape[d] > 1), last + 1)
        if value.numel() != size or at <= last or not _is_range(value.flatten()):
            return None
        last = at
    return trace.rewrite(node, _ATEN.view.default, x, shape_of(node))


def _paired(trace: Trace, shape: Sequence[int], indices: Sequence[Node | None]) -> Callable[..., Tensor] | None:
    """Return a function (x, i) -> x[:, rows, i] by a gather, if constants count the rows of the other indexed dims;
    else None.

    x[arange(b), i] -> gather(x, 1, i[:, None])[:, 0]    x[arange(b)[:, None], i] -> gather(x, 1, i)
    """
    given = {d: v for d, v in enumerate(indices) if v is not None}
    made = torch.broadcast_shapes(*(shape_of(v) for v in given.values()))
    rows = {d: _counts(trace, v) - 1 + len(made) - len(shape_of(v)) for d, v in given.items() if _counts(trace, v)}
    found, first, last = [d for d in given if d not in rows], min(given), max(given)
    is_alone = len(found) == 1 and all(made[k] == shape[d] for d, k in rows.items())
    is_ordered = list(rows.values()) == list(range(len(rows))) and len(given) == last - first + 1
    if not (rows and is_alone and is_ordered and dtype_of(given[found[0]]) in (torch.int64, torch.int32)):
        return None
    # A row has one looked-up element, or several: these are a dim of the result after the dim of rows.
    dim, count = found[0], len(made) - len(rows)
    if count > 1 or (count and dim != last):
        return None
    kept = [made[-1] if count and d == dim else 1 if d == dim or d not in given else n for d, n in enumerate(shape)]
    whole = [kept[d] if d == dim else n for d, n in enumerate(shape)]

    def gather(x: Tensor, i: Tensor) -> Tensor:
        i = _ATEN._to_copy.default(i, dtype=torch.int64) if i.dtype != torch.int64 else i
        i = _ATEN.where.self(_ATEN.lt.Scalar(i, 0), _ATEN.add.Tensor(i, shape[dim]), i)
        i = _ATEN.view.default(expanded(i, made), kept)
        y = _ATEN.gather.default(x, dim, expanded(i, whole))
        return y if count else _ATEN.squeeze.dim(y, dim)

    return gather


def _counts(trace: Trace, index: Node) -> int:
    """Return 1 + the only dim along which a constant index is 0, 1, 2, ..., or 0."""
    value = trace.constant(index)
    if value is None or value.dtype not in (torch.int64, torch.int32):
        return 0
    long = [d for d, n in enumerate(value.shape) if n > 1]
    return 1 + long[0] if len(long) == 1 and _is_range(value.flatten()) else 0


def _is_range(x: Tensor, start: int = 0) -> bool:
    """Return whether a vector is start, start + 1, ...: those of lookups may have millions of elements."""
    return torch.equal(x, torch.arange(start, start + len(x), dtype=x.dtype, device=x.device))


def _attention(trace: Trace, node: Node, *args: Any, **named: Any) -> None:
    """Replace a constant causal mask by `is_causal`, and a mask of documents by their numbers."""
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
    given |= named
    mask: Any = given.get("attn_mask")
    if isinstance(mask, Node) and not given.get("is_causal"):
        # Every layer reads the same constant: it is analyzed once.
        if "mask" not in mask.meta and (known := trace.constant(mask)) is not None:
            mask.meta["mask"] = kind_of_mask(known)
        if kind := mask.meta.get("mask"):
            given |= {"attn_mask": None, "is_causal": kind == "causal"}
            trace.rewrite(node, _ATEN.scaled_dot_product_attention.default, **given)
        elif not given.get("dropout_p") and (found := document_mask(trace, mask, given["query"])):
            _inside_documents(trace, node, found, given)


def _inside_documents(trace: Trace, node: Node, found: DocumentMask, given: Mapping[str, Any]) -> None:
    """Let an attention read the numbers of documents, in place of the mask that they make."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mine: Tensor, theirs: Tensor) -> Tensor:
        mine = _ATEN.view.default(mine, (found.rows, 1, -1, 1))
        theirs = _ATEN.view.default(theirs, (found.their_rows, 1, 1, -1))
        return ours.attention_documents(q, k, v, mine, theirs, found.is_causal, given.get("scale"))  # type: ignore[no-any-return]

    trace.rewrite(node, attention, given["query"], given["key"], given["value"], found.mine, found.theirs)


_SIMPLER: Mapping[str, Callable[..., None]] = {
    **aten(_where, "where.self where.ScalarOther where.ScalarSelf"),
    **aten(_lookup, "index.Tensor"),
    **aten(_attention, "scaled_dot_product_attention"),
}


def kind_of_mask(mask: Tensor) -> str:
    """Return "open" for a mask [..., queries, keys] that hides nothing, "causal" if it hides the future, or ""."""
    seen = compact(mask)
    if mask.dim() < 2:
        return ""
    if mask.dtype != torch.bool:
        # An added mask has zeros and "minus infinity".
        hidden = seen <= torch.finfo(mask.dtype).min / 2
        if not bool((hidden | (seen == 0)).all()):
            return ""
        seen = ~hidden
    if bool(seen.all()):
        return "open"
    past = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    return "causal" if bool((seen == past).all()) else ""
