"""Ranks that are given other batches: checksums of the batch travel with the loss of some steps.

Each rank has places of its own in the sum of the loss, so that a check is no operation more: of the first steps of a
process, and of some later ones. In these alone numbers are computed and read, for which a GPU is waited for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from superscaler.comm.communicator import Communicator
from superscaler.errors import InputError

# The first steps of a process are checked, and of the others each EVERY-th.
FIRST, EVERY = 2, 50
# Most elements of an input that a checksum reads: one in so many of a larger input, from another one on in each check.
_MOST = 2**18
# By the bytes of an element, the integers of equal bits.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# The odd constants of splitmix64, as signed integers.
_GOLDEN, _MIX, _END = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
# Bits of a checksum: as many as a float32 represents.
_WIDTH = 24


class Alike:
    """The comparison of the batches of all ranks. `rows`: those of each input that this rank reads."""

    def __init__(self, communicator: Communicator, rows: Mapping[str, set[int]], dtype: torch.dtype) -> None:
        self._communicator, self._rows = communicator, rows
        # Whether batches have these rows only. Then ranks are compared that read the same rows.
        self.has_own_rows = False
        self._calls = 0
        # A number travels in parts that the dtype of the loss represents.
        self._bits = _WIDTH if dtype in (torch.float32, torch.float64) else 8
        size = 2 * _WIDTH // self._bits
        self._none = torch.zeros(communicator.world * size, dtype=dtype, device=communicator.device)
        self._own = slice(communicator.rank * size, (communicator.rank + 1) * size)

    def numbers(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the numbers that travel with the loss of the next step: zeros, unless it is checked."""
        self._calls += 1
        if not self._is_due:
            return self._none
        kinds, sums = zip(*self._sums(batch), strict=True)
        mask, found = 2**self._bits - 1, self._none.clone()
        parts = [number >> at & mask for number in map(_digest, (kinds, sums)) for at in range(0, _WIDTH, self._bits)]
        found[self._own] = torch.tensor(parts, dtype=found.dtype)
        return found

    def check(self, numbers: Tensor, batch: Mapping[str, Tensor], step: int) -> None:
        """Raise InputError, on all ranks, if the numbers of all ranks show that some were given other batches."""
        if not self._is_due:
            return
        parts = numbers.cpu().long().reshape(self._communicator.world, 2, -1)
        found = (parts << self._bits * torch.arange(parts.shape[-1])).sum(-1).tolist()
        # Numbers of few bits may be equal by chance, those of an input are not.
        if _others(found) and (wrong := self._wrong(batch)):
            others, first = next(iter(wrong.values()))
            raise InputError(
                f"step {step} was given another {' and '.join(map(repr, wrong))} on {ranks(others)} than on rank "
                f"{first}; a plan takes the same global batch on all ranks, and each reads its part: seed them alike, "
                "and do not share samples out. What was trained on this batch is wrong: restore a checkpoint, or "
                "start again."
            )

    def meet(self, batch: Mapping[str, Tensor], step: int) -> None:
        """Compare the batches of a step without a loss; all ranks call this."""
        numbers = self.numbers(batch)
        if self._is_due:
            self.check(self._communicator.sum_of_all(numbers), batch, step)

    @property
    def _is_due(self) -> bool:
        return self._calls <= FIRST or self._calls % EVERY == 0

    def _wrong(self, batch: Mapping[str, Tensor]) -> dict[str, tuple[list[int], int]]:
        """Return the inputs that differ, each with the ranks of `_others`; all ranks call this."""
        every = torch.zeros(self._communicator.world, len(batch), 2, dtype=torch.int64)
        every[self._communicator.rank] = torch.tensor([(_digest(rows), number) for rows, number in self._sums(batch)])
        found = self._communicator.sum_of_all(every.to(self._communicator.device)).tolist()
        return {name: o for k, name in enumerate(batch) if (o := _others([numbers[k] for numbers in found]))}

    def _sums(self, batch: Mapping[str, Tensor]) -> list[tuple[list[int] | None, int]]:
        """Return the rows of each input that are compared, None for all, and their checksum."""
        rows = {name: sorted(some) for name, some in self._rows.items()} if self.has_own_rows else {}
        given = {name: x[rows[name]] if name in rows else x for name, x in batch.items()}
        # Each GPU is waited for once.
        sums = torch.stack([_checksum(x, self._calls).to(self._communicator.device) for x in given.values()]).tolist()
        return [(rows.get(name), number) for name, number in zip(given, sums, strict=True)]


def _checksum(x: Tensor, turn: int) -> Tensor:
    """Return an integer that depends on the bits and the places of all elements; of large tensors, of some elements."""
    flat = (torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.detach()).reshape(-1)
    # An odd number meets all columns of a table.
    stride = math.ceil(flat.numel() / _MOST) | 1
    some = flat[turn % stride :: stride]
    words = some.view(_BITS[some.element_size()]).long()
    mixed = words + torch.arange(1, len(words) + 1, device=words.device) * _GOLDEN
    for shift, factor in ((30, _MIX), (27, _END)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return mixed.sum()


def _digest(value: object) -> int:
    """Return an integer of 64 bits for a value."""
    return int.from_bytes(blake2b(repr(value).encode(), digest_size=8).digest(), signed=True)


def _others(numbers: Sequence[Sequence[int]]) -> tuple[list[int], int] | None:
    """Return the ranks that differ from the first one that was given as much, and that one; None if there are none.

    `numbers`: what each rank was given, and its checksum.

    >>> _others([(7, 1), (7, 1)]), _others([(7, 1), (8, 2)]), _others([(7, 1), (8, 5), (7, 2), (8, 6), (7, 1)])
    (None, None, ([2], 0))
    """
    for kind in dict.fromkeys(kind for kind, _ in numbers):
        own = [(rank, number) for rank, (other, number) in enumerate(numbers) if other == kind]
        if others := [rank for rank, number in own if number != own[0][1]]:
            return others, own[0][0]
    return None


def ranks(numbers: Sequence[int]) -> str:
    """Return ranks in words.

    >>> ranks([1]), ranks(range(9))
    ('rank 1', 'ranks 0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
