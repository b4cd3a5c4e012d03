"""Metrics of a step: seconds, rates, the share of a GPU's peak, and memory beside what was predicted."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Known:
    """Facts about a step before it runs: the model's operations of a step on each device, the peak of a device a
    second, and the predicted bytes at the peak of the fullest device; 0 for what is unknown.
    """

    flops: float = 0.0
    peak_flops: float = 0.0
    peak_bytes: int = 0


class Meter:
    """The seconds of the last block that was measured with it: of the device's own clock on a GPU, which nothing waits
    for until they are read.
    """

    def __init__(self, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if is_gpu else []
        self._times = [0.0, 0.0]
        self.is_known = False

    def __enter__(self) -> None:
        self._mark(0)

    def __exit__(self, *_: object) -> None:
        self._mark(1)
        self.is_known = True

    def _mark(self, which: int) -> None:
        if self._events:
            self._events[which].record()
        else:
            self._times[which] = time.perf_counter()

    @property
    def seconds(self) -> float:
        if self._events:
            self._events[1].synchronize()
            return self._events[0].elapsed_time(self._events[1]) / 1e3
        return self._times[1] - self._times[0]


def metrics(
    seconds: float, inputs: Mapping[str, tuple[tuple[int, ...], str]], norm: float | None, known: Known
) -> dict[str, Any]:
    """Return the metrics of a step of so many seconds on a batch of such inputs."""
    amount, unit = amount_of({name: shape for name, (shape, _) in inputs.items()})
    # Linux counts pages of a process now and at its peak at different times.
    now = memory()
    tflops = known.flops / seconds / 1e12 if known.flops else None
    return {
        "seconds": seconds,
        unit: amount,
        f"{unit}_per_second": amount / seconds,
        "tflops": tflops,
        "mfu": tflops * 1e12 / known.peak_flops if tflops and known.peak_flops else None,
        "memory_bytes": now,
        "peak_memory_bytes": max(now, peak_memory()),
        "predicted_memory_bytes": known.peak_bytes or None,
        "gradient_norm": norm,
    }


def amount_of(shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, str]:
    """Return the tokens of a batch of token ids, or the samples of another batch, with that word.

    >>> amount_of({"input_ids": (4, 8), "labels": (4, 8)}), amount_of({"x": (4, 3)})
    ((32, 'tokens'), (4, 'samples'))
    """
    if "input_ids" in shapes:
        return prod(shapes["input_ids"]), "tokens"
    return max((shape[0] for shape in shapes.values() if shape), default=1), "samples"


def memory() -> int:
    """Return the memory of this process in bytes: on its GPU if it has one, else in main memory."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated()
    with suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    return peak_memory()


def peak_memory() -> int:
    """Return the peak memory of this process in bytes: on its GPU if it has one, else in main memory."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    # Kibibytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
