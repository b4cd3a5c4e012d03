"""Pipeline parallelism: contiguous stages, embedding and head included, whose work is in the order of a table.

schedule      a rule of plans/schedules.py (gpipe, zb_h1, ...: each is a plan by its own name, too), or a file with a
              row of work for each device: `0F0 0F1 0B0 0B1`
microbatches  by default two for each device
chunks        stages on each device, where the schedule has a choice (interleaved, breadth_first)
slices        of each microbatch along the sequence, where the schedule has a choice (terapipe, seq1f1b): these are
              numbered through all microbatches, so that slice 1 of 4 of microbatch 2 is 9. For causal models
blocks        how many of the model's blocks each stage has, as 3+5+4; by default stages are balanced by FLOPs
recompute     early or late: blocks are computed again in the backward, before the gradient of their stage is there, so
              that a device does not wait for it idle, or once it is. A file says early where it has R: `0R0 0B0`
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from superscaler.errors import divisors
from superscaler.plans import schedules
from superscaler.plans.along import along_axis
from superscaler.plans.shared import layers, reads_ahead, sequences
from superscaler.plans.shared import stages as balanced
from superscaler.plans.tables import Table, check, computed_again, devices_of
from superscaler.verbs import (
    Graph,
    InputError,
    Microbatch,
    Op,
    Recompute,
    SplitBackward,
    Stage,
    Work,
    op_trans,
    order,
    parse_schedule,
    unknown,
)


@along_axis(batches=True)
def pipeline(
    graph: Graph,
    n: int,
    axis: str,
    schedule: str = "pipeline_1f1b",
    stages: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
    slices: int | None = None,
    blocks: str = "",
    recompute: str = "",
) -> None:
    if stages not in (None, n):
        raise InputError(f"pipeline:stages={stages} on {n} devices; give chunks, for {n} stages each, or leave it out.")
    options = {k: v for k, v in (("chunks", chunks), ("slices", slices)) if v is not None}
    table, slices = _table(schedule, n, microbatches, options)
    parts = balanced(graph, 1 + max(work.stage for row in table for work in row), blocks)
    lay(graph, axis, compute_again(graph, table, parts, recompute), parts, slices)


def compute_again(graph: Graph, table: Table, parts: Sequence[Sequence[Op]], when: str) -> Table:
    """Compute the blocks of all stages again (`when`: early, late), or of those of which a table says when; return the
    table that says so.
    """
    if when not in ("", "early", "late"):
        raise InputError(f"recompute={when}: choose early or late.")
    table = computed_again(table) if when == "early" else table
    own = {work.stage for row in table for work in row if when or work.kind == "R"}
    inside = {op.name for stage in own for op in parts[stage]}
    for layer in layers(graph) if inside else ():
        if layer.ops[0].name in inside:
            op_trans(graph, layer.ops, Recompute())
    return table


def lay(
    graph: Graph,
    axis: str,
    table: Table,
    parts: Sequence[Sequence[Op]],
    slices: int = 1,
    rows: Iterable[Sequence[Work | tuple[Work, Work]]] = (),
) -> None:
    """Place the ops of each stage along a mesh axis, microbatch by microbatch, and order them, as a table says.

    Stages that several devices do together are left to be cut along the axis, or replicated. Each microbatch comes in
    `slices` along the sequence, which the table counts as microbatches. `rows` are those of the table with pairs of
    works that take turns.
    """
    check(table)
    place = {(work.stage, work.microbatch): devices for work, devices in devices_of(table).items()}
    numbers = 1 + max(k for _, k in place)
    if numbers % slices:
        raise InputError(
            f"a table of {numbers} microbatches is not one of {slices} slices each; choose {divisors(numbers)}."
        )
    if numbers > slices or slices == 1:
        op_trans(graph, graph.forward_ops, Microbatch(numbers // slices))
    if slices > 1:
        slice_tokens(graph, slices)
    for stage, ops in enumerate(parts):
        homes = [device for k in range(numbers) for device in place[stage, k]]
        for device in dict.fromkeys(homes) if len(homes) == numbers else ():
            here = [k for k, home in enumerate(homes) if home == device]
            is_all = len(here) == numbers
            if slices > 1 and not is_all:
                raise InputError(
                    f"stage {stage} has slices on several devices; put all its work on one, or take slices=1."
                )
            chosen = ops if is_all else [part for op in ops for part in graph.parts(op)[..., here].flat()]
            op_trans(graph, chosen, Stage(device, axis))
    halved = {work.stage for row in table for work in row if work.kind == "I"}
    if trained := [op for stage in halved for op in parts[stage] if op.has_mirror]:
        op_trans(graph, trained, SplitBackward())
    order(graph, rows or table, parts)


def slice_tokens(graph: Graph, slices: int) -> None:
    """Cut all that is computed of tokens into slices along the sequence, as microbatches of the microbatches.

    Raises InputError for an op of which a slice reads later ones.
    """
    factors = tuple(sequences(graph, "a pipeline", slices, "slices"))
    for op in graph.forward_ops:
        if not op.from_data and (tensor := reads_ahead(graph, op, factors)):
            what = "its queries read keys of" if "attention" in op.target else f"it reads {tensor} of"
            raise InputError(
                f"{op.name} ({op.module or op.target}) is not causal along {' and '.join(factors)}: of {slices} "
                f"slices, in slice 0 {what} slice 1. Choose a schedule without slices, as pipeline_1f1b."
            )
    op_trans(graph, graph.forward_ops, Microbatch(slices, factors))


def _table(schedule: str, n: int, microbatches: int | None, options: Mapping[str, int]) -> tuple[Table, int]:
    """Return a table, and how many of its microbatches are slices of one."""
    microbatches = 2 * n if microbatches is None else microbatches
    if schedule in schedules.RULES:
        rule = schedules.RULES[schedule]
        known = inspect.signature(rule).parameters
        for name in options.keys() - known.keys():
            raise InputError(f"{schedule}:{name}={options[name]}: this schedule has no choice of {name}; leave it out.")
        slices = options.get("slices", known["slices"].default if "slices" in known else 1)
        return rule(n, microbatches, **options), slices
    file = Path(schedule)
    if not file.is_file():
        told = unknown("schedule", schedule, schedules.RULES)
        raise InputError(f"{told} Or give a file with a row of work for each device.")
    table = parse_schedule(file.read_text(errors="replace"))
    if len(table) != n:
        raise InputError(f"{file} has {len(table)} rows, but the pipeline {n} devices; make the two numbers equal.")
    return table, options.get("slices", 1)
