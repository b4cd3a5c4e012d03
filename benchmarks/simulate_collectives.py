"""Published seconds of single collectives beside those that `superscaler simulate` takes for them.

    python benchmarks/simulate_collectives.py

The seconds are those from the start of a collective on an idle device: with the launch, as the clock has it.
`plain`: by alpha and bandwidth alone, without the `steps` of the preset.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from superscaler.cluster import Cluster

# Tables of nccl-tests, out of place: kind, cluster, MiB of the whole: microseconds. `a100:1x8`: one process, NCCL of
# 2021, microsoft/superbenchmark, test_cuda_nccl_bw_performance.py. `a100:2x8`: BM.GPU4.8 with 16 NICs of 100 Gbit/s,
# oracle-quickstart/oci-hpc-oke. `a100:4x8`: four DGX A100, NVIDIA/deepops, slurm-perf-cluster.md. `h100:1x4`: one
# process, dudeperf3ct.github.io, "Distributed communication for GPUs (part 1)", 2025.
_TABLES = {
    ("all_reduce", "a100:1x8"): {
        1: 74.8, 2: 93.5, 4: 112.0, 8: 162.0, 16: 226.0, 32: 374.3, 64: 584.5, 128: 1162.2, 256: 2112.2, 512: 4200.3,
        1024: 8159.5,
    },
    ("all_gather", "a100:1x8"): {
        1: 73.0, 2: 77.3, 4: 100.7, 8: 123.5, 16: 167.7, 32: 265.8, 64: 379.7, 128: 698.6, 256: 1192.2, 512: 2304.1,
        1024: 4413.4,
    },
    ("all_reduce", "a100:2x8"): {
        1: 85.6, 2: 99.2, 4: 127.0, 8: 174.3, 16: 282.7, 32: 452.3, 64: 821.7, 128: 1542.0, 256: 3042.7, 512: 6436.0,
        1024: 9187.8,
    },
    ("all_reduce", "a100:4x8"): {
        1: 135.3, 2: 161.5, 4: 228.7, 8: 320.3, 16: 381.0, 32: 586.2, 64: 1079.5, 128: 2281.2, 256: 3083.1, 512: 5657.1,
        1024: 11643,
    },
    ("all_reduce", "h100:1x4"): {
        1: 28.1, 2: 32.1, 4: 45.1, 8: 65.2, 16: 104.4, 32: 174.9, 64: 326.6, 128: 614.7, 256: 1184.9, 512: 2314.9,
        1024: 4525.6,
    },
}  # fmt: skip


def rows() -> Iterator[tuple[str, str, int, float, *tuple[float, ...]]]:
    """Yield (kind, cluster, MiB, published, plain, predicted seconds)."""
    for (kind, name), table in _TABLES.items():
        cluster = Cluster.parse(name)
        assert cluster.device_kind is not None
        assert cluster.device_kind.speeds is not None
        plain = replace(cluster, links=replace(cluster.links, steps={}))
        launch, every = cluster.device_kind.speeds.issue, [range(len(cluster.devices))]
        for size, published in table.items():
            source = size * 2**20 / (len(cluster.devices) if kind == "all_gather" else 1)
            ways = (some.way(kind, every, source) for some in (plain, cluster))
            ours = (launch + max(latency + slope * source for latency, slope in way.lines) for way in ways)
            yield kind, name, size, published / 1e6, *ours


def main() -> None:
    print(f"{'collective':12} {'cluster':9} {'MiB':>5} {'published us':>12} {'plain':>13} {'predicted':>13}")
    errors = list[tuple[float, float]]()
    for kind, name, size, published, *ours in rows():
        plain, found = (seconds / published - 1 for seconds in ours)
        errors.append((abs(plain), abs(found)))
        said = (f"{seconds * 1e6:7.1f} {seconds / published - 1:+5.0%}" for seconds in ours)
        print(f"{kind:12} {name:9} {size:5} {published * 1e6:12.1f} {' '.join(said)}")
    plain, found = (sum(column) / len(errors) for column in zip(*errors, strict=True))
    print(f"mean error {plain:.1%} plain, {found:.1%} predicted")


if __name__ == "__main__":
    main()
