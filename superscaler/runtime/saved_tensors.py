"""Tensors that a backward reads again from elsewhere: weights gathered anew, copies in the host's memory."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from superscaler.comm.communicator import Handle, Later


def storage_of(x: Tensor) -> int:
    """Return the identity of the storage of a tensor. Another tensor may get it once the storage is freed."""
    return x.untyped_storage()._cdata


class RegatheredTensors:
    """The regathered weights of a tape: saved tensors that are such weights, or views of them, are made anew."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.given: Sequence[Tensor] = ()
        self._strides = [w.stride() for w in weights]
        self._offset = [w.storage_offset() for w in weights]
        self._at = {storage_of(w): n for n, w in reversed(list(enumerate(weights)))}

    def hooks(self) -> AbstractContextManager[Any]:
        """Return a context in which the forward runs."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def give(self, weights: Sequence[Tensor]) -> None:
        """Set the weights for the backward."""
        self.given = [_strided(x, strides) for x, strides in zip(weights, self._strides, strict=True)]

    def _pack(self, x: Tensor) -> Any:
        n = self._at.get(storage_of(x))
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


class Copies:
    """The copies of a rank, each direction on a stream of its own. On a CPU they are synchronous."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self.streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)} if is_cuda else {}

    def start(self, x: Tensor, to_host: bool) -> Handle:
        """Start a copy to the host or to the device; `x` may be freed after the call."""
        if not self.streams:
            made = x.detach().clone()
            return Later(lambda: made)
        stream = self.streams[to_host]
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
        for stream in self.streams.values():
            stream.synchronize()
