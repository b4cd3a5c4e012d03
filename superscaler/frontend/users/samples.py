"""Random operands for checks of the user's functions: normal, zero, whole, large and tiny numbers, and float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of random numbers: the range of their sizes, their dtype, and the tolerance of results.

    `tolerance` is relative to the largest element of a result, but at least to `unit`.
    """

    name: str
    sizes: tuple[float, float] = (1.0, 1.0)
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    unit: float = 1.0

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return random numbers of this kind."""
        shape = tuple(shape)
        x = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
        uniform = torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu")
        if self.name == "zeros":
            x = x * (uniform < 0.7)
        elif self.name == "integers":
            x = x.mul(8).round()
        else:
            low, high = map(log10, self.sizes)
            x = x * 10 ** (low + (high - low) * uniform)
        return x.to(self.dtype)


NORMAL = Kind("normal")
# Normal numbers too, but a result of nan is no error.
TRIED = Kind("normal")
KINDS = (
    NORMAL,
    Kind("zeros"),
    Kind("integers"),
    Kind("large", (1.0, 1e9)),
    Kind("tiny", (1e-9, 1e-9), unit=1e-18),
    Kind("float32", dtype=torch.float32, tolerance=1e-4),
)
