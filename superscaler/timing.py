"""How long things take, on how many cores, and garbage collection held back where it costs more than it frees."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds that the block takes to those of a phase."""
    start = time.perf_counter()
    yield
    phases[name] += time.perf_counter() - start


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Capture and compilation make many small objects that live until their end; to look for garbage among them costs
    a quarter of the time of the one, and half of that of the other. Nor are they looked through when they are made:
    they then count as old.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():
                # Together these make all objects old, without a look at them.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
