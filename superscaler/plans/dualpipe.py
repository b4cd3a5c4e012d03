"""DualPipe on a V (DeepSeek, 2025): communication inside the stage of one microbatch overlaps with the computation of
another.

Where the table of `dualpipe_v` has a forward and a backward of different microbatches side by side, they take turns. A
turn is a run of a stage without communication inside. For a mixture of experts the turns are attention and dispatch,
the experts, the sum of their results (`dualpipe:2 x expert_parallel:4`); for tensor parallelism, the work between two
all_reduces.
"""

from __future__ import annotations

from collections.abc import Sequence

from superscaler.plans.lib import schedules
from superscaler.plans.lib.place_table import count_microbatches, place_table
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.stages import stages
from superscaler.verbs import Action, Graph


@along_axis(batches=True)
def dualpipe(graph: Graph, n: int, axis: str, microbatches: int | None = None, blocks: str = "") -> None:
    table = schedules.dualpipe_v(n, count_microbatches(graph, n, microbatches))
    place_table(graph, axis, table, stages(graph, 2 * n, blocks), rows=map(in_pairs, table))


def in_pairs(row: Sequence[Action]) -> list[Action | tuple[Action, Action]]:
    """Return the work of a device, with each forward and the next backward as a pair unless of one microbatch."""
    found: list[Action | tuple[Action, Action]] = []
    for work in row:
        last = found[-1] if found else None
        if isinstance(last, Action) and last.kind + work.kind == "FB" and last.microbatch != work.microbatch:
            found[-1] = last, work
        else:
            found.append(work)
    return found
