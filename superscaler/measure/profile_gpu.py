"""Measured seconds of the kernels of small models on a GPU, of its host and of copies between both, and the speeds that
explain them. Form and gaps are those of a preset: how products fill multiprocessors, ramps of attention.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from math import inf
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from superscaler.cluster.devices import Attention, DeviceKind, Pair, Speeds, classes
from superscaler.cluster.links import Link
from superscaler.groups import collect, group_by
from superscaler.measure.fit import rounded
from superscaler.measure.links import connected
from superscaler.measure.profile import SIZES, Sample, models, overhead
from superscaler.simulate import rates
from superscaler.simulate.repeats.made import kernel_of
from superscaler.simulate.works import Kernel

# As SIZES: heads of 64 and of 128 channels. A step of the last needs some 12 GB.
LARGE = ((4, 1024, 1024, 16, 16384), (4, 2048, 2048, 16, 32768))
_NEEDED = 14 * 10**9
DTYPES = ("float32", "bfloat16")
# Cycles of a kernel that waits (0.3 to 1 ms), while the host starts the kernels that are timed.
_WAIT = 1_000_000
_REPEATS = 5
# Seconds of a kernel that the timer does not see.
_SHORTEST = 1e-7
# Bytes of a copy to the host.
_COPIED = 1 << 28
# A kernel of fewer floors is not what it costs for its work.
_FLOORS = 10
_HALVES = ("float16", "bfloat16")
# A rate is found by so many proportional steps.
_ROUNDS = 12


class Timer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorder of the seconds of each operator on the GPU, from its first kernel to the end of its last one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = list[tuple[Kernel, Any, Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.is_view or func.namespace == "prim":
            return func(*args, **(kwargs or {}))
        start, end = _events()
        made = func(*args, **(kwargs or {}))
        end.record()
        kernel = kernel_of(func, args, kwargs, made)
        if kernel.outputs and rates.class_of(kernel) != "free":
            self.found.append((kernel, start, end))
        return made


def _events() -> tuple[Any, Any]:
    """Return the event of a start, which is recorded behind a waiting kernel, and one for the end."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda._sleep(_WAIT)  # type: ignore[no-untyped-call]
    start.record()
    return start, end


def measure() -> dict[str, Any]:
    """Return `samples` of kernels on the GPU of this rank; its `floor`, seconds of the shortest kernel; `issue`,
    seconds of the host to start one; `host`, bytes a second between both; `units`, multiprocessors; `memory` in bytes.
    """
    communicator = connected()
    device = communicator.device
    # The backward runs in a thread of its own.
    issue, _ = overhead(models(*SIZES[0], "float32", device), time.perf_counter)
    extra = _empty()
    short = _samples(models(*SIZES[0], "float32", device), extra)
    floor = statistics.median(s.seconds for s in short)
    properties = torch.cuda.get_device_properties(device)
    sizes = LARGE if properties.total_memory > _NEEDED else LARGE[:1]
    samples = [s for dtype in DTYPES for size in sizes for s in _samples(models(*size, dtype, device), extra)]
    host = _host(device)
    communicator.close()
    return {
        "samples": [asdict(s) for s in samples],
        "floor": rounded(floor),
        "issue": rounded(issue),
        "host": rounded(host),
        "units": properties.multi_processor_count,
        "memory": properties.total_memory,
    }


def _samples(run: Callable[[], None], extra: float) -> list[Sample]:
    """Return the median seconds of each kernel of a model; its first run makes buffers."""
    run()
    with Timer() as timer:
        for _ in range(_REPEATS):
            run()
    torch.cuda.synchronize()
    by_kernel = collect((kernel, start.elapsed_time(end) / 1e3 - extra) for kernel, start, end in timer.found)
    torch.cuda.empty_cache()
    return [Sample(kernel, max(statistics.median(found), _SHORTEST)) for kernel, found in by_kernel.items()]


