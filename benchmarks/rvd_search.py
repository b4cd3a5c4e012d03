"""Milliseconds of finding the cheapest path between two random layouts of a 4-D tensor, cold and known.

    python benchmarks/rvd_search.py [PAIRS] [DEVICES]

PAIRS (default 100) pairs on DEVICES (default 32) devices, in natural and in shuffled order, on one server and on
servers of eight: the same devices on both sides, or as many of other servers. CPU time, with the collector off; `known`
is a second look-up of the same pair with other devices in the same places. `cut` counts the searches that met their
limit, and `off` is how far at most the worst of them is from the optimum.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Hashable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "materialize" / "rvd"))

SIZES = (64, 64, 64, 64)
ITEMSIZE = 4


def main() -> None:
    pairs, devices = (int(text) for text in (sys.argv[1:] + ["100", "32"][len(sys.argv) - 1 :]))
    print(f"{'':44}{'median':>8}{'p90':>8}{'worst':>8}{'known':>8}{'states':>8}{'cut':>5}{'off':>6}")
    gc.disable()
    for per_server in (devices, 8):
        for order in ("natural", "shuffled"):
            for shift, what in ((0, "the same devices"), (devices, "other servers")):
                found = [measure(seed, devices, shift, order, per_server) for seed in range(pairs)]
                cold, known, states, off = (sorted(column) for column in zip(*found, strict=True))
                name = f"{devices} devices, {per_server} a server, {order}, {what}"[:43]
                numbers = (statistics.median(cold), cold[int(0.9 * pairs)], cold[-1], statistics.median(known))
                told = "".join(f"{1e3 * seconds:8.1f}" for seconds in numbers)
                cut = sum(ratio > 1 for ratio in off)
                print(f"{name:44}{told}{statistics.median(states):8.0f}{cut:5}{off[-1]:6.2f}", flush=True)


def measure(seed: int, devices: int, shift: int, order: str, per_server: int) -> tuple[float, float, int, float]:
    """Return seconds of a search, of a look-up, the states expanded, and the ratio to the least possible cost."""
    from layouts import Servers, layout, shapes

    from superscaler.materialize.rvd.paths import find_path

    rng, costs = np.random.default_rng(seed), Servers(per_server)
    every = list(shapes(devices, 2 + len(SIZES)))
    held, read = (every[i] for i in rng.integers(len(every), size=2))
    ids = [np.arange(devices), np.arange(devices) + shift]
    ids = [rng.permutation(some) for some in ids] if order == "shuffled" else ids
    source, goal = layout(held, list(ids[0])), layout(read, list(ids[1]))
    turned = layout(held, list(ids[0] + 2 * devices)), layout(read, list(ids[1] + 2 * devices))
    paths: dict[Hashable, tuple[tuple[int, ...], object]] = {}
    start = time.process_time()
    path = find_path(source, goal, SIZES, ITEMSIZE, costs, paths)
    middle = time.process_time()
    find_path(*turned, SIZES, ITEMSIZE, costs, paths)
    end = time.process_time()
    ratio = 1.0 if path.is_optimal else path.seconds / path.least
    return middle - start, end - middle, path.expanded, ratio


if __name__ == "__main__":
    main()
