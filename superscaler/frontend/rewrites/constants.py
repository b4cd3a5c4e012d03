"""Constants: values that depend on no input and no parameter."""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from superscaler.bits import bytes_of
from superscaler.frontend.base.trace import Trace, dtype_of, filled, outputs, reads, shape_of, target_of
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
# Operators along one dim, and which argument it is.
_ALONG = {**aten(1, "cumsum cumprod"), **aten(2, "diff")}

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

    def value(node: Node) -> Tensor:
        if _is_known(node):
            return node.meta["value"]
        return torch.zeros((), dtype=dtype_of(node), device=device).expand(shape_of(node))

    args, kwargs = map_arg((node.args, node.kwargs), value)
    with torch.no_grad(), device:
        args, kwargs = _once(function, args, kwargs)
        result = function(*args, **{k: device if isinstance(v, torch.device) else v for k, v in kwargs.items()})
    results = [result] if isinstance(result, Tensor) else result
    return [_repeated(t).expand(shape_of(x)) for t, x in zip(results, outputs(node), strict=True)]


def _once(function: Any, args: Any, kwargs: Any) -> Any:
    """Return the arguments of an operator without elements that repeat, where these only repeat its results."""
    name, kept = str(function), compact
    if name == "aten.index.Tensor" and all(p is None or p.dtype == torch.int64 for p in args[1]):
        # In a dim along which x repeats, all places are the first one.
        x, places = args
        args = (x, [p if p is None or x.stride(d) else p.new_zeros(()).expand(p.shape) for d, p in enumerate(places)])
    elif name in _ALONG:
        dim = args[_ALONG[name]] if len(args) > _ALONG[name] else -1
        of = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        repeated = [d for d in range(args[0].dim()) if d != dim % args[0].dim() and not any(x.stride(d) for x in of)]

        def kept(x: Tensor) -> Tensor:
            return x[tuple(slice(1) if d in repeated else slice(None) for d in range(x.dim()))]
    elif not _is_pointwise(function):
        return args, kwargs
    return tree_map_only(Tensor, kept, (args, kwargs))


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
            _expand(trace, leaf, node)
    for leaf in numbers:
        leaf.meta["value"] = leaf.meta["value"].reshape(-1)[0]
        leaf.meta["val"] = leaf.meta["val"].new_empty(())
    same = _equals(constants)
    for leaf, first in same.items():
        leaf.replace_all_uses_with(first)
        trace.graph.erase_node(leaf)
    for leaf in constants:
        if leaf not in same:
            _narrow(trace, leaf)


def _expand(trace: Trace, leaf: Node, node: Node) -> None:
    """Let a call read a constant through a call that expands it to its shape."""
    with trace.graph.inserting_before(node):
        whole = trace.graph.call_function(_ATEN.expand.default, (leaf, shape_of(leaf)))
    filled(whole, trace.derive(leaf.name, "whole"), node.meta, leaf.meta["val"])
    node.replace_input_with(leaf, whole)


def _narrow(trace: Trace, leaf: Node) -> None:
    """Keep one row of a constant that repeats (a mask of a whole batch, the positions of its rows), if all its readers
    broadcast it, or look rows up: these read it expanded. Whole, it would have a slice for each microbatch.
    """
    row, looked_up = compact(leaf.meta["value"]), list[Node]()
    for node in leaf.users:
        shapes = [row.shape if x is leaf else shape_of(x) for x in reads(node)]
        if target_of(node) == "aten.embedding.default" and row.shape != shape_of(leaf):
            looked_up.append(node)
        elif not _is_pointwise(node.target) or torch.broadcast_shapes(*shapes) != shape_of(node):
            return
    for node in looked_up:
        _expand(trace, leaf, node)
    leaf.meta["value"], leaf.meta["val"] = row.clone(), leaf.meta["val"].new_empty(row.shape)