def _empty() -> float:
    """Return the seconds between two events with nothing between them."""
    found = list[float]()
    for _ in range(20):
        start, end = _events()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) / 1e3)
    return statistics.median(found)


def _host(device: torch.device) -> float:
    """Return the bytes per second of a copy between the GPU and pinned memory of its host, the slower way."""
    here = torch.empty(_COPIED, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    slowest = inf
    for target, source in ((there, here), (here, there)):
        target.copy_(source, non_blocking=True)
        start, end = _events()
        target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize()
        slowest = min(slowest, _COPIED / start.elapsed_time(end) * 1e3)
    return float(slowest)


def speeds(samples: Iterable[Sample], like: Speeds, units: int, floor: float, issue: float) -> Speeds:
    """Return the speeds of a GPU that give the measured seconds of each kind of kernel in their sum.

    `like`: the speeds of a preset, for what was not measured.
    """
    found = replace(like, units=units, floor=floor, issue=issue)
    large = [s for s in samples if s.seconds > _FLOORS * floor]
    kinds = group_by(large, lambda s: _kind(s.kernel))
    plain = kinds.get("plain", [])
    memory = _bandwidth((s for s in plain if rates.class_of(s.kernel) in ("elementwise", "copy")), floor)
    operators = classes((memory, memory), {})
    for key in (rates.class_of, rates.key_of):
        by_key = collect((key(s.kernel), s) for s in plain)
        operators |= {name: Link(0.0, _bandwidth(some, floor)) for name, some in by_key.items()}
    found = replace(found, memory=(memory, memory), operators=operators)
    by_dtype = group_by(kinds.get("product", []), lambda s: rates.dtype_of(s.kernel))
    products = {dtype: _product(found, dtype, some) for dtype, some in by_dtype.items()}
    halves = {half: products["bfloat16"] for half in _HALVES if "bfloat16" in products}
    found = replace(found, products=dict(like.products) | products | halves)
    attention = group_by(kinds.get("attention", []), lambda s: _direction(s.kernel))
    return replace(
        found, attention=dict(like.attention) | {d: _attention(found, d, own) for d, own in attention.items()}
    )


def _kind(kernel: Kernel) -> str:
    return "attention" if rates.is_attention(kernel) else "product" if any(rates.products_of(kernel)) else "plain"


def _direction(kernel: Kernel) -> str:
    direction, dtype = "backward" if "backward" in kernel.name else "forward", rates.dtype_of(kernel)
    return direction if dtype in _HALVES else f"{direction} {dtype}"


def _bandwidth(samples: Iterable[Sample], floor: float) -> float:
    some = list(samples)
    return rounded(sum(rates.bytes_of(s.kernel) for s in some) / sum(s.seconds - floor for s in some))


def _product(like: Speeds, dtype: str, samples: Sequence[Sample]) -> Pair:
    return _solved(samples, lambda pair: replace(like, products={dtype: pair}))


def _attention(like: Speeds, direction: str, samples: Sequence[Sample]) -> Attention:
    table = like.attention[direction.partition(" ")[0]]

    def with_rate(channels: int, pair: Pair) -> Speeds:
        return replace(like, attention={direction: replace(table, rates={channels: pair})})

    by_channels = group_by(samples, lambda s: rates.scores_of(s.kernel, 1)[2])
    return replace(table, rates={n: _solved(own, partial(with_rate, n)) for n, own in sorted(by_channels.items())})


def _solved(samples: Sequence[Sample], with_rate: Callable[[Pair], Speeds]) -> Pair:
    """Return the rate with which the samples take as long in their sum as they were measured."""
    rate, measured = 1e14, sum(s.seconds for s in samples)
    for _ in range(_ROUNDS):
        kind = DeviceKind("gpu", 0, {}, with_rate((rate, rate)))
        rate *= sum(rates.seconds(s.kernel, kind) for s in samples) / measured
    return rounded(rate), rounded(rate)
