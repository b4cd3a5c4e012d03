"""Mixtures of experts of Hugging Face models, captured as one operator: it can be cut on tokens, experts and width.

The library lets the experts' computation be chosen by name; ours is chosen while a model is exported. Experts of a form
that the operator does not have (biases, gates of their own) run as batched matrix products.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from superscaler.frontend import ours

NAME = "superscaler"
ACTIVATIONS = ("silu", "gelu", "relu")


@contextmanager
def chosen(module: nn.Module) -> Iterator[None]:
    """Let the experts of a Hugging Face model run as this operator."""
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
    result: Tensor = ours.experts(operands[0], ids, weights, *operands[1:], activation)
    return result.to(x.dtype)
