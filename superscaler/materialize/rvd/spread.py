"""The path of slices that several rows of devices gather: each slice goes to its place in every row, which gathers it.

It needs no search. So it is for many devices, and is the same at all places of a fold.
"""

from __future__ import annotations

import numpy as np

from superscaler.ir.communication import links
from superscaler.ir.layout import Layout
from superscaler.materialize.rvd.search import Path
from superscaler.materialize.rvd.transitions import Costs, Shape, Step, joining, messages

_GATHER = "all_gather"


def spread(source: Layout, goal: Layout, sizes: Shape, itemsize: int, costs: Costs) -> Path | None:
    """Return the path from one row of slices to rows of whole values, as of a weight that two stages read. None for
    other layouts: the row of the slices is one of those that read, and only one slot is cut.
    """
    replicas, parts, cuts = source.shape
    held, read = source.devices.ravel(), goal.devices.ravel()
    others = np.setdiff1d(read, held)
    is_row = replicas == parts == goal.shape[1] == 1 and sum(k > 1 for k in cuts) == 1 and {*goal.shape[2]} == {1}
    if not is_row or not set(held) < set(read) or len(others) % len(held):
        return None
    # Of each row, sorted devices have the slices that sorted devices of the source have.
    rows = [held, *others.reshape(-1, len(held))[:, np.argsort(np.argsort(held))]]
    middle = Layout(np.stack(rows).reshape(-1, 1, *cuts))
    kind = joining((1, 1, *cuts), (len(rows), 1, *cuts), False)
    groups, size = tuple(tuple(map(int, row)) for row in rows), int(np.prod(sizes)) // len(held)
    slot = next(n for n, k in enumerate(cuts) if k > 1)
    seconds = costs.seconds(_GATHER, groups, size * itemsize)
    moved = size * len(groups) * links(_GATHER, len(held))
    steps = (
        messages(kind, source, middle, sizes, itemsize, costs),
        Step(_GATHER, groups, slot, -1, goal, size * itemsize, moved, seconds),
    )
    return Path(source, goal, steps, sum(step.seconds for step in steps))
