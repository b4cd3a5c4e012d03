"""What a recorded step reads and what differs between steps, in tensors that stay: a replay finds it there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from superscaler.runtime.functions.draws import Draws
from superscaler.runtime.functions.tracing import recorded

if TYPE_CHECKING:
    from superscaler.runtime.executor import Rank


class Static:
    """The pieces of the batch that a rank reads, the words of its random numbers, its learning rates, and the numbers
    that travel with its loss.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.inputs: list[Tensor] = []
        self.words: list[Tensor] = []
        self.beside: Tensor | None = None
        self._all_words: Tensor | None = None
        groups = [] if rank.updates.optimizer is None else rank.updates.optimizer.param_groups
        self._rates = [_rate_of(group, rank.device) for group in groups]
        # The numbers that the rates have.
        self._filled: list[float | None] = [None] * len(groups)

    def fill(self) -> None:
        """Set what the next step of the rank reads."""
        pieces = [self._rank.piece(number) for number in range(len(self._rank.tables["inputs"]))]
        self.inputs = _set(self.inputs, pieces, self._rank.device)
        self._fill_words()
        self._fill_rates()
        if self._rank.beside is not None:
            (self.beside,) = _set([] if self.beside is None else [self.beside], [self._rank.beside], self._rank.device)

    def _fill_words(self) -> None:
        tables = self._rank.tables.get("draws") or ()
        if not tables:
            return
        rank = self._rank
        found = [Draws(rank.seed, rank.steps, entries, rank.device).integers() for entries in tables]
        flat = torch.tensor([word for words in found for word in words], dtype=torch.int64)
        (self._all_words,) = _set([] if self._all_words is None else [self._all_words], [flat], rank.device)
        self.words = list(self._all_words.split([len(words) for words in found]))

    def _fill_rates(self) -> None:
        for number, (group, rate) in enumerate(zip(self._groups, self._rates, strict=True)):
            if group["lr"] != self._filled[number]:
                self._filled[number] = group["lr"]
                rate.fill_(group["lr"])

    @property
    def _groups(self) -> list[dict[str, Any]]:
        optimizer = self._rank.updates.optimizer
        return [] if optimizer is None else optimizer.param_groups

    @contextmanager
    def read(self) -> Iterator[None]:
        """Let the rank read these tensors in the block. Its optimizer has its rates as numbers before and after."""
        rank, groups = self._rank, self._groups
        numbers = [group["lr"] for group in groups]
        rank.static, rank.beside = self, self.beside
        try:
            for group, rate in zip(groups, self._rates, strict=True):
                group["lr"] = rate
            with recorded():
                yield
        finally:
            rank.static = None
            for group, number in zip(groups, numbers, strict=True):
                group["lr"] = number


def _rate_of(group: dict[str, Any], device: torch.device) -> Tensor:
    """Return a tensor for a learning rate, in the dtype in which it is multiplied."""
    kinds = {x.dtype for x in group["params"]}
    return torch.zeros((), dtype=torch.float64 if kinds == {torch.float64} else torch.float32, device=device)


def _set(own: Sequence[Tensor], values: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors with new values; the first call makes them."""
    own = own or [torch.empty(x.shape, dtype=x.dtype, device=device) for x in values]
    for x, value in zip(own, values, strict=True):
        # Pinned memory may be overwritten as soon as the step returns; other memory has been read by then.
        x.copy_(value, non_blocking=not value.is_pinned())
    return list(own)
