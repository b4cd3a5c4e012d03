"""Attention by blocks, each of queries to a chunk of keys: its result, its log-sum-exp, its share of the gradients."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from superscaler.runtime.functions.attention_kernels import Block, Box, Pair, Sizes, dense, expand_heads, sum_heads
from superscaler.runtime.functions.document_attention import backward, forward, masked
from superscaler.runtime.functions.documents import Documents

T = TypeVar("T", Tensor, Tensor | None)


def attention_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    blocks: Sequence[tuple[int, str]],
    chunks: int,
    documents: Documents | None = None,
) -> Pair:
    """Return scaled dot product attention of chunks of queries, each to one chunk of keys, and its log-sum-exp.

    `blocks`: for each chunk of q (..., heads, L, E), the number of its chunk of the `chunks` of k and v (..., heads or
    a divisor of it, S, E), and the visible keys: "all", "before" (as many keys as queries), "none". `mask`: as in
    `attention_dropout`; `documents`: of all chunks. The second result (..., heads, L) is in float32 at least, and
    finite for queries that see no key. With gradients, it writes out scores.
    """
    k, v = expand_heads(k, q), expand_heads(v, q)
    whole, is_dense = Block(q, k, v, mask, scale, documents=documents), torch.is_grad_enabled()
    made = [dense(masked(b)) if is_dense else forward(b) for b in _chunks(whole, blocks, chunks)]
    if len(made) == 1:
        # In torch's own layout: there the transposed result is a view.
        return made[0]
    return torch.cat([out for out, _ in made], -2), torch.cat([total for _, total in made], -1)


def _chunks(whole: Block, blocks: Sequence[tuple[int, str]], chunks: int) -> Iterator[Block]:
    """Yield each block: a chunk of the queries with its chunk of keys."""
    keys, values = whole.k.chunk(chunks, -2), whole.v.chunk(chunks, -2)
    for n, (rows, (at, sees)) in enumerate(zip(whole.q.chunk(len(blocks), -2), blocks, strict=True)):
        of, documents = (n, at, len(blocks), chunks), whole.documents
        if documents is not None:
            mine, theirs = (_rows_of(x, *of) for x in documents[:2])
            documents = Documents(mine, theirs, documents.places[n : n + 1])
        yield Block(rows, keys[at], values[at], _rows_of(whole.mask, *of), whole.scale, sees, documents)


def attention_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    total: Tensor,
    scale: float | None,
    blocks: Sequence[tuple[int, str]],
    chunks: int,
    documents: Documents | None = None,
) -> Tensor:
    """Return zeros, without memory. Their backward turns the gradient of attention to all keys into those of the
    queries, keys and values of `attention_block`.

    `out`, `total`: attention to all keys, and its log-sum-exp.
    """
    found: Tensor = _Gradient.apply(q, k, v, mask, out, total, *(documents or (None,) * 3), scale, blocks, chunks)
    return found


class _Gradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        ctx.save_for_backward(*given[:8])
        ctx.options = given[8:]
        return given[0].new_zeros(()).expand(given[4].shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, mask, *rest, mine, theirs), (places, scale, blocks, chunks) = ctx.saved_tensors, ctx.options
        documents = None if mine is None else Documents(mine, theirs, places)
        whole, count = (q, expand_heads(k, q), expand_heads(v, q)), len(blocks)
        out, total = (x.chunk(count, dim) for x, dim in zip(rest, (-2, -1), strict=True))
        given = list(zip(gradient.chunk(count, -2), out, total, strict=True))
        if count == 1 and blocks[0][1] != "none":
            dq, dk, dv = backward(*given[0], Block(*whole, mask, scale, blocks[0][1], documents))
        else:
            dq, dk, dv = map(torch.zeros_like, whole)
            into = _chunks(Block(dq, dk, dv, None, None), blocks, chunks)
            own = _chunks(Block(*whole, mask, scale, documents=documents), blocks, chunks)
            for ends, block, sums in zip(given, own, into, strict=True):
                if block.sees != "none":
                    torch._foreach_add_(list(sums[:3]), list(backward(*ends, block)))
        return dq, sum_heads(dk, k), sum_heads(dv, v), *(None,) * 9


def seen_by(box: Box, extents: Sizes, step: int, chunks: int, is_causal: bool) -> tuple[list[tuple[int, str]], int]:
    """Return the `blocks` and `chunks` of `attention_block` in a step of a ring with `chunks` chunks.

    The queries are the chunks in `box` of `extents`; with one chunk of queries, the keys are its one chunk.
    """
    size, blocks = extents[0] // chunks, list[tuple[int, str]]()
    for at in range(box[0][0] // size, box[0][1] // size):
        sees = "all" if not is_causal or at >= step > 0 else "none" if at < step else "before"
        blocks.append(((at - step) % chunks, sees))
    return (blocks, chunks) if len(blocks) > 1 else ([(0, blocks[0][1])], 1)


def _rows_of(mask: T, n: int, at: int, blocks: int, chunks: int) -> T:
    """Return the mask of a chunk of queries and a chunk of keys; a dim of size 1 is broadcast."""
    for number, count, dim in ((n, blocks, -2), (at, chunks, -1)):
        if mask is not None and mask.shape[dim] > 1:
            mask = mask.chunk(count, dim)[number]
    return mask
