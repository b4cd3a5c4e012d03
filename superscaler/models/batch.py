"""Batches of random numbers that depend on the seed and the step only."""

from __future__ import annotations

import torch
from torch import Tensor

# What cross entropy leaves out, in torch and in Hugging Face models.
IGNORED = -100


def generator(seed: int, step: int) -> torch.Generator:
    """Return a generator of its own for each seed and step."""
    # Large odd factors keep the streams of neighbouring seeds and steps apart.
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 1) % 2**63)


def tokens(seed: int, step: int, batch: int, sequence: int, vocabulary: int) -> dict[str, Tensor]:
    """Return `input_ids` and `labels`, int64 of shape (batch, sequence), drawn apart; they share no memory.

    Row r leaves out its first labels, none in row 0 and up to three quarters of them in the last one, so that a mean
    of the means of two halves is not the mean of the whole.
    """
    draw = generator(seed, step)
    ids, labels = (torch.randint(vocabulary, (batch, sequence), generator=draw, device="cpu") for _ in range(2))
    ignored = torch.arange(batch, device="cpu") * (3 * sequence) // (4 * batch)
    labels[torch.arange(sequence, device="cpu") < ignored[:, None]] = IGNORED
    return {"input_ids": ids, "labels": labels}


def classes(seed: int, step: int, batch: int, inputs: int, count: int) -> dict[str, Tensor]:
    """Return `x`, float32 of shape (batch, inputs), and `labels`, int64 of shape (batch,).

    Every second label of the second half is left out, so that both halves count differently.
    """
    draw = generator(seed, step)
    x = torch.randn(batch, inputs, generator=draw, device="cpu")
    labels = torch.randint(count, (batch,), generator=draw, device="cpu")
    labels[(batch + 1) // 2 :: 2] = IGNORED
    return {"x": x, "labels": labels}
