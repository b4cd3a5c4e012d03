"""Bytes and seconds in text, with their units."""

import math
import re
from collections.abc import Iterable

from superscaler.errors import InputError

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
# A number without a unit below this is not meant in bytes.
_LEAST = 10**6
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
    if not unit and found and found[1].isdigit() and size < _LEAST:
        raise InputError(f"{name} is '{text}', which is {size:.0f} bytes; give the unit too, as {text.strip()}GB.")
    return int(size)


def read_lengths(name: str, text: str) -> tuple[int, ...]:
    """Return the lengths of documents, above 0. Raises InputError that names the option.

    >>> read_lengths("--documents", "1024,512,512"), read_lengths("documents", "1024+512")
    ((1024, 512, 512), (1024, 512))
    """
    found = tuple(int(word) if word.strip().isdecimal() else 0 for word in re.split("[,+]", text))
    if min(found) < 1:
        raise InputError(
            f"{name} is '{text}', but it must be the tokens of each document of a row, as 1024,512,512 (in the options "
            "of a model or a plan 1024+512+512)."
        )
    return found


def scaled(value: float, units: Iterable[tuple[float, str]], digits: str) -> str:
    """Return a value in the first unit that it reaches; '' if it reaches none."""
    return next((f"{value / unit:{digits}} {name}" for unit, name in units if value >= unit), "")


def size(count: float) -> str:
    """Return bytes in words.

    >>> size(12), size(34_567), size(8_000_000)
    ('12 B', '34.6 KB', '8.0 MB')
    """
    return scaled(count, ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")), ".1f") or f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Return seconds in words.

    >>> duration(0.0000123), duration(0.0123), duration(2.5)
    ('12.3 us', '12.3 ms', '2.5 s')
    """
    return scaled(seconds, ((1, "s"), (1e-3, "ms")), ".3g") or f"{seconds * 1e6:.3g} us"


def number(value: float) -> str:
    """Return a number with four digits, as text.

    >>> number(3.3219), number(34_512.3), number(0.01234)
    ('3.322', '34,510', '0.01234')
    """
    rounded = float(f"{value:.4g}")
    return f"{rounded:,.0f}" if rounded >= 1000 else f"{rounded:.4g}"
