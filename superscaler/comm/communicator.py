"""Communication between ranks: the interface that emitted code calls, and the code shared by its implementations.

A group is a tuple of ranks in *plan order*: its k-th entry owns the k-th chunk. The order need not be ascending.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from superscaler.errors import RuntimeFailure
from superscaler.ir.communication import links

Group = tuple[int, ...]
Shape = Sequence[int]
Finish = Callable[[Sequence[Tensor]], Tensor]


class PeerLost(RuntimeFailure):
    """A message could not be exchanged because another rank ended; this is never the root cause."""


class Handle(Protocol):
    """A started operation. `wait` returns its result; it may be called again."""

    def wait(self) -> Tensor: ...


class Later:
    """An operation whose result is computed at the first `wait`."""

    def __init__(self, get: Callable[[], Tensor]) -> None:
        self._get: Callable[[], Tensor] | None = get

    def wait(self) -> Tensor:
        if self._get is not None:
            self._result = self._get()
            self._get = None
        return self._result


class Communicator(ABC):
    """Asynchronous messages between `world` ranks. Every rank of a group calls the same operations in the same order.

    No operation changes its input. The caller may overwrite the input of a collective after `wait`; that of a
    broadcast, or of an operation with a result on another rank only, after `flush`; that of `send` after the call,
    unless it is `owned`. In a group of one rank the result may be the input.

    `moved`: bytes of the plan that this rank put on links since the start. `bytes_outside_plan`: those of reductions of
    the loss, the gradient norm and the finite check. Errors start with `prefix`.
    """

    rank: int
    world: int
    device: torch.device
    prefix = ""
    moved = 0
    bytes_outside_plan = 0

    def set_if_unset(self, name: str, value: str) -> str:
        """Return the first value of a name since the launch, over restarts; set it (not empty) if there is none."""
        return value

    def sum_of_all(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, which is no part of the plan."""
        return x if self.world == 1 else self.all_reduce(x, tuple(range(self.world)), planned=False).wait()

    def first_text(self, text: str) -> str:
        """Return, on all ranks, the text of the first rank with one; '' if no rank has any."""
        data = text.encode()
        lengths = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(data)
        found = self.sum_of_all(lengths).tolist()
        first = next((rank for rank, length in enumerate(found) if length), None)
        if first is None:
            return ""
        letters = torch.zeros(found[first], dtype=torch.int64, device=self.device)
        if first == self.rank:
            letters += torch.tensor(list(data), device=self.device)
        return bytes(self.sum_of_all(letters).tolist()).decode()

    def all_reduce(
        self, x: Tensor, group: Group, *, owned: bool = False, planned: bool = True, largest: bool = False
    ) -> Handle:
        """Sum, or take the `largest`, the same bits everywhere. `owned`: x may be replaced; `planned`: by the plan."""
        if len(group) == 1:
            return Later(lambda: x if owned else x.detach().clone())
        return self._reduce(self._enter("all_reduce", group, x.shape, x.dtype, planned), group, x, owned, largest)

    def all_gather(self, x: Tensor, group: Group, dim: int, sizes: Sequence[int] = (), rounded: str = "") -> Handle:
        """Concatenate the ranks' chunks along `dim` in group order; those of uneven `sizes` are sent with padding.
        `rounded`: the dtype that chunks get before.
        """
        x = x.detach().to(getattr(torch, rounded)) if rounded else x
        if len(group) == 1:
            return Later(lambda: x)
        if not sizes:
            return self._gather(self._enter("all_gather", group, x.shape, x.dtype), group, x, dim)
        x = padded(x, dim, max(sizes))
        # Stacked, so that one copy moves all.
        work = self._gather(self._enter("all_gather", group, x.shape, x.dtype), group, x[None], 0)
        return Later(lambda: trimmed(work.wait(), dim, sizes))

    def reduce_scatter(
        self, x: Tensor, group: Group, dim: int, sizes: Sequence[int] = (), into: torch.dtype | None = None
    ) -> Handle:
        """Sum over the group and keep my chunk of `dim`: equal chunks, or chunks of `sizes` (sent with padding).

        `into`: the dtype in which chunks are added (default: that of x).
        """
        if len(group) == 1:
            return Later(lambda: x if into is None else x.to(into))
        shape = list(x.shape)
        shape[dim] = max(sizes, default=0) * len(sizes) or shape[dim]
        what = self._enter("reduce_scatter", group, shape, x.dtype)
        chunks = split(x, len(group), dim, what, sizes)
        # Backends add in the dtype of what travels.
        added = None if into is None else self._swap(what, group, chunks, lambda parts: sum_in_order(parts, into))
        work = self._scatter(what, group, chunks) if added is None else added
        return Later(lambda: work.wait().narrow(dim, 0, sizes[group.index(self.rank)])) if sizes else work

    def all_to_all(self, x: Tensor, group: Group, split_dim: int, concat_dim: int) -> Handle:
        """Send the k-th chunk of `split_dim` to the k-th rank; concatenate the received chunks along `concat_dim`."""
        if len(group) == 1:
            return Later(lambda: x)
        what = self._enter("all_to_all", group, x.shape, x.dtype)
        return self._swap(what, group, split(x, len(group), split_dim, what), lambda parts: join(parts, concat_dim))

    def reduce(self, x: Tensor, group: Group, root: int, *, owned: bool = False) -> Handle:
        """Sum over the group for the rank at place `root`; the result of other ranks is undefined."""
        if len(group) == 1:
            return Later(lambda: x)
        return self._reduce(self._enter("reduce", group, x.shape, x.dtype), group, x, owned, root=root)

    def rd_gather(self, x: Tensor, group: Group, root: int, dim: int) -> Handle:
        """Concatenate equal chunks along `dim`, in group order, on the rank at place `root`; undefined elsewhere."""
        if len(group) == 1:
            return Later(lambda: x)
        return self._gather(self._enter("rd_gather", group, x.shape, x.dtype), group, x, dim, root)

    def broadcast(self, x: Tensor | None, source: int, group: Group, shape: Shape, dtype: torch.dtype) -> Handle:
        """Give x of rank `source` to all ranks of the group; the others pass None."""
        position(source, group, f"broadcast over ranks {group}")
        if self.rank != source:
            buffer = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        elif x is not None and tuple(x.shape) == tuple(shape) and x.dtype == dtype:
            buffer = x.detach().contiguous()
        else:
            found = "nothing" if x is None else f"{tuple(x.shape)} {x.dtype}"
            raise RuntimeFailure(
                f"broadcast over ranks {group}: its source, rank {source}, must give {tuple(shape)} {dtype}, not "
                f"{found}."
            )
        if len(group) == 1 and self.rank == source:
            return Later(lambda: buffer)
        return self._spread(self._enter("broadcast", group, shape, dtype), group, buffer, source)

    def send(self, x: Tensor, peer: int, tag: int, *, owned: bool = False) -> None:
        """Start to send. Messages match in order per pair of ranks; `owned`: x stays unchanged until `flush`."""
        what = self._meet("send to", peer)
        self.moved += x.nbytes
        self._send(what, x, peer, tag, owned)

    def recv(self, shape: Shape, dtype: torch.dtype, peer: int, tag: int) -> Handle:
        """Start to receive the message that `peer` sent with the same tag."""
        return self._recv(self._meet("recv from", peer), tuple(shape), dtype, peer, tag)

    @abstractmethod
    def settle(self) -> None:
        """Free the buffers of operations that have ended, though nobody has read their results."""

    @abstractmethod
    def prepare(self, groups: Sequence[Group]) -> None:
        """Create the groups. All ranks call it with the same groups before the first collective over them."""

    @abstractmethod
    def together(self) -> AbstractContextManager[None]:
        """Start the sends and receives of a `with` block together at its end, in any order."""

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks reach this call."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until all sends of this rank are done, and free their buffers."""

    @abstractmethod
    def close(self) -> None:
        """Flush, wait for all ranks to do so, and leave. The communicator cannot be used afterwards."""

    # The operations in groups of two ranks or more; `what` names them in errors. With a `root`, only the rank at that
    # place has a result.

    @abstractmethod
    def _reduce(
        self, what: str, group: Group, x: Tensor, owned: bool, largest: bool = False, root: int | None = None
    ) -> Handle: ...

    @abstractmethod
    def _gather(self, what: str, group: Group, x: Tensor, dim: int, root: int | None = None) -> Handle: ...

    @abstractmethod
    def _swap(self, what: str, group: Group, chunks: Sequence[Tensor], finish: Finish) -> Handle:
        """Send the k-th chunk to the k-th rank; `finish` makes the result of the received chunks, in group order."""

    def _scatter(self, what: str, group: Group, chunks: Sequence[Tensor]) -> Handle:
        return self._swap(what, group, chunks, sum_in_order)

    @abstractmethod
    def _spread(self, what: str, group: Group, buffer: Tensor, source: int) -> Handle:
        """Copy the buffer of the source to all ranks."""

    @abstractmethod
    def _send(self, what: str, x: Tensor, peer: int, tag: int, owned: bool) -> None: ...

    @abstractmethod
    def _recv(self, what: str, shape: tuple[int, ...], dtype: torch.dtype, peer: int, tag: int) -> Handle: ...

    def _enter(self, operation: str, group: Group, shape: Shape, dtype: torch.dtype, planned: bool = True) -> str:
        """Count this rank's part of a collective with sources of this shape; return its name for errors."""
        what = f"{self.prefix}{operation} of {tuple(shape)} {dtype} over ranks {group}"
        mine = share(operation, prod(shape) * dtype.itemsize, len(group), position(self.rank, group, what))
        self.moved += mine * planned
        self.bytes_outside_plan += mine * (not planned)
        return what

    def _meet(self, operation: str, peer: int) -> str:
        what = f"{self.prefix}{operation} rank {peer}"
        if peer == self.rank or not 0 <= peer < self.world:
            raise RuntimeFailure(f"{what}: the peer must be another of the {self.world} ranks.")
        return what


