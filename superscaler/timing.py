"""Measured seconds, available cores, and garbage collection held back where it costs more than it frees."""

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def timed(phases: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of the block to those of a phase."""
    start = time.perf_counter()
    yield
    phases[name] += time.perf_counter() - start


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
            if not gc.get_freeze_count():
                # Together these mark all objects as old without scanning them.
                gc.freeze()
                gc.unfreeze()
            gc.enable()
