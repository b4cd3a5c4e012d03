"""Masks of documents: a mask that says which queries and keys have one number is known by these numbers.

Packed rows have several documents one after the other. Models of Hugging Face number them by their position ids, which
begin anew in each document (`transformers.masking_utils`); a model of one's own may get the numbers as an input.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, prod
from typing import Any

import torch
from torch.fx import Node

from superscaler.frontend.base.trace import Trace, argument, dtype_of, reads, shape_of, target_of
from superscaler.frontend.rewrites.constants import compact
from superscaler.ops.row import aten

_ALL = frozenset(aten(True, "__and__.Tensor bitwise_and.Tensor logical_and"))
_VIEWS = frozenset(aten(True, "view _unsafe_view unsqueeze alias clone squeeze squeeze.dim squeeze.dims"))
_EXPAND, _LOWER = ("aten.expand.default",), ("aten.tril.default",)
_COUNTED, _STEPS, _OTHER = ("aten.cumsum.default",), ("aten.diff.default",), ("aten.ne.Scalar",)
_CHOSEN = frozenset(aten(True, "where.self where.Scalar where.ScalarSelf where.ScalarOther"))
_FILLED, _NOT = ("aten.masked_fill.Scalar",), frozenset(aten(True, "bitwise_not logical_not"))
# Comparisons, and which operand has the queries; -1: either.
_EQUAL = aten(-1, "eq.Tensor")
_EARLIER = aten(1, "le.Tensor") | aten(0, "ge.Tensor")
Pair = tuple[Node, Node]


@dataclass(frozen=True, slots=True)
class DocumentMask:
    """The numbers of the documents of queries and of keys; how many rows of the batch have their own, or 1.

    `is_causal`: a query sees no later key.
    """

    mine: Node
    theirs: Node
    rows: int
    their_rows: int
    is_causal: bool


def document_mask(trace: Trace, mask: Node, query: Node) -> DocumentMask | None:
    """Return the documents of a mask (batch, 1, queries, keys), if a query sees all or the earlier keys of its own."""
    if len(shape_of(query)) != 4 or len(shape_of(mask)) < 2:
        return None
    mask = _shown(trace, mask)
    while _is_call(mask, _EXPAND) and len(shape_of(reads(mask)[0])) == len(shape_of(mask)):
        mask = reads(mask)[0]
    if dtype_of(mask) != torch.bool:
        return None
    rows, heads, *square = (1,) * (4 - len(shape_of(mask))) + shape_of(mask)
    # A mask of its own for each head says more than the numbers of a row.
    if heads != 1 or 1 in square:
        return None
    same, orders, is_causal = list[Pair](), list[Pair](), False
    for term, is_lower in _terms(mask, False):
        is_causal |= is_lower
        known = trace.constant(term)
        if known is not None and (kind := _kind(known, square)):
            is_causal |= kind == "causal"
        elif pair := _compared(term, square, _EQUAL):
            same.append(pair)
        elif pair := _compared(term, square, _EARLIER):
            orders.append(pair)
        else:
            return None
    if len(same) != 1 or not all(_is_order(same[0], pair) for pair in orders):
        return None
    own, theirs = (prod(shape_of(x)) // n for x, n in zip(same[0], square, strict=True))
    if not {own, theirs} <= {1, rows} or any(dtype_of(x).is_floating_point for x in same[0]):
        return None
    return DocumentMask(*same[0], own, theirs, is_causal or bool(orders))


def _shown(trace: Trace, mask: Node) -> Node:
    """Return the bool mask of an added one, which is 0 where a query sees a key, and minus infinity elsewhere."""
    node = _base(mask)
    args: Sequence[Any] = node.args
    shown: Node
    if _is_call(node, _CHOSEN):
        shown, zero, lowest = args
    elif _is_call(node, _FILLED) and _is_call(args[1], _NOT):
        (zero, _, lowest), shown = args, reads(args[1])[0]
    else:
        return mask
    return shown if _number(trace, zero) == 0.0 and _number(trace, lowest) == -inf else mask


def _number(trace: Trace, given: Any) -> float | None:
    """Return the number that all elements of an argument are, None if they differ or are not known."""
    if not isinstance(given, Node):
        return float(given)
    known = trace.constant(_base(given))
    return float(known.flatten()[0]) if known is not None and len(known.unique()) == 1 else None


def _terms(mask: Node, is_lower: bool) -> Iterator[tuple[Node, bool]]:
    """Yield the masks that all must let a query see a key, and whether only their lower triangle does."""
    node = _base(mask)
    if _is_call(node, _ALL):
        for read in reads(node):
            yield from _terms(read, is_lower)
    elif _is_call(node, _LOWER) and not argument(node, 1, "diagonal", 0):
        yield from _terms(reads(node)[0], True)
    else:
        yield node, is_lower


def _base(node: Node) -> Node:
    """Return the tensor that has the elements of this one in the same order, or some of them once."""
    while _is_call(node, _VIEWS) and _sizes(read := reads(node)[0]) == _sizes(node):
        node = read
    while _is_call(node, _EXPAND):
        node = reads(node)[0]
    return node


def _sizes(node: Node) -> list[int]:
    return [n for n in shape_of(node) if n > 1]


def _is_call(node: Node, targets: Container[str]) -> bool:
    return node.op == "call_function" and target_of(node) in targets


def _kind(known: torch.Tensor, square: Sequence[int]) -> str:
    """Return "open" for a constant mask that hides nothing, "causal" for one that hides later keys, or ""."""
    if known.dtype != torch.bool:
        return ""
    if bool(compact(known).all()):
        return "open"
    is_square = list(known.shape[-2:]) == list(square)
    return "causal" if is_square and bool((known == torch.ones(*square, dtype=torch.bool).tril()).all()) else ""


def _compared(node: Node, square: Sequence[int], targets: Mapping[str, int]) -> Pair | None:
    """Return the queries and keys that a call compares, if each of them varies along one side of the square only.

    The place of the queries among the operands is given; -1: either.
    """
    if not _is_call(node, targets) or list(shape_of(node)[-2:]) != list(square):
        return None
    operands, (queries, keys) = reads(node), square
    if len(operands) != 2:
        return None
    for at in (0, 1) if targets[target_of(node)] < 0 else (targets[target_of(node)],):
        mine, theirs = ((1, 1, *shape_of(x)) for x in (operands[at], operands[1 - at]))
        if mine[-2:] == (queries, 1) and theirs[-2:] == (1, keys):
            return operands[at], operands[1 - at]
    return None


def _is_order(same: Pair, order: Pair) -> bool:
    """Return whether places are in the order of the sequence inside documents: a document begins where they do not grow
    by one, as in `transformers.masking_utils.find_packed_sequence_indices`.
    """
    (numbers, others), (places, rest) = (tuple(map(_base, pair)) for pair in (same, order))
    if numbers is not others or places is not rest or dtype_of(places).is_floating_point:
        return False
    is_counted = _is_call(numbers, _COUNTED) and argument(numbers, 1, "dim") in (-1, len(shape_of(numbers)) - 1)
    steps = reads(numbers)[0] if is_counted else None
    if steps is None or not _is_call(steps, _OTHER) or steps.args[1] != 1:
        return False
    found = reads(steps)[0]
    is_step = _is_call(found, _STEPS) and argument(found, 1, "n", 1) == 1
    is_last = is_step and argument(found, 2, "dim", -1) in (-1, len(shape_of(found)) - 1)
    return is_last and shape_of(found) == shape_of(numbers) and _base(reads(found)[0]) is places