def share(kind: str, size: int, p: int, k: int) -> int:
    """Return the bytes that the k-th of `p` ranks puts on links in a collective with sources of `size` bytes.

    Ranks have equal shares up to rounding; their sum is the result of `links`.

    >>> [share("all_reduce", 5, 4, k) for k in range(4)]
    [7, 8, 7, 8]
    """
    total = size * links(kind, p)
    return total * (k + 1) // p - total * k // p


def position(rank: int, group: Group, what: str) -> int:
    """Return the chunk of the group that the rank owns."""
    if len(set(group)) != len(group) or rank not in group:
        raise RuntimeFailure(f"{what}: rank {rank} must be in the group, and every rank once.")
    return group.index(rank)


def split(x: Tensor, parts: int, dim: int, what: str, sizes: Sequence[int] = ()) -> list[Tensor]:
    """Return equal contiguous chunks of `dim`; chunks of uneven `sizes` are padded."""
    if sizes:
        return [padded(chunk, dim, max(sizes)).contiguous() for chunk in x.detach().split(list(sizes), dim)]
    if x.shape[dim] % parts:
        raise RuntimeFailure(
            f"{what}: dim {dim} of a tensor of shape {tuple(x.shape)} has size {x.shape[dim]}, "
            f"which {parts} ranks do not divide; pad it or move the pieces by send and recv."
        )
    return [chunk.contiguous() for chunk in x.detach().chunk(parts, dim)] if parts > 1 else [x.detach().contiguous()]


