"""Measured phases, available cores, and garbage collection held back where it costs more than it frees."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# What is called with the name of each phase that begins, and with its seconds when it ends (None at its begin).
listeners: list[Callable[[str, float | None], None]] = []


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of the block to those of a phase."""
    start = time.perf_counter()
    with phase(name):
        yield
    phases[name] += time.perf_counter() - start


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Let listeners know when a phase begins, and how long it took when it ends."""
    start = time.perf_counter()
    for listener in listeners:
        listener(name, None)
    try:
        yield
    finally:
        record(name, time.perf_counter() - start)


def record(name: str, seconds: float) -> None:
    """Let listeners know that a phase took some seconds."""
    for listener in listeners:
        listener(name, seconds)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Pause garbage collection in the block, and count its objects as old afterwards.

    Capture and compilation make many small objects that live until their end. Searching them for garbage costs a
    quarter of the time of capture, and half of that of compilation.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            # Together these mark all objects as old without scanning them.
            gc.freeze()
            gc.unfreeze()
            gc.enable()
