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
_SIZES = {"cpu": (2**10, 2**13, 2**16, 2**19, 2**22, 2**24), "cuda": (2**12, 2**16, 2**20, 2**23, 2**26)}
# The first runs make connections and buffers.
_WARM, _REPEATS = 3, 15
# The longest of so many repetitions does not count: another process ran.
_DROPPED = 7
# The sides of a product and the elements of a tensor that are some milliseconds of work, and fill caches.
_SIDE, _ELEMENTS = 512, 2**22


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


def measure(count: str = "6", repeats: str = str(_REPEATS)) -> list[dict[str, Any]]:
    """Return measured collectives of all ranks: `kind`, `group`, `size` (bytes of each source); the seconds of their
    `start`, `seconds` from then on, and those added to work `beside` them. They are of the first so many sizes, and so
    many repetitions.

    On a CPU communication needs the cores that compute, and finds caches full and ranks late. There, seconds are those
    added to the usual work of a rank before it, if they are more than those without work. Seconds are means over
    repetitions, each that of its slowest rank: a step has many, so that it takes the sum of their means.
    """
    communicator = connected()
    everyone = tuple(range(communicator.world))
    communicator.prepare([everyone])
    work = _work() if communicator.device.type == "cpu" else None
    found: list[dict[str, Any]] = []
    for size in _SIZES[communicator.device.type][: int(count)]:
        x = torch.ones(size // 4, device=communicator.device)
        # Chunks are equal; a remainder that the number of processes does not divide is left out.
        even = x[: len(x) // len(everyone) * len(everyone)]
        for kind, (group, start, source) in _runs(communicator, everyone, x, even).items():
            times = _time(communicator, start, work if len(set(group)) > 1 else None, int(repeats))
            if kind == "send":
                # Of a pair, which sends and receives.
                times["start"] /= 2
            found.append({"kind": kind.split()[0], "group": group, "size": source.nbytes, **times})
    communicator.close()
    return found


def connected() -> DistributedCommunicator:
    try:
        return connect(timeout=60.0)
    except RuntimeError as error:
        raise RuntimeFailure(f"torch.distributed does not start: {str(error).strip().splitlines()[0]}") from None


# Starts a collective; returns its wait.
_Start = Callable[[], Callable[[], Any]]


def _runs(
    c: DistributedCommunicator, everyone: Group, x: Tensor, even: Tensor
) -> dict[str, tuple[Group, _Start, Tensor]]:
    # By name; the first word of a name is the kind.
    return {
        "all_reduce": (everyone, lambda: c.all_reduce(x, everyone, owned=True).wait, x),
        "all_gather": (everyone, lambda: c.all_gather(x, everyone, 0).wait, x),
        "reduce_scatter": (everyone, lambda: c.reduce_scatter(even, everyone, 0).wait, even),
        "all_to_all": (everyone, lambda: c.all_to_all(even, everyone, 0, 0).wait, even),
        "broadcast": (
            everyone,
            lambda: c.broadcast(x if c.rank == 0 else None, 0, everyone, x.shape, x.dtype).wait,
            x,
        ),
        "send": ((0, 1), lambda: _swap(c, x), x),
        "send inside": ((0, 0), lambda: x.clone, x),
    }


def _swap(c: DistributedCommunicator, x: Tensor) -> Callable[[], Any]:
    """Send both ways simultaneously, as exchanges do: processes on one machine share a link."""
    if c.rank > 1:
        return lambda: None
    with c.together():
        c.send(x, 1 - c.rank, 0, owned=True)
        work = c.recv(x.shape, x.dtype, 1 - c.rank, 0)

    def finish() -> None:
        work.wait()
        c.flush()

    return finish


def _work() -> Callable[[], None]:
    """Return work as in training: a product, and a tensor that no cache holds."""
    x, y = torch.ones(_SIDE, _SIDE), torch.ones(_ELEMENTS)

    def run() -> None:
        torch.mm(x, x)
        y.add_(1.0)

    return run


def _time(c: DistributedCommunicator, start: _Start, work: Callable[[], None] | None, repeats: int) -> dict[str, float]:
    """Return the seconds of a collective, and those that it adds to work beside it; both alike without work."""

    def alone() -> None:
        start()()

    if work is None:
        (seconds,), _ = _means(c, repeats, alone)
        return {"seconds": seconds, "beside": seconds, "start": 0.0}
    run = work

    def after() -> None:
        run()
        alone()

    def beside() -> None:
        finish = start()
        run()
        finish()

    (seconds, idle, late, both, begun), (_, usual, *_) = _means(c, repeats, alone, run, after, beside, start)
    whole = max(seconds, late - usual)
    return {"seconds": max(whole - begun, 0.1 * whole), "beside": max(0.0, both - idle - begun), "start": begun}


def _means(c: DistributedCommunicator, repeats: int, *runs: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Return the seconds of functions that run in turns, without the functions that they return: those of the slowest
    rank, and those of all ranks on average.
    """
    times = [[_seconds(c, run) for run in runs] for _ in range(_WARM + repeats)]
    mine = torch.tensor([times[_WARM:]], dtype=torch.float64, device=c.device)
    ranks = c.all_gather(mine, tuple(range(c.world)), 0).wait()
    slowest, usual = (
        x.sort(0).values[: repeats - repeats // _DROPPED].mean(0).tolist() for x in (ranks.amax(0), ranks.mean(0))
    )
    return slowest, usual


def _seconds(c: DistributedCommunicator, run: Callable[[], Any]) -> float:
    c.barrier()
    _finish(c)
    start = time.perf_counter()
    rest = run()
    _finish(c)
    seconds = time.perf_counter() - start
    if rest is not None:
        rest()
    return seconds


def _finish(c: DistributedCommunicator) -> None:
    if c.device.type == "cuda":
        torch.cuda.synchronize(c.device)
