"""Weights that a tape does not hold: they go after the forward, and are brought again for the backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Dropped:
    """The weights of a tape. What autograd saves of them, and of their views, is made of those that are given again."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.given: Sequence[Tensor] = ()
        self._strides = [w.stride() for w in weights]
        self._offset = [w.storage_offset() for w in weights]
        self._at = {w.untyped_storage().data_ptr(): n for n, w in reversed(list(enumerate(weights)))}

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context in which the forward runs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def give(self, weights: Sequence[Tensor]) -> None:
        """Set the weights with which the backward goes on."""
        self.given = [_strided(x, strides) for x, strides in zip(weights, self._strides, strict=True)]

    def _pack(self, x: Tensor) -> Any:
        n = self._at.get(x.untyped_storage().data_ptr())
        return x if n is None else (n, x.size(), x.stride(), x.storage_offset() - self._offset[n])

    def _unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        n, size, stride, offset = kept
        whole = self.given[n]
        return whole.as_strided(size, stride, whole.storage_offset() + offset)


def _strided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.size(), strides, dtype=x.dtype, device=x.device).copy_(x)
