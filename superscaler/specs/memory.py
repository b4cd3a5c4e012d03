"""The memory of this machine."""

from __future__ import annotations

import re
from pathlib import Path


def free_memory() -> int | None:
    """Return the bytes that a new process can use without swapping; None where the system does not say."""
    file = Path("/proc/meminfo")
    found = re.search(r"MemAvailable:\s+(\d+) kB", file.read_text()) if file.is_file() else None
    return found and int(found[1]) * 1024
