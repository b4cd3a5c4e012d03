"""Exchanges between the devices of two servers: peer to peer against the searched path, measured on a slow link.

    python benchmarks/rvd.py [--full] [--mbit 50] [--mib 4] [--repeats 3] [--only V-R]
    python benchmarks/rvd.py --search 500

Producers on one server, consumers on the other: replicas (R), value parts (V) or slices (D) of a 1-D tensor become
replicas or slices. A server is a network namespace; a veth pair with `tc tbf` at --mbit joins them, and gloo goes over
it, one process a device. `p2p` sends each consumer each piece that it needs from each producer of one (from one
replica, all value parts); `searched` is the path of find_path under the numbers of these links. Both are medians of
--repeats, checked for their values. `possible` is the ratio of the bytes over the link, of which one copy of the
tensor is the least; `predicted` is what the search expects of its path. --full takes the sizes of the paper, 8 and 4
devices a side, in 16 processes, of half the bytes at half the speed, so that on few cores the link
stays what is waited for; without it they are 4 and 2.

Needs what two_servers.py does; says so where it is missing.

--search N: the CPU milliseconds of finding the path between N random pairs of layouts of a tensor with one to three
slots, by number of devices on a side: the same or other devices, in natural or shuffled order, on servers of 4, 8 or
16. `known` is a look-up of the same pair on other servers, `steps` the mean number of steps, and `gain` the median
seconds of the direct exchange over those of the path, where the path has several steps.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from two_servers import NotPermitted, cluster, enter_namespace, other_server, run

from superscaler.cluster import Cluster
from superscaler.comm.distributed import DistributedCommunicator, connect
from superscaler.ir.layout import Layout
from superscaler.materialize.rvd.route import Route, priced
from superscaler.materialize.rvd.search import Cache, Path, find_path
from superscaler.materialize.rvd.transitions import MESSAGES, Step, messages

CASES = ("R-R", "R-D", "V-R", "V-D", "D-R", "D-D")


def layout(kind: str, devices: range) -> Layout:
    return Layout(np.array(devices).reshape([len(devices) if axis == kind else 1 for axis in "RVD"]))


def p2p(source: Layout, goal: Layout, size: int, itemsize: int, costs: Cluster) -> Path:
    """Return the path of one step, in which producers send consumers what they need."""
    step = messages(MESSAGES, source, goal, (size,), itemsize, priced(costs))
    return Path(source, goal, (step,), step.seconds)


def boxes(path: Path, of: Layout, size: int) -> dict[int, tuple[int, int]]:
    return {device: box for device, (box,) in Route(path, ((0, size),)).boxes(of).items()}


def common(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return max(a[0], b[0]), min(a[1], b[1])


COLLECTIVES: dict[str, Any] = {
    "all_reduce": lambda comm, x, group: comm.all_reduce(x, group).wait(),
    "all_gather": lambda comm, x, group: comm.all_gather(x, group, 0).wait(),
    "reduce_scatter": lambda comm, x, group: comm.reduce_scatter(x, group, 0).wait(),
    "all_to_all": lambda comm, x, group: comm.all_to_all(x, group, 0, 0).wait(),
    "chunk": lambda comm, x, group: x.chunk(len(group))[group.index(comm.rank)],
    "value_chunk": lambda comm, x, group: x if comm.rank == group[0] else torch.zeros_like(x),
}


def follow(comm: DistributedCommunicator, path: Path, size: int, x: Tensor | None) -> Tensor | None:
    """Take the steps of a path; None is what a device outside a layout has."""
    before = boxes(path, path.source, size)
    for tag, step in enumerate(path.steps):
        after = boxes(path, step.layout, size)
        if step.kind in COLLECTIVES:
            mine = [group for group in step.groups if comm.rank in group]
            x = COLLECTIVES[step.kind](comm, x, mine[0]) if mine else x
        else:
            x = exchange(comm, step, tag, before, after, x)
        before = after
    return x


def exchange(
    comm: DistributedCommunicator,
    step: Step,
    tag: int,
    before: dict[int, tuple[int, int]],
    after: dict[int, tuple[int, int]],
    x: Tensor | None,
) -> Tensor | None:
    me, works = comm.rank, []
    for sender, receiver in step.groups:
        lo, hi = common(before[sender], after[receiver])
        if receiver == me:
            works.append((lo, hi, comm.recv((hi - lo,), torch.float32, sender, tag)))
        elif sender == me and x is not None:
            comm.send(x[lo - before[me][0] : hi - before[me][0]], receiver, tag, owned=True)
    result: Tensor | None = None
    if me in after:
        start, end = after[me]
        parts = [(lo, hi, work.wait()) for lo, hi, work in works]
        if me in step.kept and x is not None:
            lo, hi = common(before[me], after[me])
            parts.append((lo, hi, x[lo - before[me][0] : hi - before[me][0]]))
        if len(parts) == 1 and parts[0][:2] == (start, end):
            result = parts[0][2]
        else:
            result = torch.zeros(end - start)
            for lo, hi, part in parts:
                result[lo - start : hi - start] += part
    comm.flush()
    return result


def worker(options: argparse.Namespace) -> None:
    """Run all cases on one rank; rank 0 finds the paths and prints the table."""
    torch.set_num_threads(1)
    comm, per_server = connect(120.0), options.world // 2
    size = options.mib * 2**20 // 4
    found: list[Any] = [cases(options, size, per_server) if comm.rank == 0 else None]
    dist.broadcast_object_list(found)
    steps = [step for _, *paths in found[0] for path in paths for step in path.steps]
    comm.prepare([group for step in steps if step.kind in COLLECTIVES for group in step.groups])
    if comm.rank == 0:
        print(f"torch {torch.__version__}, gloo; {options.mib} MiB, {options.mbit:g} Mbit/s between two servers; "
              f"seconds, medians of {options.repeats}")  # fmt: skip
        print(f"{'case':12}{'p2p':>8}{'searched':>10}{'ratio':>8}{'possible':>10}{'predicted':>11}  path", flush=True)
    for name, *paths in found[0]:
        for path in paths:
            measure(comm, path, size // 64)
        times = [[measure(comm, path, size) for path in paths] for _ in range(options.repeats)]
        direct, searched = (statistics.median(column) for column in zip(*times, strict=True))
        if comm.rank == 0:
            # Every message of the direct exchange goes over the link.
            possible = paths[0].steps[0].moved / size
            kinds = " > ".join(step.kind for step in paths[1].steps)
            print(f"{name:12}{direct:8.2f}{searched:10.2f}{direct / searched:8.2f}{possible:10.0f}"
                  f"{paths[1].seconds:11.2f}  {kinds}", flush=True)  # fmt: skip
    comm.close()


def cases(options: argparse.Namespace, size: int, per_server: int) -> list[tuple[str, Path, Path]]:
    """Return the name of each case, and its two paths."""
    costs, found = cluster(per_server, options.mbit), []
    for held, read in ((1, 1), (1, 2), (2, 1)):
        for kinds in options.only.split(","):
            devices = range(per_server // held), range(per_server, per_server + per_server // read)
            source, goal = (layout(kind, some) for kind, some in zip(kinds.split("-"), devices, strict=True))
            name = f"{kinds[0]}({source.devices.size}) {kinds[2]}({goal.devices.size})"
            searched = find_path(source, goal, (size,), 4, priced(costs))
            found.append((name, p2p(source, goal, size, 4, costs), searched))
    return found


def measure(comm: DistributedCommunicator, path: Path, size: int) -> float:
    """Return the seconds from when the first rank starts until all have what they need, which is checked."""
    full = torch.arange(size, dtype=torch.float32) % 251
    x, held = None, boxes(path, path.source, size).get(comm.rank)
    if held is not None:
        # Value parts are whole multiples of the tensor: 2, 3, .., and on rank 0 what makes their sum exactly 1.
        values = path.source.shape[1]
        multiple = comm.rank + 1 if comm.rank else 1 - sum(range(2, values + 1))
        x = (full * (multiple if values > 1 else 1))[slice(*held)]
    comm.barrier()
    start = time.perf_counter()
    x = follow(comm, path, size, x)
    # One clock for all: the latest end, and the earliest start.
    ends = torch.tensor([time.perf_counter(), -start], dtype=torch.float64)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    read = boxes(path, path.goal, size).get(comm.rank)
    assert read is None or (x is not None and torch.equal(x, full[slice(*read)]))
    return float(ends.sum())


def search(pairs: int) -> None:
    print(f"{pairs} random pairs of layouts; CPU milliseconds")
    print(f"{'devices':>8}{'mean':>8}{'median':>8}{'p90':>8}{'worst':>8}{'known':>8}{'steps':>8}{'gain':>8}")
    for devices in (4, 8, 16, 32):
        found = [searched(np.random.default_rng([devices, seed]), devices) for seed in range(pairs)]
        cold, known, steps, gains = (sorted(column) for column in zip(*found, strict=True))
        gains = [gain for gain in gains if gain > 1] or [1.0]
        times = (
            statistics.mean(cold),
            statistics.median(cold),
            cold[int(0.9 * pairs)],
            cold[-1],
            statistics.mean(known),
        )
        print(f"{devices:8}" + "".join(f"{1e3 * seconds:8.1f}" for seconds in times)
              + f"{statistics.mean(steps):8.1f}{statistics.median(gains):8.1f}", flush=True)  # fmt: skip


def searched(rng: np.random.Generator, devices: int) -> tuple[float, float, int, float]:
    """Return the seconds of a search and of a look-up, the number of steps, and the gain over the direct exchange."""
    slots, per_server = int(rng.integers(1, 4)), int(rng.choice([4, 8, 16]))
    costs, sizes = priced(Cluster.preset("v100", 256 // per_server, per_server)), (64,) * slots
    orders = [rng.permutation(devices) if rng.random() < 0.5 else np.arange(devices) for _ in range(2)]
    orders[1] = orders[1] + rng.choice([0, devices])
    every = list(shapes(devices, 2 + slots))
    held, read = (every[i] for i in rng.integers(len(every), size=2))
    paths: Cache = {}
    ends = [
        [Layout((ids + shift).reshape(k)) for ids, k in zip(orders, (held, read), strict=True)] for shift in (0, 64)
    ]
    start = time.process_time()
    path = find_path(*ends[0], sizes, 1024, costs, paths)
    middle = time.process_time()
    find_path(*ends[1], sizes, 1024, costs, paths)
    direct = messages(MESSAGES, *ends[0], sizes, 1024, costs).seconds
    return middle - start, time.process_time() - middle, len(path.steps), direct / path.seconds if path.seconds else 1.0


def shapes(n: int, ndim: int) -> Iterator[tuple[int, ...]]:
    """Yield all shapes of n devices with `ndim` axes."""
    if ndim == 1:
        yield (n,)
        return
    for k in (k for k in range(1, n + 1) if n % k == 0):
        yield from ((k, *rest) for rest in shapes(n // k, ndim - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float)
    parser.add_argument("--mib", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--search", type=int)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.mbit = options.mbit or (25 if options.full else 50)
    options.mib = options.mib or (2 if options.full else 4)
    if options.search:
        search(options.search)
        return
    if options.world:
        worker(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        enter_namespace()
        world = 16 if options.full else 8
        with other_server(options.mbit) as other:
            sys.exit(run([sys.executable, *sys.argv, "--world", str(world)], world, other))
    except NotPermitted as reason:
        print(f"not measured: two servers need network namespaces and a slow link; {reason}.")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
