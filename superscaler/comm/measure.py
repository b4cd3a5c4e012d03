"""Measured times of the collectives that plans run, as a rank on this machine."""

import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from superscaler.comm.communicator import Group
from superscaler.comm.distributed import DistributedCommunicator, connect
from superscaler.errors import RuntimeFailure

# Bytes of the source of each device; a collective moves a multiple of them.
_SIZES = {"cpu": (2**10, 2**13, 2**16, 2**19, 2**22), "cuda": (2**12, 2**16, 2**20, 2**23, 2**26)}
# The first runs make connections and buffers.
_WARM, _REPEATS = 3, 21


def probe(backend: str) -> None:
    """Sum numbers over all ranks with gloo or nccl. Raises RuntimeFailure if that does not work."""
    if backend == "gloo":
        # This rank sees no GPU.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    communicator = connected()
    everyone = tuple(range(communicator.world))
    x = torch.full((1024,), communicator.rank + 1.0, device=communicator.device)
    total = float(communicator.all_reduce(x, everyone).wait()[0])
    if total != sum(k + 1 for k in everyone):
        raise RuntimeFailure(f"the sum of 1 to {len(everyone)} over all ranks came out as {total}.")
    communicator.close()


def measure() -> list[dict[str, Any]]:
    """Return `kind`, `group`, `size` (bytes of each source) and `seconds` of collectives of all ranks.

    Seconds are the first quartile over repetitions, each that of its slowest rank: other processes can only add to
    them.
    """
    communicator = connected()
    everyone = tuple(range(communicator.world))
    communicator.prepare([everyone])
    found: list[dict[str, Any]] = []
    for size in _SIZES[communicator.device.type]:
        x = torch.ones(size // 4, device=communicator.device)
        # Chunks are equal; a remainder that the number of processes does not divide is left out.
        even = x[: len(x) // len(everyone) * len(everyone)]
        for kind, (group, run, source) in _runs(communicator, everyone, x, even).items():
            seconds = _time(communicator, run)
            found.append({"kind": kind.split()[0], "group": group, "size": source.nbytes, "seconds": seconds})
    communicator.close()
    return found


def connected() -> DistributedCommunicator:
    try:
        return connect(timeout=60.0)
    except RuntimeError as error:
        raise RuntimeFailure(f"torch.distributed does not start: {str(error).strip().splitlines()[0]}") from None


def _runs(
    c: DistributedCommunicator, everyone: Group, x: Tensor, even: Tensor
) -> dict[str, tuple[Group, Callable[[], Any], Tensor]]:
    # By name; the first word of a name is the kind.
    return {
        "all_reduce": (everyone, lambda: c.all_reduce(x, everyone, owned=True).wait(), x),
        "all_gather": (everyone, lambda: c.all_gather(x, everyone, 0).wait(), x),
        "reduce_scatter": (everyone, lambda: c.reduce_scatter(even, everyone, 0).wait(), even),
        "all_to_all": (everyone, lambda: c.all_to_all(even, everyone, 0, 0).wait(), even),
        "broadcast": (
            everyone,
            lambda: c.broadcast(x if c.rank == 0 else None, 0, everyone, x.shape, x.dtype).wait(),
            x,
        ),
        "send": ((0, 1), lambda: _swap(c, x), x),
        "send inside": ((0, 0), lambda: x.clone(), x),
    }


def _swap(c: DistributedCommunicator, x: Tensor) -> None:
    """Send both ways simultaneously, as exchanges do: processes on one machine share a link."""
    if c.rank < 2:
        with c.together():
            c.send(x, 1 - c.rank, 0, owned=True)
            work = c.recv(x.shape, x.dtype, 1 - c.rank, 0)
        work.wait()
        c.flush()


def _time(c: DistributedCommunicator, run: Callable[[], Any]) -> float:
    times = []
    for _ in range(_WARM + _REPEATS):
        c.barrier()
        _finish(c)
        start = time.perf_counter()
        run()
        _finish(c)
        times.append(time.perf_counter() - start)
    everyone = tuple(range(c.world))
    mine = torch.tensor([times[_WARM:]], dtype=torch.float64, device=c.device)
    slowest = c.all_gather(mine, everyone, 0).wait().amax(0)
    return float(slowest.quantile(0.25))


def _finish(c: DistributedCommunicator) -> None:
    if c.device.type == "cuda":
        torch.cuda.synchronize(c.device)