def join(parts: Sequence[Tensor], dim: int) -> Tensor:
    """Concatenate along `dim`; one part is returned as it is."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def padded(x: Tensor, dim: int, size: int) -> Tensor:
    """Return x, padded with zeros along `dim` to `size`."""
    if x.shape[dim] == size:
        return x
    shape = list(x.shape)
    shape[dim] = size - shape[dim]
    return torch.cat([x.detach(), x.new_zeros(shape)], dim)


def trimmed(chunks: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Return padded chunks [count, ...] without their padding, concatenated along `dim`."""
    return join([chunk.narrow(dim, 0, size) for chunk, size in zip(chunks, sizes, strict=True)], dim)


def to_plan_order(rows: Tensor, group: Group) -> list[Tensor]:
    """Return rows in the order of the group, from rows in ascending order of the ranks."""
    ascending = sorted(group)
    return [rows[ascending.index(rank)] for rank in group]


def from_plan_order(chunks: Sequence[Tensor], group: Group) -> Tensor:
    """Return chunks stacked in ascending order of the ranks, from chunks in the order of the group.

    Chunks that lie in memory so already are not copied.
    """
    ordered = [chunks[group.index(rank)] for rank in sorted(group)]
    first, size = ordered[0], ordered[0].numel()
    lie = [(x.untyped_storage()._cdata, x.storage_offset()) for x in ordered]
    is_stacked = lie == [(lie[0][0], lie[0][1] + k * size) for k in range(len(ordered))]
    if is_stacked and all(x.is_contiguous() for x in ordered):
        return first.as_strided((len(ordered), *first.shape), (size, *first.stride()))
    return torch.stack(ordered)


def sum_in_order(parts: Sequence[Tensor], into: torch.dtype | None = None) -> Tensor:
    """Return the sum, added from first to last, halves in float32: the same bits on every rank. `into`: the dtype in
    which it is added and returned.
    """
    dtype = parts[0].dtype
    wide = into or (torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(into or dtype)
