"""Constants: values that depend on no input and no parameter, and simplifications by them (causal masks)."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from superscaler.bits import bytes_of
from superscaler.frontend.rewrites.decompositions import expanded
from superscaler.frontend.trace import Trace, dtype_of, filled, outputs, reads, shape_of, target_of
from superscaler.ir.names import unique
from superscaler.ops.row import aten

# These operators read only the shape of their operand.
_SHAPE_ONLY = aten(True, "new_ones new_zeros new_full new_empty zeros_like ones_like full_like empty_like")
# Fills -> their number; None: it is their last argument. A fill is never materialized in memory.
_FILLS: dict[str, int | None] = {
    **aten(1, "ones new_ones ones_like"),
    **aten(0, "zeros new_zeros zeros_like"),
    **aten(None, "full new_full full_like"),
}
# Masks of so many elements are recognized, not computed.
_LARGE = 1 << 24
# Comparisons of positions, and whether those of the keys come first.
_COMPARED: Mapping[str, bool] = {**aten(True, "le.Tensor"), **aten(False, "ge.Tensor")}
_PASS_ON = aten(True, "__and__.Tensor bitwise_and.Tensor logical_and expand")
# Operators by element that torch does not tag, beside those that are named after Python's.
_BY_ELEMENT = aten(True, "where.self where.ScalarOther where.ScalarSelf _to_copy clone")

_ATEN = torch.ops.aten
_VIEWS = ("aten.view.default", "aten._unsafe_view.default")


def fold(trace: Trace, device: torch.device) -> None:
    """Replace every call on constants by its value, computed on `device`; buffers without data stay in the graph."""
    for leaf in trace.leaves("buffer"):
        # A constant without readers stays in the state of the model, and may have any value.
        leaf.meta["is_state"] = leaf.meta["is_state"] and not leaf.users
    known = [x for x in trace.leaves("buffer", "constant") if _is_known(x) and x.name not in trace.writes]
    constants = _merge(trace, known)
    made: dict[Node, None] = {}
    for node in trace.calls():
        if node in constants and _is_causal(node):
            node.meta["mask"] = "causal"
        is_open = target_of(node) in _SHAPE_ONLY or all(_is_known(x) for x in reads(node))
        if node in constants and "mask" not in node.meta and is_open:
            pairs = zip(outputs(node), _evaluate(node, device), strict=True)
            results = [trace.leaf(old.name, "constant", old.meta["val"], value) for old, value in pairs]
            sources = dict.fromkeys(reads(node))
            trace.replace(node, *results)
            made.update(dict.fromkeys(results))
            for leaf in sources:
                if leaf in made and not leaf.users:
                    trace.graph.erase_node(leaf)
                    del made[leaf]
    _store(trace, list(made))


def part_numbers(trace: Trace, device: torch.device) -> None:
    """Replace a number that is added to a scalar, as in 1 - mean(x), by a multiple of a constant: a sum of tensors is
    linear, so that parts of the scalar need not wait for each other. The number keeps its digits in float64.
    """
    ones: dict[torch.dtype, Node] = {}
    for node in trace.calls():
        if target_of(node) not in _SUMS or shape_of(node) or not dtype_of(node).is_floating_point:
            continue
        x, number, *alpha = node.args
        if not isinstance(x, Node) or isinstance(number, Node) or dtype_of(x) != dtype_of(node) or not number:
            continue
        if (one := ones.get(dtype_of(x))) is None:
            value = torch.ones((), dtype=dtype_of(x), device=device)
            one = ones[dtype_of(x)] = trace.leaf(unique("one", trace.taken), "constant", value, value)
        trace.rewrite(node, _SUMS[target_of(node)], x, one, number, *alpha, **node.kwargs)


def _turned(x: Tensor, one: Tensor, number: float, alpha: float = 1) -> Tensor:
    return torch.add(-x if alpha == 1 else x * -alpha, one, alpha=number)


_SUMS: dict[str, Any] = {
    "aten.add.Tensor": lambda x, one, number, alpha=1: torch.add(x, one, alpha=number * alpha),
    "aten.sub.Tensor": lambda x, one, number, alpha=1: torch.add(x, one, alpha=-number * alpha),
    "aten.rsub.Scalar": _turned,
}


def _is_known(node: Node) -> bool:
    return node.meta.get("value") is not None


def _is_causal(node: Node) -> bool:
    """Return whether a call makes a large mask that hides the future, without computing it. It must compare positions
    of keys with those of queries, and hide nothing else.
    """
    if not isinstance(node.meta.get("val"), Tensor):
        return False
    shape, name, sources = shape_of(node), target_of(node), reads(node)
    if len(shape) < 2 or shape[-1] != shape[-2] or shape[-1] ** 2 < _LARGE:
        return False
    if any("mask" in x.meta for x in sources):
        others = [compact(x.meta["value"]) for x in sources if "mask" not in x.meta and _is_known(x)]
        is_open = all(x.numel() == 1 and x.dtype == torch.bool and bool(x) for x in others)
        return is_open and len(others) == len(sources) - 1 and name in _PASS_ON
    if name not in _COMPARED or len(sources) != 2 or not all(map(_is_known, sources)):
        return False
    keys, queries = (compact(x.meta["value"]) for x in (sources if _COMPARED[name] else sources[::-1]))
    if not keys.numel() == keys.shape[-1] == shape[-1] == queries.numel() == queries.shape[-2:][0]:
        return False
    k, q = keys.flatten(), queries.flatten()
    is_sorted = all(bool((x[1:] >= x[:-1]).all()) for x in (k, q))
    return is_sorted and bool((k <= q).all() and (k[1:] > q[:-1]).all())


def _merge(trace: Trace, known: list[Node]) -> set[Node]:
    """Return the calls on constants, without those that equal an earlier one: layers compute the same masks, of buffers
    that are equal.
    """
    first: dict[str, Node] = {}
    constants, same = set(known), _equals(known)
    for node in trace.calls():
        if _is_constant(node, constants):
            args = map_arg((node.args, node.kwargs), lambda x: same.get(x, x))
            earlier = first.setdefault(repr((node.target, args)), node)
            if earlier is node:
                constants.update((node, *outputs(node)))
            else:
                trace.replace(node, *outputs(earlier))
    return constants


def _equals(leaves: Sequence[Node]) -> dict[Node, Node]:
    """Return the first of the leaves whose value has the same bits, for each that has an earlier one."""
    first: dict[Any, dict[Node, Tensor]] = {}
    found = {}
    for leaf in leaves:
        value = leaf.meta["value"]
        plain = compact(value).cpu()
        shape, bits = plain.shape, bytes_of(plain)
        some = first.setdefault((value.dtype, value.shape, shape, bits[:1024].numpy().tobytes()), {})
        if earlier := next((x for x, other in some.items() if torch.equal(bits, other)), None):
            found[leaf] = earlier
        else:
            some[leaf] = bits
    return found


def _is_constant(node: Node, constants: Container[Node]) -> bool:
    if torch.Tag.nondeterministic_seeded in node.target.tags:  # type: ignore[union-attr]
        return False
    return target_of(node) in _SHAPE_ONLY or all(x in constants for x in reads(node))


def _evaluate(node: Node, device: torch.device) -> list[Tensor]:
    # Repeated elements have stride 0 here, and torch cannot view joined dims of such a tensor.
    function: Any = _ATEN.reshape.default if target_of(node) in _VIEWS else node.target
    if (name := target_of(node)) in _FILLS:
        number = _FILLS[name]
        fill: Any = node.args[-1] if number is None else number
        return [torch.full((), fill, dtype=dtype_of(node), device=device).expand(shape_of(node))]
    # Elements that repeat are computed once.
    is_pointwise = _is_pointwise(function)

    def value(node: Node) -> Tensor:
        if _is_known(node):
            return compact(node.meta["value"]) if is_pointwise else node.meta["value"]
        return torch.zeros((), dtype=dtype_of(node), device=device).expand(shape_of(node))

    args, kwargs = map_arg((node.args, node.kwargs), value)
    with torch.no_grad(), device:
        result = function(*args, **{k: device if isinstance(v, torch.device) else v for k, v in kwargs.items()})
    results = [result] if isinstance(result, Tensor) else result
    return [_repeated(t).expand(shape_of(x)) for t, x in zip(results, outputs(node), strict=True)]


def _is_pointwise(function: Any) -> bool:
    name = str(function)
    return torch.Tag.pointwise in function.tags or name in _BY_ELEMENT or name.startswith("aten.__")


def _repeated(x: Tensor) -> Tensor:
    """Return the tensor with stride 0 in the dims along which it repeats: a mask of a whole batch is one row."""
    kept = compact(x)
    for d, size in enumerate(kept.shape):
        row, last = (kept.narrow(d, k, min(size, 1)) for k in (0, max(size - 1, 0)))
        # A cheap test first: in most tensors that do not repeat, the last row differs from the first.
        if size > 1 and torch.equal(row, last) and bool((kept == row).all()):
            kept = row
    return kept.clone().expand(x.shape) if kept.shape != x.shape else x


def compact(x: Tensor) -> Tensor:
    """Return the first element of each dim that repeats, the dims kept."""
    return x[tuple(slice(1) if stride == 0 else slice(None) for stride in x.stride())]


def _store(trace: Trace, constants: list[Node]) -> None:
    """Keep the constants that calls read, equal ones once. One number everywhere becomes an expanded scalar."""
    masks = {x for node in trace.calls() if "attention" in target_of(node) for x in reads(node)}
    values = {leaf: leaf.meta["value"] for leaf in constants if leaf not in masks}
    numbers = {n for n, x in values.items() if x.numel() > 1 and x.dtype.is_floating_point and not any(x.stride())}
    for node in trace.calls():
        for leaf in (x for x in dict.fromkeys(reads(node)) if x in numbers):
            with trace.graph.inserting_before(node):
                whole = trace.graph.call_function(_ATEN.expand.default, (leaf, shape_of(leaf)))
            filled(whole, trace.derive(leaf.name, "whole"), node.meta, leaf.meta["val"])
            node.replace_input_with(leaf, whole)
    for leaf in numbers:
        leaf.meta["value"] = leaf.meta["value"].reshape(-1)[0]
        leaf.meta["val"] = leaf.meta["val"].new_empty(())
    same = _equals(constants)
    for leaf, first in same.items():
        leaf.replace_all_uses_with(first)
        trace.graph.erase_node(leaf)
    for leaf in constants:
        if leaf not in same:
            _narrow(leaf)


def _narrow(leaf: Node) -> None:
    """Keep one row of a constant that repeats (a mask of a whole batch), if all its readers broadcast it."""
    row = compact(leaf.meta["value"])
    for node in leaf.users:
        shapes = [row.shape if x is leaf else shape_of(x) for x in reads(node)]
        if not _is_pointwise(node.target) or torch.broadcast_shapes(*shapes) != shape_of(node):
            return
    leaf.meta["value"], leaf.meta["val"] = row.clone(), leaf.meta["val"].new_empty(row.shape)


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
    """Replace a constant causal mask by `is_causal`."""
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
