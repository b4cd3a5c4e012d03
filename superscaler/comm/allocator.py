"""The memory of a process that trains on a CPU: memory of freed tensors stays with the process."""

import ctypes
import os

# Of malloc.h: M_TRIM_THRESHOLD, whose value -1 means never, and M_MMAP_THRESHOLD with the largest value that it takes.
_TRIM, _NEVER, _MMAP, _LARGEST = -1, -1, -3, 1 << 25


def keep_freed_memory() -> None:
    """Let malloc keep freed memory for later tensors; results of 32 MiB or more still come from the system.

    By default glibc gives memory back as a step ends, and gets it again page by page in the next one, which takes up to
    a tenth of a step. Other libraries, and a threshold set by the user, are unchanged.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_TRIM_THRESHOLD_" not in os.environ and mallopt(_MMAP, _LARGEST):
        mallopt(_TRIM, _NEVER)
