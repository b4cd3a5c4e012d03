"""Time the collectives that plans run, on the processes of this machine."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from superscaler.errors import RuntimeFailure
from superscaler.runtime.communicator import Group
from superscaler.runtime.distributed import DistributedCommunicator, connect
from superscaler.runtime.launch import launch

# Bytes of a device's source; what is moved in all is some times more.
_SIZES = {"cpu": (2**10, 2**13, 2**16, 2**19, 2**22), "cuda": (2**12, 2**16, 2**20, 2**23, 2**26)}
# The first ones make connections and buffers.
_WARM, _REPEATS = 3, 21

# A rank whose backend is gloo sees no GPU.
_RUN = '''"""One rank of a measurement."""

import os
import sys
from pathlib import Path

if sys.argv[2] == "gloo":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

from superscaler.runtime import measure
from superscaler.runtime.process import run_rank

run_rank(lambda: getattr(measure, sys.argv[3])(Path(sys.argv[1])), log=Path(sys.argv[1]))
'''


def measure(world: int) -> list[dict[str, Any]]:
    """Return `kind`, `group`, `size` (bytes of each source) and `seconds` of collectives of `world` processes.

    Seconds are the first quartile over repetitions, each that of its slowest rank: other processes only add to them.
    Raises RuntimeFailure if a rank fails.
    """
    return _run("", measure_rank, world)


def probe(backend: str, world: int) -> None:
    """Add numbers up over `world` processes with gloo or nccl. Raises RuntimeFailure where that does not work."""
    _run(backend, probe_rank, world)


def _run(backend: str, function: Callable[[Path], None], world: int) -> Any:
    """Return what rank 0 of these processes writes."""
    with tempfile.TemporaryDirectory(prefix="superscaler-measure-") as name:
        program = Path(name) / "measure.py"
        program.write_text(_RUN)
        launch(program, [name, backend, function.__name__], world, Path(name))
        return json.loads((Path(name) / "found.json").read_text())


def probe_rank(folder: Path) -> None:
    """Take part in a sum; rank 0 writes it into the folder."""
    communicator = _connect()
    everyone = tuple(range(communicator.world))
    x = torch.full((1024,), communicator.rank + 1.0, device=communicator.device)
    total = float(communicator.all_reduce(x, everyone).wait()[0])
    if total != sum(k + 1 for k in everyone):
        raise RuntimeFailure(f"the sum of 1 to {len(everyone)} over all ranks came out as {total}.")
    if communicator.rank == 0:
        (folder / "found.json").write_text(json.dumps(total))
    communicator.close()


def measure_rank(folder: Path) -> None:
    """Take part in all measurements; rank 0 writes them into the folder."""
    communicator = _connect()
    everyone = tuple(range(communicator.world))
    communicator.prepare([everyone])
    found: list[dict[str, Any]] = []
    for size in _SIZES[communicator.device.type]:
        x = torch.ones(size // 4, device=communicator.device)
        # Chunks are equal; numbers of processes that do not divide the size leave a remainder out.
        even = x[: len(x) // len(everyone) * len(everyone)]
        for kind, (group, run, source) in _runs(communicator, everyone, x, even).items():
            seconds = _time(communicator, run)
            found.append({"kind": kind.split()[0], "group": group, "size": source.nbytes, "seconds": seconds})
    if communicator.rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    communicator.close()


def _connect() -> DistributedCommunicator:
    try:
        return connect(timeout=60.0)
    except RuntimeError as error:
        raise RuntimeFailure(f"torch.distributed does not start: {str(error).strip().splitlines()[0]}") from None


def _runs(
    c: DistributedCommunicator, everyone: Group, x: Tensor, even: Tensor
) -> dict[str, tuple[Group, Callable[[], Any], Tensor]]:
    # By name, of which the first word is the kind.
    return {
        "all_reduce": (everyone, lambda: c.all_reduce(x, everyone, owned=True).wait(), x),
        "all_gather": (everyone, lambda: c.all_gather(x, everyone, 0).wait(), x),
        "reduce_scatter": (everyone, lambda: c.reduce_scatter(even, everyone, 0).wait(), even),
        "all_to_all": (everyone, lambda: c.all_to_all(even, everyone, 0, 0).wait(), even),
        "broadcast": (everyone, lambda: _broadcast(c, everyone, x), x),
        "send": ((0, 1), lambda: _swap(c, x), x),
        "send inside": ((0, 0), lambda: x.clone(), x),
    }


def _broadcast(c: DistributedCommunicator, everyone: Group, x: Tensor) -> None:
    c.broadcast(x if c.rank == 0 else None, 0, everyone, x.shape, x.dtype).wait()


def _swap(c: DistributedCommunicator, x: Tensor) -> None:
    """Send both ways at once, as exchanges do: processes on one machine share what carries it."""
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
