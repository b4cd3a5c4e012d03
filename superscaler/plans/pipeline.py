"""Pipeline parallelism: contiguous stages, embedding and head included, whose work is in the order of a table.

schedule      a rule of plans/schedules.py (gpipe, zb_h1, ...: each is a plan by its own name, too), or a file with a
              row of work for each device: `0F0 0F1 0B0 0B1`
microbatches  by default two for each device
chunks        stages on each device, where the schedule has a choice (interleaved, breadth_first)
blocks        how many of the model's blocks each stage has, as 3+5+4; by default stages are balanced by FLOPs
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

from superscaler.plans import schedules
from superscaler.plans.along import along_axis
from superscaler.plans.shared import stages as balanced
from superscaler.plans.tables import Table, check, devices_of
from superscaler.verbs import (
    Graph,
    InputError,
    Microbatch,
    Op,
    SplitBackward,
    Stage,
    op_trans,
    order,
    parse_schedule,
    unknown,
)


@along_axis()
def pipeline(
    graph: Graph,
    n: int,
    axis: str,
    schedule: str = "pipeline_1f1b",
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    blocks: str = "",
) -> None:
    if stages not in (None, n):
        raise InputError(f"pipeline:stages={stages} on {n} devices; give chunks, for {n} stages each, or leave it out.")
    table = _table(schedule, n, microbatches, chunks)
    lay(graph, axis, table, balanced(graph, 1 + max(work.stage for row in table for work in row), blocks))


def lay(graph: Graph, axis: str, table: Table, parts: Sequence[Sequence[Op]]) -> None:
    """Place the ops of each stage along a mesh axis, microbatch by microbatch, and order them, as a table says.

    Stages that several devices do together are left to be cut along the axis, or replicated.
    """
    check(table)
    place = {(work.stage, work.microbatch): devices for work, devices in devices_of(table).items()}
    numbers = 1 + max(k for _, k in place)
    op_trans(graph, graph.forward_ops, Microbatch(numbers))
    for stage, ops in enumerate(parts):
        homes = [device for k in range(numbers) for device in place[stage, k]]
        for device in dict.fromkeys(homes) if len(homes) == numbers else ():
            here = [k for k, home in enumerate(homes) if home == device]
            is_all = len(here) == numbers
            chosen = ops if is_all else [part for op in ops for part in graph.parts(op)[..., here].flat()]
            op_trans(graph, chosen, Stage(device, axis))
    halved = {work.stage for row in table for work in row if work.kind == "I"}
    if trained := [op for stage in halved for op in parts[stage] if op.has_mirror]:
        op_trans(graph, trained, SplitBackward())
    order(graph, table, parts)


def _table(schedule: str, n: int, microbatches: int | None, chunks: int | None) -> Table:
    microbatches = 2 * n if microbatches is None else microbatches
    if schedule in schedules.RULES:
        rule, options = schedules.RULES[schedule], {} if chunks is None else {"chunks": chunks}
        if not options.keys() <= inspect.signature(rule).parameters.keys():
            raise InputError(f"{schedule}:chunks={chunks}: this schedule has no choice of chunks; leave it out.")
        return rule(n, microbatches, **options)
    file = Path(schedule)
    if not file.is_file():
        known = unknown("schedule", schedule, schedules.RULES)
        raise InputError(f"{known} Or give a file with a row of work for each device.")
    table = parse_schedule(file.read_text(errors="replace"))
    if len(table) != n:
        raise InputError(f"{file} has {len(table)} rows, but the pipeline {n} devices; make the two numbers equal.")
    return table
