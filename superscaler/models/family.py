"""Named models: their sizes, their construction and their batches, which are random by the seed and the step only."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from superscaler.specs.options import Options

# The label that cross entropy ignores, in torch and in Hugging Face models.
IGNORED = -100


@dataclass(frozen=True, slots=True)
class Family:
    """`default` is one of `sizes`; a family of one size calls it "". `build` takes the name of the model for errors."""

    default: str
    sizes: Mapping[str, Options]
    build: Callable[[str, Options], nn.Module]
    make_batch: Callable[[Options, int], dict[str, Tensor]]


def generator(seed: int, step: int) -> torch.Generator:
    """Return a generator of its own for each seed and step."""
    # Large odd factors give neighbouring seeds and steps different streams.
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + 1) % 2**63)


def tokens(seed: int, step: int, batch: int, sequences: tuple[int, int], vocabulary: int) -> dict[str, Tensor]:
    """Return `input_ids` and `labels`, int64 of shapes (batch, sequence), drawn independently; they share no memory.

    Row r leaves out its first labels, none in row 0 and up to three quarters of them in the last one, so that a mean
    of the means of two halves is not the mean of the whole.
    """
    draw = generator(seed, step)
    ids, labels = (torch.randint(vocabulary, (batch, s), generator=draw, device="cpu") for s in sequences)
    ignored = torch.arange(batch, device="cpu") * (3 * sequences[1]) // (4 * batch)
    labels[torch.arange(sequences[1], device="cpu") < ignored[:, None]] = IGNORED
    return {"input_ids": ids, "labels": labels}


def positions(lengths: Sequence[int], batch: int, length: int) -> Tensor:
    """Return the positions of tokens in rows of documents of these lengths, again and again, int64 (batch, length)."""
    row = torch.cat([torch.arange(n, device="cpu") for n in lengths])
    return row.repeat(-(-length // len(row)))[:length].repeat(batch, 1)


def classes(seed: int, step: int, name: str, shape: tuple[int, ...], count: int) -> dict[str, Tensor]:
    """Return the float32 input of this name and shape (batch, ...), and `labels`, int64 of shape (batch,).

    Every second label of the second half is left out, so that both halves count differently.
    """
    draw = generator(seed, step)
    x = torch.randn(shape, generator=draw, device="cpu")
    labels = torch.randint(count, shape[:1], generator=draw, device="cpu")
    labels[(shape[0] + 1) // 2 :: 2] = IGNORED
    return {name: x, "labels": labels}
