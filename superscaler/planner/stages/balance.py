"""Stages of pipelines: the blocks of each, so that the slowest is fastest."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import numpy as np
from numpy.typing import NDArray

from superscaler.planner.costs import Costs, outside

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Allowed = Callable[[int, int], NDArray[np.bool_]]


def balanced(costs: Costs, run_of: Ints, stages: int, has_rest: bool, allowed: Allowed) -> list[int] | None:
    """Return the first block of each stage, and the end of the last one, so that the slowest stage is fastest, and the
    others are as equal as can be; None where no stages are `allowed`: by the number of a stage, the first block and the
    end.
    """
    count = len(run_of)
    if stages == 1:
        return [0, count]
    blocks = np.array([[costs.runs[n].seconds, costs.runs[n].host] for n in run_of])
    until = np.concatenate([np.zeros((1, 2)), blocks.cumsum(axis=0)])
    every = list[Floats]()
    for k in range(stages):
        own = until[None, :] - until[:, None]
        for is_last in (False, True):
            if has_rest and k == (stages - 1) * is_last:
                rest = outside(costs.rest, 1.0, is_last)
                own += rest.seconds, rest.host
        every.append(np.where(allowed(k, stages), own.max(axis=2), inf))
    # The slowest of the stages up to each block.
    slowest = np.where(np.arange(count + 1) == 0, 0.0, inf)
    for own in every:
        slowest = np.maximum(slowest[:, None], own).min(axis=0)
    if slowest[count] == inf:
        return None
    # The least sum of the squares of those, rounded so that equal ones stay equal, and where the last of them begins.
    limit = slowest[count] or 1.0
    sums, begins = np.where(np.arange(count + 1) == 0, 0.0, inf), list[Ints]()
    for own in every:
        table = np.round(sums[:, None] + np.where(own <= limit, own / limit, inf) ** 2, 9)
        begins.append(table.argmin(axis=0))
        sums = table.min(axis=0)
    bounds = [count]
    for first in reversed(begins):
        bounds.append(int(first[bounds[-1]]))
    return bounds[::-1]
