"""Tensors that a backward reads again from elsewhere: weights gathered anew, tapes and copies in the host's memory."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks

from superscaler.comm.communicator import Handle, Later


def storage_of(x: Tensor) -> int:
    """Return the identity of the storage of a tensor. Another tensor may get it once the storage is freed."""
    return x.untyped_storage()._cdata


class Kept:
    """A saved tensor that its node holds through this. `once`: it is freed when the node has read it."""

    __slots__ = ("once", "x")

    def __init__(self, x: Tensor) -> None:
        self.x: Tensor | None = x
        self.once = False

    def take(self) -> Tensor | None:
        x = self.x
        if self.once:
            self.x = None
        return x


def kept_by(nodes: Iterable[Node]) -> Iterator[tuple[Node, Kept]]:
    """Yield the saved tensors of nodes, each with its node, which no longer holds it by itself."""
    for node in nodes:
        for name in _names(type(node)):
            some = getattr(node, name)
            for one in some if isinstance(some, tuple) else (some,):
                # Neither numbers nor the state of a user's own hooks.
                if isinstance(one.data, Tensor) and one.data.dim() and one.unpack_hook is None:
                    one.register_hooks(Kept, Kept.take)
                if isinstance(one.data, Kept):
                    yield node, one.data


@functools.cache
def _names(kind: type) -> list[str]:
    return [name for name in dir(kind) if name.startswith("_raw_saved_")]


class MovedTape:
    """The saved tensors of a tape, which are copied to the host and back. Views of one storage stay that."""

    def __init__(self, kept: Sequence[Kept]) -> None:
        self._kept = kept
        self._works: list[Handle] = []
        # The number of the storage of each tensor, its dtype and its place there.
        self._views: list[tuple[Kept, int, tuple[Any, ...]]] = []

    def offload(self, copies: Copies, alive: Iterable[Tensor]) -> None:
        """Copy the tensors to the host, but for those that share memory with `alive` ones, and free them. The largest
        is copied last. Tensors that came back since an earlier call are copied again.
        """
        self.arrive()
        stays, numbers = set(map(storage_of, alive)), dict[int, int]()
        held = [(kept, x) for kept in self._kept if (x := kept.x) is not None and x.dim()]
        moved = [(kept, x) for kept, x in held if storage_of(x) not in stays]
        for kept, x in sorted(moved, key=lambda pair: pair[1].untyped_storage().nbytes()):
            n = numbers.setdefault(storage_of(x), len(numbers))
            if n == len(self._works):
                whole = x.new_empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                self._works.append(copies.start(whole, to_host=True))
            self._views.append((kept, n, (x.dtype, x.storage_offset(), x.size(), x.stride())))
        for kept, _ in moved:
            kept.x = None

    def fetch(self, copies: Copies) -> None:
        """Start to copy the tensors back."""
        self._works = [copies.start(work.wait(), to_host=False) for work in self._works]

    def arrive(self) -> None:
        """Give the nodes their tensors."""
        storages = [work.wait().untyped_storage() for work in self._works]
        for kept, n, (dtype, *form) in self._views:
            kept.x = torch.empty(0, dtype=dtype, device=storages[n].device).set_(storages[n], *form)
        self._works, self._views = [], []


class RegatheredTensors:
    """The regathered weights of a tape: saved tensors that are such weights, or views of them, are made anew."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.given: Sequence[Tensor] = ()
        self._strides = [w.stride() for w in weights]
        self._offset = [w.storage_offset() for w in weights]
        self._dtypes = [w.dtype for w in weights]
        self._at = {storage_of(w): n for n, w in reversed(list(enumerate(weights)))}

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context in which the forward runs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def give(self, weights: Sequence[Tensor]) -> None:
        """Set the weights for the backward."""
        ways = zip(weights, self._dtypes, self._strides, strict=True)
        self.given = [strided(x.to(dtype), strides) for x, dtype, strides in ways]

    def _pack(self, x: Tensor) -> Any:
        n = self._at.get(storage_of(x))
        return Kept(x) if n is None else (n, x.size(), x.stride(), x.storage_offset() - self._offset[n])

    def _unpack(self, kept: Any) -> Any:
        if isinstance(kept, Kept):
            return kept.take()
        n, size, stride, offset = kept
        whole = self.given[n]
        return whole.as_strided(size, stride, whole.storage_offset() + offset)


def strided(x: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a tensor with these strides."""
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.size(), strides, dtype=x.dtype, device=x.device).copy_(x)


class Copies:
    """The copies of a rank, each direction on a stream of its own. On a CPU they are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self.streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)} if is_cuda else {}
        # Those with copies since the last flush.
        self._busy: set[torch.cuda.Stream] = set()

    def start(self, x: Tensor, to_host: bool) -> Handle:
        """Start a copy to the host or to the device; `x` may be freed after the call."""
        if not self.streams:
            made = x.detach().clone()
            return Later(lambda: made)
        stream = self.streams[to_host]
        self._busy.add(stream)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        made = torch.empty(x.shape, dtype=x.dtype, device="cpu" if to_host else self.device, pin_memory=to_host)
        with torch.cuda.stream(stream):
            made.copy_(x.detach(), non_blocking=True)
            done = stream.record_event()
        # The device's memory is not reused before the copy is done. Torch itself protects pinned memory.
        (x if to_host else made).record_stream(stream)

        def wait() -> Tensor:
            # The CPU reads tensors on the host; the device's own stream reads tensors on the device.
            done.synchronize() if to_host else torch.cuda.current_stream(self.device).wait_event(done)
            return made

        return Later(wait)

    def flush(self) -> None:
        """Wait until all copies are done."""
        for stream in self._busy:
            stream.synchronize()
        self._busy.clear()
