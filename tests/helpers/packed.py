"""Models of Hugging Face, and one of one's own, on rows of several documents."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss

Lengths = tuple[tuple[int, ...], ...]
# The lengths of the documents of each row: short ones, one, and none that ends where a device's part does.
LENGTHS: Lengths = ((4, 4, 8), (6, 10), (16,), (3, 3, 3, 7))


def positions(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Return the position of each token in its document (rows, tokens)."""
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])


def numbers(lengths: Sequence[Sequence[int]]) -> Tensor:
    """Return the number of the document of each token (rows, tokens)."""
    return (positions(lengths) == 0).cumsum(-1)


def model(kind: str, tokens: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    if "llama" in kind:
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=tokens, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).train()
    config = transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=tokens, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


@cache
def packed(kind: str, lengths: Lengths = LENGTHS) -> ss.Graph:
    """Return the training step of a model on packed rows."""
    module, places = model(kind, sum(lengths[0])), positions(lengths)
    ids = torch.randint(0, 64, places.shape)
    given: dict[str, Any] = {"input_ids": ids, "labels": ids.clone(), "position_ids": places}
    if "mask" in kind:
        own = numbers(lengths)[:, None]
        given["attention_mask"] = (own.unsqueeze(-1) == own.unsqueeze(-2)).tril()
    return ss.capture(module, kwargs=given, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), check=False)


class Own(nn.Module):
    """Attention under a mask that a function makes of the numbers of documents (rows, tokens)."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.qkv, self.out = mask, nn.Linear(16, 48), nn.Linear(16, 1)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind()
        found = F.scaled_dot_product_attention(q, k, v, self.mask(documents))
        return self.out(found.transpose(1, 2).flatten(-2)).square().mean()


def own(mask: Any, lengths: Lengths = LENGTHS) -> ss.Graph:
    module, documents = Own(mask), numbers(lengths)
    given = torch.randn(*documents.shape, 16), documents
    return ss.capture(module, given, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), check=False)
