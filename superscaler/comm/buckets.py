"""Several tensors in one collective: flattened and joined, each with its own range of the result."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from superscaler.comm.communicator import Communicator, Group, Handle, Later, padded, split, trimmed

Tensors = Sequence[Tensor]
Dims = Sequence[int]
Handles = tuple[Handle, ...]
# Per tensor: the sizes of its uneven chunks, or none.
Sizes = Sequence[Sequence[int]]


def all_reduce(communicator: Communicator, tensors: Tensors, group: Group, largest: bool = False) -> Handles:
    """Sum several tensors as one; the results are views of one buffer."""
    work = communicator.all_reduce(torch.cat([x.reshape(-1) for x in tensors]), group, owned=True, largest=largest)
    return _views(work, [x.numel() for x in tensors])


def reduce(communicator: Communicator, tensors: Tensors, group: Group, root: int) -> Handles:
    """Sum several tensors as one, for the rank at place `root` of the group."""
    work = communicator.reduce(torch.cat([x.reshape(-1) for x in tensors]), group, root, owned=True)
    return _views(work, [x.numel() for x in tensors])


def all_gather(
    communicator: Communicator, tensors: Tensors, group: Group, dims: Dims, sizes: Sizes = (), wire: str = "",
    rounded: str = "",
) -> Handles:  # fmt: skip
    """Gather several tensors as one, each along its own dim, uneven chunks by its own `sizes` there. `wire`: the dtype
    in which they are sent; each rank rounds its own chunks, too. `rounded`: that in which they are sent, and stay.
    """
    communicator.settle()
    sizes, into = sizes or [()] * len(tensors), getattr(torch, rounded) if rounded else tensors[0].dtype
    tensors = [x.to(getattr(torch, wire)) for x in tensors] if wire else tensors
    tensors = [padded(x, d, max(s)) if s else x for x, d, s in zip(tensors, dims, sizes, strict=True)]
    flat = [x.detach().reshape(-1) for x in tensors]
    # One copy joins and rounds.
    joined = tensors[0].new_empty(sum(x.numel() for x in flat), dtype=into) if rounded else None
    work = communicator.all_gather(torch.cat(flat, out=joined), group, 0)
    rows = _then(work, lambda gathered: gathered.reshape(len(group), -1))
    pieces = _views(rows, [x.numel() for x in tensors])
    ways = ((x.shape, d, s) for x, d, s in zip(tensors, dims, sizes, strict=True))
    return tuple(_then(piece, partial(_gathered, *way, into)) for piece, way in zip(pieces, ways, strict=True))


def reduce_scatter(
    communicator: Communicator, tensors: Tensors, group: Group, dims: Dims, sizes: Sizes = (), wire: str = ""
) -> Handles:
    """Sum several tensors as one, each scattered along its own dim; the results are views of one buffer.

    `wire`: the dtype in which they are sent; they are added in their own.
    """
    communicator.settle()
    sizes, mine = sizes or [()] * len(tensors), group.index(communicator.rank)
    chunks = [_chunks(x, group, dim, some) for x, dim, some in zip(tensors, dims, sizes, strict=True)]
    narrow, into = (getattr(torch, wire), tensors[0].dtype) if wire else (tensors[0].dtype, None)
    joined = torch.cat([some.flatten(1).to(narrow) for some in chunks], 1)
    work = communicator.reduce_scatter(joined.reshape(-1), group, 0, into=into)
    views = _views(work, [some[0].numel() for some in chunks])
    ways = ((x.shape[1:], d, s[mine]) if s else () for x, d, s in zip(chunks, dims, sizes, strict=True))
    return tuple(_then(v, partial(_kept, *way)) if way else v for v, way in zip(views, ways, strict=True))


def _then(work: Handle, function: Callable[[Tensor], Tensor]) -> Handle:
    """Return a handle whose result is `function` of another handle's result."""
    return Later(lambda: function(work.wait()))


def _views(work: Handle, sizes: Sequence[int]) -> Handles:
    """Return ranges of the last dim of a result, one after the other."""
    return tuple(
        _then(work, partial(torch.narrow, dim=-1, start=end - size, length=size))
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    )


def _chunks(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return the chunks of `dim`, uneven ones padded: [count, ...]."""
    if sizes:
        return torch.stack(split(x, len(group), dim, f"reduce_scatter over ranks {group}", sizes))
    return x.unflatten(dim, (len(group), -1)).movedim(dim, 0)


def _kept(shape: Sequence[int], dim: int, size: int, padded: Tensor) -> Tensor:
    return padded.reshape(shape).narrow(dim, 0, size)


def _gathered(shape: Sequence[int], dim: int, sizes: Sequence[int], into: torch.dtype, rows: Tensor) -> Tensor:
    """Return flattened tensors [count, elements] concatenated along `dim`, those of `sizes` without their padding."""
    chunks = rows.reshape(-1, *shape)
    return (trimmed(chunks, dim, sizes) if sizes else chunks.movedim(0, dim).flatten(dim, dim + 1)).to(into)
