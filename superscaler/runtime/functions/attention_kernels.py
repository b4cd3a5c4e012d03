"""Attention of queries to some of their keys: its result and log-sum-exp, and its share of the gradients.

Torch's kernels give the log-sum-exp. Their backward takes the log-sum-exp of all keys, so that it makes the share of a
block in the gradients: P = exp(S - lse), dV = P^T dO, dS = P (dO V^T - rowsum(dO O)), dQ = dS K, dK = dS^T Q
(FlashAttention, Dao et al. 2022; Ring Attention, Liu et al. 2023). They keep no scores.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from superscaler.runtime.functions.documents import Documents

Pair = tuple[Tensor, Tensor]
Box = Sequence[tuple[int, int]]
Sizes = Sequence[int]
_ATEN = torch.ops.aten


class Block(NamedTuple):
    """Queries (..., L, E), keys and values (..., S, E), and how the queries see the keys: "all", "before", "none".

    `documents`: queries see keys of their own one, and "before" those up to their places. The functions of this file
    compute a block without documents.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float | None
    sees: str = "all"
    documents: Documents | None = None


def scores(q: Tensor, k: Tensor, mask: Tensor | None, scale: float | None, is_causal: bool) -> Tensor:
    """Return the scores of queries and keys, minus infinity where the mask, or the causal one, hides a key."""
    found = q @ k.transpose(-2, -1) * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        mask = torch.ones(found.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return found
    return found.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else found + mask


def forward(block: Block) -> Pair:
    """Return the attention of a block, and its log-sum-exp: finite, and too small to count, if no key is visible."""
    q, k, v, mask, scale, sees, _ = block
    if sees == "none":
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_full(q.shape[:-1], least(q), dtype=wide_dtype(q))
    kernel = _kernel(block)
    if not kernel:
        return dense(block)
    q, k, v = map(_packed, (q, k, v))
    if kernel == "cpu":
        added = _added(mask, q)
        out, total = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, sees == "before", attn_mask=added, scale=scale
        )
        if added is not None:
            total = total.masked_fill((added == -math.inf).all(-1), least(q))
    elif kernel == "flash":
        out, total, *_ = _ATEN._scaled_dot_product_flash_attention(q, k, v, 0.0, sees == "before", scale=scale)
    else:
        out, total, *_ = _ATEN._scaled_dot_product_efficient_attention(
            q, k, v, None, True, 0.0, sees == "before", scale=scale
        )
    return out, total[..., : q.shape[-2]]


def backward(gradient: Tensor, out: Tensor, total: Tensor, block: Block) -> tuple[Tensor, ...]:
    """Return the gradients of a block's q, k and v, given `out` and `total` of all blocks and the gradient of `out`."""
    q, k, v, mask, scale, sees, _ = block
    is_causal, kernel = sees == "before", _kernel(block)
    if kernel:
        q, k, v, out = map(_packed, (q, k, v, out))
    if kernel == "cpu":
        return _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, total, 0.0, is_causal, attn_mask=_added(mask, q), scale=scale
        )
    if kernel == "flash":
        sizes, none = (q.shape[-2], k.shape[-2]), q.new_zeros((), dtype=torch.uint64)
        return _ATEN._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, total, None, None, *sizes, 0.0, is_causal, none, none, scale=scale
        )
    if kernel:
        none, rows = q.new_zeros((), dtype=torch.int64), -total.shape[-1] % _ROWS
        padded = torch.nn.functional.pad(total, (0, rows), value=math.inf)
        options = gradient, q, k, v, None, out, padded, none, none, 0.0, (True, True, True, False), is_causal
        found: tuple[Tensor, ...] = _ATEN._scaled_dot_product_efficient_attention_backward(*options, scale=scale)
        return found[:3]
    return _dense_backward(gradient, out, total, block)


def dense(block: Block) -> Pair:
    """Return the results of `forward`, by operators that autograd can differentiate; they write out scores."""
    q, k, v, mask, scale, sees, _ = block
    if sees == "none":
        return forward(block)
    found = scores(q, k, mask, scale, sees == "before").to(wide_dtype(q))
    is_empty = (found == -math.inf).all(-1, keepdim=True)
    total = found.masked_fill(is_empty, 0.0).logsumexp(-1, keepdim=True)
    shares = (found - total).exp()
    return shares.to(v.dtype) @ v, total.masked_fill(is_empty, least(q)).squeeze(-1)


def _dense_backward(gradient: Tensor, out: Tensor, total: Tensor, block: Block) -> tuple[Tensor, ...]:
    q, k, v, mask, scale, sees, _ = block
    shares = (scores(q, k, mask, scale, sees == "before").to(total.dtype) - total.unsqueeze(-1)).exp()
    inner = (gradient * out).sum(-1, keepdim=True, dtype=total.dtype)
    found = (shares * (gradient @ v.transpose(-2, -1) - inner)).to(q.dtype)
    found = found * (1.0 / math.sqrt(q.shape[-1]) if scale is None else scale)
    return found @ k, found.transpose(-2, -1) @ q, shares.to(gradient.dtype).transpose(-2, -1) @ gradient


# Rows to which the log-sum-exp of torch's memory-efficient attention is padded.
_ROWS = 32


def _kernel(block: Block) -> str:
    """Return the torch kernel that computes a block: "cpu", "flash", "efficient"; '' for none."""
    q, k, v, mask, *_ = block
    alike = q.dim() == 4 and q.shape[-1] == k.shape[-1] == v.shape[-1]
    if not alike or (mask is not None and mask.dim() not in (2, 4)):
        return ""
    if q.device.type == "cpu":
        return "cpu"
    if mask is not None or q.device.type != "cuda" or q.dtype == torch.float64 or q.shape[-1] % 8:
        return ""
    return "efficient" if q.dtype == torch.float32 or q.shape[-1] > 256 else "flash"


def _packed(x: Tensor) -> Tensor:
    """Return a tensor whose rows lie in memory as torch's kernels read them, whatever its strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _added(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Return a mask as numbers that are added to scores."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return q.new_zeros(mask.shape).masked_fill(~mask, -math.inf)


def wide_dtype(q: Tensor) -> torch.dtype:
    return torch.promote_types(q.dtype, torch.float32)


def least(q: Tensor) -> float:
    """Return a log-sum-exp too small to change any sum; the sum of two is finite."""
    return torch.finfo(wide_dtype(q)).min / 4


def attention_merge(first: Tensor, first_total: Tensor, second: Tensor, second_total: Tensor) -> Pair:
    """Return attention to two blocks of keys, and its log-sum-exp, from `attention_block` of each."""
    total = torch.logaddexp(first_total, second_total)
    one, other = ((some - total).exp().unsqueeze(-1) for some in (first_total, second_total))
    return (one * first + other * second).to(first.dtype), total


def expand_heads(x: Tensor, q: Tensor) -> Tensor:
    """Repeat each head for the queries that share it: head h of q reads head h // (heads of q / heads of x)."""
    if x.dim() < 3 or x.shape[-3] == q.shape[-3]:
        return x
    repeats = q.shape[-3] // x.shape[-3]
    grouped = x.unsqueeze(-3)
    return grouped.expand(*x.shape[:-2], repeats, *x.shape[-2:]).flatten(-4, -3)


def sum_heads(gradient: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of x, given that of `expand_heads` of it."""
    return gradient if gradient.shape == x.shape else gradient.unflatten(-3, (x.shape[-3], -1)).sum(-3)
