"""Copies between a device and the memory of its host: on a GPU beside its work, from and to pinned memory."""

from __future__ import annotations

import torch
from torch import Tensor

from superscaler.runtime.communicator import Later, Work


class Copies:
    """The copies of a rank, each way on a stream of its own. On a CPU, of one memory, they are made at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        is_cuda = device.type == "cuda"
        self.streams = {to_host: torch.cuda.Stream(device) for to_host in (True, False)} if is_cuda else {}

    def start(self, x: Tensor, to_host: bool) -> Work:
        """Start to copy what the device makes, or what is on the host; `x` may be freed at once."""
        if not self.streams:
            made = x.detach().clone()
            return Later(lambda: made)
        stream = self.streams[to_host]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        made = torch.empty(x.shape, dtype=x.dtype, device="cpu" if to_host else self.device, pin_memory=to_host)
        with torch.cuda.stream(stream):
            made.copy_(x.detach(), non_blocking=True)
            done = stream.record_event()
        # The memory of the device is not given to others before the copy is done; of pinned memory torch knows.
        (x if to_host else made).record_stream(stream)

        def wait() -> Tensor:
            # The CPU reads what is on the host, the device's own stream what is on the device.
            done.synchronize() if to_host else torch.cuda.current_stream(self.device).wait_event(done)
            return made

        return Later(wait)

    def flush(self) -> None:
        """Wait until all copies are done."""
        for stream in self.streams.values():
            stream.synchronize()
