"""Attention inside documents: only rectangles of scores whose queries and keys are of one document are computed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superscaler.runtime.functions import attention_kernels as kernels
from superscaler.runtime.functions.attention_kernels import Block, Pair, expand_heads, least, wide_dtype
from superscaler.runtime.functions.documents import Documents, Range, Rectangle, rectangles
from superscaler.runtime.functions.tracing import is_static


class Part(NamedTuple):
    """A rectangle of a block, and whether an earlier one has made a result of its queries."""

    rectangle: Rectangle
    is_more: bool

    def cut(self, block: Block) -> Block:
        return Block(*self.operands(block.q, block.k, block.v), None, block.scale, self.rectangle.sees)

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parts of queries, keys and values, or of their gradients."""
        rows, queries, keys, _ = self.rectangle
        return _cut(q, rows, queries), _cut(k, rows, keys), _cut(v, rows, keys)

    def queries(self, x: Tensor, dim: int = -2) -> Tensor:
        """Return the rows of a tensor (batch, heads, L, ..) that belong to the queries."""
        return _cut(x, self.rectangle.rows, self.rectangle.queries, dim)


def attention_documents(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, documents: Documents
) -> Tensor:
    """Return scaled dot product attention in which a query sees the keys of its own document.

    q (..., heads, L, E), k and v (..., heads or a divisor of it, S, E). `is_causal`: and none behind its own place. A
    query without a visible key gives zeros. Traced and replayed code computes all scores, and hides some by a mask.
    """
    k, v, sees = expand_heads(k, q), expand_heads(v, q), "before" if is_causal else "all"
    if is_static():
        mask = mask_of(documents, is_causal)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    found: Tensor = _Attention.apply(q, k, v, scale, sees, documents)
    return found


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        q, k, v, scale, sees, documents = given
        block = Block(q, k, v, None, scale, sees, documents)
        # The backward does not ask the device for them again.
        parts = _parts(block)
        out, total = _forward(block, parts)
        ctx.save_for_backward(q, k, v, out, total, documents.mine, documents.theirs)
        ctx.options = scale, sees, documents.places, parts
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, total, mine, theirs), (scale, sees, places, parts) = ctx.saved_tensors, ctx.options
        block = Block(q, k, v, None, scale, sees, Documents(mine, theirs, places))
        return *_backward(gradient, out, total, block, parts), None, None, None


def forward(block: Block) -> Pair:
    """Return the attention of a block, and its log-sum-exp: finite, and too small to count, if no key is visible."""
    return _forward(block, _parts(block))


def backward(gradient: Tensor, out: Tensor, total: Tensor, block: Block) -> tuple[Tensor, ...]:
    """Return the gradients of a block's q, k and v, given `out` and `total` of all blocks and the gradient of `out`."""
    return _backward(gradient, out, total, block, _parts(block))


def _forward(block: Block, parts: Sequence[Part] | None) -> Pair:
    if parts is None:
        return kernels.forward(masked(block))
    q, v = block.q, block.v
    if _is_whole(parts, block):
        return kernels.forward(parts[0].cut(block))
    # As torch's kernels lay it out.
    out = q.new_zeros(*q.shape[:-3], q.shape[-2], q.shape[-3], v.shape[-1]).transpose(-3, -2)
    total = q.new_full(q.shape[:-1], least(q), dtype=wide_dtype(q))
    for part in parts:
        found, ends = kernels.forward(part.cut(block)), (part.queries(out), part.queries(total, -1))
        # A query sees several runs of keys where its document is not in one piece.
        for end, made in zip(ends, kernels.attention_merge(*ends, *found) if part.is_more else found, strict=True):
            end.copy_(made)
    return out, total


def _backward(
    gradient: Tensor, out: Tensor, total: Tensor, block: Block, parts: Sequence[Part] | None
) -> tuple[Tensor, ...]:
    if parts is None or _is_whole(parts, block):
        whole = masked(block) if parts is None else parts[0].cut(block)
        return tuple(kernels.backward(gradient, out, total, whole))
    sums = torch.zeros_like(block.q), torch.zeros_like(block.k), torch.zeros_like(block.v)
    for part in parts:
        ends = part.queries(gradient), part.queries(out), part.queries(total, -1)
        own = kernels.backward(*ends, part.cut(block))
        torch._foreach_add_(list(part.operands(*sums)), list(own))
    return sums


def masked(block: Block) -> Block:
    """Return the same block with a mask in place of its documents."""
    if block.documents is None or block.sees == "none":
        return block._replace(documents=None)
    mask = mask_of(block.documents, block.sees == "before")
    return block._replace(mask=mask, sees="all", documents=None)


def mask_of(documents: Documents, is_causal: bool) -> Tensor:
    """Return the visible keys of queries, bool (..., queries, keys)."""
    mask, (place,) = documents.mask, documents.places
    if not is_causal:
        return mask
    device = mask.device
    queries = torch.cat([torch.arange(at, at + size, device=device) for _, at, size in place.stretches])
    keys = torch.arange(place.first_key, place.first_key + mask.shape[-1], device=device)
    return mask & (keys <= queries.unsqueeze(-1))


def _parts(block: Block) -> list[Part] | None:
    """Return the rectangles of a block in documents; None if it is computed whole."""
    if block.documents is None or block.sees == "none" or is_static():
        return None
    rows = len(block.q) if block.q.dim() == 4 else 1
    found = rectangles(block.documents, rows, block.sees == "before")
    return None if found is None else list(_marked(found))


def _marked(found: Sequence[Rectangle]) -> Iterator[Part]:
    """Yield the rectangles, which are in the order of their rows, then of their queries."""
    before, end = (-1, -1), 0
    for each in found:
        yield Part(each, each.rows == before and each.queries[0] < end)
        end = max(end, each.queries[1]) if each.rows == before else each.queries[1]
        before = each.rows


def _is_whole(parts: Sequence[Part], block: Block) -> bool:
    """Return whether the only rectangle of a block is all of it."""
    if len(parts) != 1:
        return False
    own = parts[0].cut(block)
    return own.q.shape == block.q.shape and own.k.shape == block.k.shape


def _cut(x: Tensor, rows: Range, own: Range, dim: int = -2) -> Tensor:
    """Return some rows of a batch, if there is one, and a range of a dim."""
    some = x[rows[0] : rows[1]] if x.dim() == 2 - dim else x
    return some.narrow(dim, own[0], own[1] - own[0])
