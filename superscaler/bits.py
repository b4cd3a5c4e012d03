"""The bytes of a tensor. Importing this module imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def bytes_of(x: Tensor) -> Tensor:
    """Return the bytes of the elements of a tensor, in order: a view of it where these lie so in memory."""
    from torch import uint8

    plain = x.detach().contiguous()
    # A tensor of one element is contiguous with any strides, and some cannot be viewed as bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(uint8)
