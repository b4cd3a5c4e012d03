"""Operators of `ss.*` that capture puts in the place of torch's, mixtures of experts included."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library, infer_schema

_LIBRARY = Library("ss", "DEF")


def _operator(function: Callable[..., Any], name: str = "") -> Any:
    """Define a composite operator: autograd differentiates the calls inside, and torch.export keeps it whole."""
    name = name or function.__name__
    _LIBRARY.define(name + infer_schema(function, mutates_args=()))
    _LIBRARY.impl(name, function, "CompositeImplicitAutograd")
    return getattr(torch.ops.ss, name).default


@_operator
def experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, activation: str) -> Tensor:
    """Return, for each token, the sum over its experts of weight * down @ (activation(gate @ x) * (up @ x)).

    x (tokens, hidden), ids and weights (tokens, chosen), gate_up (experts, 2 width, hidden), down (experts, hidden,
    width). It gathers the matrices of each token: the oracle of `runtime.functional.experts`, not for use at scale.
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
def attention_documents(
    q: Tensor, k: Tensor, v: Tensor, mine: Tensor, theirs: Tensor, causal: bool, scale: float | None
) -> Tensor:
    """Return attention in which a query sees the keys of its own document, and none behind it if `causal`.

    mine (.., queries, 1) and theirs (.., 1, keys) are the numbers of the documents.
    """
    mask = mine == theirs
    mask = mask.tril() if causal else mask
    return F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[:-2] != k.shape[:-2])


@_operator
def dropout(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x)


@_operator
def histc(x: Tensor, bins: int, min: float, max: float) -> Tensor:
    return x.new_empty(bins)


@_operator
def ctc_losses(
    scores: Tensor, labels: Tensor, lengths: Tensor, label_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    return scores.new_empty(scores.shape[1])


@_operator
def count_labels(labels: Tensor, ignore: int, dtype: torch.dtype, weight: Tensor | None = None) -> Tensor:
    return labels.new_empty((), dtype=dtype)


def _drawn(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _mean_loss(logits: Tensor, labels: Tensor, count: Tensor, ignore: int) -> Tensor:
    return torch.empty_like(count)


uniform, normal = (_operator(_drawn, name) for name in ("uniform", "normal"))
cross_entropy, nll_loss = (_operator(_mean_loss, name) for name in ("cross_entropy", "nll_loss"))


NAME = "superscaler"
ACTIVATIONS = ("silu", "gelu", "relu")


@contextmanager
def chosen(module: nn.Module) -> Iterator[None]:
    """Run the experts of a Hugging Face model as this operator."""
    moe = sys.modules.get("transformers.integrations.moe")
    configs: dict[int, Any] = {id(m.config): m.config for m in module.modules() if hasattr(m, "_is_expert_parallel")}
    if moe is None or not configs:
        yield
        return
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    before = {key: config._experts_implementation for key, config in configs.items()}
    try:
        for config in configs.values():
            config._experts_implementation = NAME
        yield
    finally:
        for key, config in configs.items():
            config._experts_implementation = before[key]


def _forward(module: Any, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    moe = sys.modules["transformers.integrations.moe"]
    activation = getattr(module.config, "hidden_act", None)
    usual = module.has_gate and module.is_concatenated and type(module)._apply_gate is moe._default_apply_gate
    other = module.has_bias or module.is_transposed or module.has_post_expert_norm or module._is_expert_parallel
    if not usual or other or activation not in ACTIVATIONS:
        return moe.batched_mm_experts_forward(module, x, ids, weights)  # type: ignore[no-any-return]
    operands: tuple[Tensor, ...] = (x, module.gate_up_proj, module.down_proj)
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        operands = tuple(t.to(torch.get_autocast_dtype(x.device.type)) for t in operands)
    result: Tensor = experts(operands[0], ids, weights, *operands[1:], activation)
    return result.to(x.dtype)
