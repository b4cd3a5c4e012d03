"""Times of the devices of a cohort, or of the groups of a transfer: a number for all, or an array with one for each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from superscaler.ir.grid import Ints

Floats = NDArray[np.float64]
Times = float | Floats


def even(times: Times) -> Times:
    """Return one number for an array of equal numbers."""
    if isinstance(times, float):
        return times
    low = float(times.min())
    return low if low == times.max() else times


def earliest(times: Times) -> float:
    """Return the earliest of some times."""
    return times if isinstance(times, float) else float(times.min())


def latest(times: Times) -> float:
    """Return the latest of some times."""
    return times if isinstance(times, float) else float(times.max())


def is_later(times: Times, others: Times) -> bool:
    """Return whether any time is later than its counterpart."""
    found = times > others
    return found if isinstance(found, bool) else bool(np.any(found))


def later(times: Times, others: Times) -> Times:
    """Return the later time of each pair."""
    if isinstance(times, float) and isinstance(others, float):
        return times if times >= others else others
    return np.maximum(times, others)


def sooner(times: Times, others: Times) -> Times:
    """Return the earlier time of each pair."""
    if isinstance(times, float) and isinstance(others, float):
        return times if times <= others else others
    return np.minimum(times, others)


def of_rows(times: Times, rows: Ints) -> Times:
    """Return the times of some rows."""
    return times if isinstance(times, float) else times[rows]


def of_row(times: Times, row: int) -> float:
    """Return the time of a row."""
    return times if isinstance(times, float) else float(times[row])
