"""The operators that torch does not have, written so that shapes, dtypes and floating-point operations are right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library, infer_schema

_LIBRARY = Library("ss", "DEF")


def _operator(function: Callable[..., Any], name: str = "") -> Any:
    """Composite: its gradient is that of what it calls, and torch.export leaves it in one piece."""
    name = name or function.__name__
    _LIBRARY.define(name + infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.ss, name).default


@_operator
def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Return for each token the sum over its experts of weight * down @ (activation(gate @ x) * (up @ x)).

    x (tokens, hidden), ids and weights (tokens, chosen), gate_up (experts, 2 width, hidden), down (experts, hidden,
    width). Gathers the matrices of each token: the oracle of `runtime.functional.experts`, not for use at scale.
    """
    gate, up = torch.einsum("tkfh,th->tkf", gate_up[ids], x).chunk(2, -1)
    each = torch.einsum("tkf,tkhf->tkh", getattr(F, activation)(gate) * up, down[ids])
    return (each * weights[..., None]).sum(1).to(x.dtype)


@_operator
def attention_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None
) -> Tensor:
    grouped = q.shape[:-2] != k.shape[:-2]
    return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=grouped)


@_operator
def dropout(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x)


@_operator
def histc(x: Tensor, bins: int, min: float, max: float) -> Tensor:
    return x.new_empty(bins)


@_operator
def count_labels(labels: Tensor, ignore: int, dtype: torch.dtype) -> Tensor:
    return labels.new_empty((), dtype=dtype)


def _drawn(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _mean_loss(logits: Tensor, labels: Tensor, count: Tensor, ignore: int) -> Tensor:
    return torch.empty_like(count)


uniform, normal = (_operator(_drawn, name) for name in ("uniform", "normal"))
cross_entropy, nll_loss = (_operator(_mean_loss, name) for name in ("cross_entropy", "nll_loss"))
