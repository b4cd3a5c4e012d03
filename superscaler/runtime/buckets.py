"""Several tensors in one collective: flattened and joined, each its own range of what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from superscaler.runtime.communicator import Communicator, Group, Later, Work


def all_reduce(communicator: Communicator, tensors: Sequence[Tensor], group: Group) -> tuple[Work, ...]:
    """Sum several tensors as one; the results are views of what came back."""
    work = communicator.all_reduce(torch.cat([x.reshape(-1) for x in tensors]), group, owned=True)
    return _views(work, [x.numel() for x in tensors])


def all_gather(
    communicator: Communicator, tensors: Sequence[Tensor], group: Group, dims: Sequence[int]
) -> tuple[Work, ...]:
    """Gather several tensors as one, each along its own dim."""
    work = communicator.all_gather(torch.cat([x.reshape(-1) for x in tensors]), group, 0)
    rows = _then(work, lambda gathered: gathered.reshape(len(group), -1))
    pieces = _views(rows, [x.numel() for x in tensors])
    return tuple(_then(p, partial(_gathered, x.shape, d)) for p, x, d in zip(pieces, tensors, dims, strict=True))


def reduce_scatter(
    communicator: Communicator, tensors: Sequence[Tensor], group: Group, dims: Sequence[int]
) -> tuple[Work, ...]:
    """Sum several tensors as one, each scattered along its own dim; the results are views of what came back."""
    chunks = [_chunks(x, len(group), dim) for x, dim in zip(tensors, dims, strict=True)]
    work = communicator.reduce_scatter(torch.cat(chunks, 1).reshape(-1), group, 0)
    return _views(work, [some.shape[1] for some in chunks])


def _then(work: Work, function: Callable[[Tensor], Tensor]) -> Work:
    """Return what is made of the result of another operation."""
    return Later(lambda: function(work.wait()))


def _views(work: Work, sizes: Sequence[int]) -> tuple[Work, ...]:
    """Return ranges of the last dim of a result, one after the other."""
    return tuple(
        _then(work, partial(torch.narrow, dim=-1, start=end - size, length=size))
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    )


def _chunks(x: Tensor, count: int, dim: int) -> Tensor:
    """Return the chunks of `dim`, flattened: [count, elements]."""
    return x.unflatten(dim, (count, -1)).movedim(dim, 0).reshape(count, -1)


def _gathered(shape: Sequence[int], dim: int, rows: Tensor) -> Tensor:
    """Return flattened tensors [count, elements] concatenated along `dim`."""
    return rows.reshape(-1, *shape).movedim(0, dim).flatten(dim, dim + 1)
