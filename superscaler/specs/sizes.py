"""Sizes in text: bytes with a unit."""

import math
import re

from superscaler.errors import InputError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_SIZE = re.compile(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def read_bytes(name: str, text: str) -> int:
    """Return a number of bytes, above 0. Raises InputError that names the option.

    >>> read_bytes("--memory", "32GB"), read_bytes("--memory", "16 GiB"), read_bytes("--memory", "80e9")
    (32000000000, 17179869184, 80000000000)
    """
    found = _SIZE.fullmatch(text)
    unit = found[2].lower() if found else "?"
    try:
        size = float(found[1]) * _UNITS[unit] if found else 0.0
    except (KeyError, ValueError):
        size = 0.0
    if not (1 <= size < 2**63 and math.isfinite(size)):
        raise InputError(f"{name} is '{text}', but it must be bytes above 0, as 32GB, 16GiB or 32e9.")
    return int(size)
