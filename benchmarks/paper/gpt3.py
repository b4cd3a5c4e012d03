"""GPT-3 as before FlashAttention, its scores written out: product, mask, softmax, dropout and product, a tensor each.

The eager attention of the library adds a mask of float16 for each pair of tokens, which is a constant of gigabytes at
16,384; here it is one of booleans, as in Megatron-LM. `softmax=float32` computes probabilities in float32 and rounds
them, which Megatron-LM does too where its fused kernel does not fit: in 2022, above 4,096 tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from superscaler.models import build

NAME = "scores"


def scores_written_out(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: None, *, scaling: float, dropout: float, **_: Any
) -> tuple[Tensor, None]:
    """Return attention of queries (batch, heads, sequence, channels) to no later keys, and no weights."""
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    scores = (q * scaling) @ k.transpose(-1, -2)
    scores = scores.masked_fill(later, -1e4)
    is_wide = getattr(module.config, "softmax_dtype", "") == "float32"
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) if is_wide else F.softmax(scores, dim=-1)
    return (F.dropout(weights, dropout, module.training) @ v).transpose(1, 2), None


def gpt3(
    size: str = "1.3b", seq: int = 16384, batch: int = 8, vocab: int = 51200, dropout: float = 0.0,
    softmax: str = "float16", device: str = "cpu", layers: int = 0,
) -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:  # fmt: skip
    """Return the model of the library with this attention, and its inputs."""
    AttentionInterface.register(NAME, scores_written_out)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
    options = {"size": size, "seq": seq, "batch": batch, "vocab": vocab, "dropout": dropout, "device": device}
    options |= {"layers": layers} if layers else {}
    built = build("gpt3:" + ",".join(f"{key}={value}" for key, value in options.items()))
    built.module.config._attn_implementation = NAME
    built.module.config.softmax_dtype = softmax
    return built.module, (), built.kwargs
