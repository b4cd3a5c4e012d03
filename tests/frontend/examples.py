"""Small models to capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def tokens(batch: int = 4, sequence: int = 16) -> dict[str, Tensor]:
    """Return token ids and labels, some of which do not count, unevenly over the batch."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 60, (batch, sequence), generator=generator)
    labels = ids.clone()
    labels[0, :9] = -100
    return {"input_ids": ids, "labels": labels}


def gpt2(layers: int = 2, dropout: float = 0.0) -> nn.Module:
    transformers = _transformers()
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=32, n_head=4, vocab_size=64, n_positions=16, use_cache=False,
        bos_token_id=1, eos_token_id=2, **rates,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).train()


def llama(layers: int = 2) -> nn.Module:
    transformers = _transformers()
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def longrope() -> nn.Module:
    """Return an unmodified module of the library, whose rotary frequencies are others for more than 24 tokens."""
    transformers = _transformers()
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 24,
        "short_factor": [1.0 + 0.1 * k for k in range(8)], "long_factor": [2.0 + 0.5 * k for k in range(8)],
    }  # fmt: skip
    config = transformers.Phi3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=96, original_max_position_embeddings=24, pad_token_id=0,
        use_cache=False, attention_dropout=0.0, resid_pdrop=0.0, embd_pdrop=0.0, rope_parameters=rope,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.Phi3ForCausalLM(config).train()


def _transformers():
    import pytest

    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    return transformers


class Net(nn.Module):
    """Two layers around a function of the test, with buffers that such functions read and change."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor], **attributes: Any) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.between = between
        self.register_buffer("table", torch.linspace(0.1, 1.0, 8))
        self.register_buffer("mean", torch.rand(8, 8))
        self.register_buffer("book", torch.randn(4, 8))
        self.register_buffer("seen", torch.zeros(8))
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x))).pow(2).mean()


class Function(nn.Module):
    """A function of a linear layer, of the input through it, and of other inputs."""

    def __init__(self, function: Callable[..., Tensor], inner: int = 4) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(inner, inner), function

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.function(self.linear(x), *others)


class Mlp(nn.Module):
    """Two linear layers of the same width (a square weight) and a mean squared error."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.second(torch.relu(self.first(x))), target)


class Regrouped(nn.Module):
    """Sees 12 as 3 x 4, and then as 4 x 3."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        threes = self.inner(x).view(-1, 3, 4).tanh().reshape(-1, 12)
        return threes.view(-1, 4, 3).softmax(-1).square().mean()


class Block(nn.Module):
    """One of each kind of operator: attention, packed weights, slices, reductions, lookups, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.packed = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8, bias=False)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 6)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1, bias=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.norm(self.table(ids))
        q, k, v = (p.unflatten(-1, (2, 4)).transpose(1, 2) for p in self.packed(x).chunk(3, -1))
        scores = (q @ k.transpose(-2, -1) / 2).masked_fill(torch.ones(ids.shape[1], ids.shape[1]).triu(1) > 0, -1e9)
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        y = x + self.out(mixed) * self.scale
        y = torch.cat([y[..., 4:], -y[..., :4]], -1) + y.roll(1, 1)
        y = self.convolution(y.transpose(1, 2)).mT.contiguous()
        y = y - y.mean(-1, keepdim=True) + torch.stack([y, y.flip(1)], 0).sum(0) + y.amax(-1, keepdim=True)
        y = y.index_select(1, torch.arange(ids.shape[1] - 1, -1, -1)) + y[:, torch.arange(ids.shape[1])]
        loss = nn.functional.cross_entropy(self.head(y).permute(0, 2, 1), labels)
        extra = nn.functional.cross_entropy(self.head(y).flatten(0, 1), labels.flatten())
        return {"loss": loss + extra + nn.functional.l1_loss(y, x) + y.var(1).mean() + y.unbind(1)[2].sum()}


class Contractions(nn.Module):
    """Products by equation: batched, with an ellipsis, without an arrow, of one operand, of three."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 6)
        self.right = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.left(x), torch.einsum("bik, kc", x, self.right.t()).mT
        pairs = torch.einsum("bic,bjc->bij", a, b)
        outer = torch.einsum("b...c,b...d->bcd", a, b)
        sums = torch.einsum("bij->j", pairs) + torch.einsum("bi...->i", pairs)
        traces = torch.einsum("bii->b", pairs)
        scaled = torch.einsum("bic,cd,bid->bi", a, outer.mean(0), b)
        return (scaled * sums).square().mean() + (traces * outer.sum((1, 2))).mean()
