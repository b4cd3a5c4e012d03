"""Pipelines from tables of works: each stage is placed along a mesh axis, and its works run in the order of the
table.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from superscaler.errors import divisors
from superscaler.plans.lib.shared import batch_of, is_staged, layers, reads_ahead, sequences
from superscaler.plans.lib.tables import Table, check, computed_again, devices_of
from superscaler.verbs import (
    Action,
    Graph,
    InputError,
    Microbatch,
    Op,
    Recompute,
    SplitBackward,
    Stage,
    op_trans,
    order,
)


def count_microbatches(graph: Graph, n: int, microbatches: int | None) -> int:
    """Return the number of microbatches of a pipeline on `n` devices, by default two for each device.

    Raises InputError for more than the batch has rows, and for a second pipeline.
    """
    count, size = 2 * n if microbatches is None else microbatches, batch_of(graph)
    if is_staged(graph):
        raise InputError("two pipelines, but a model is cut into stages once; choose one, on the devices of both.")
    check_microbatches(count, size)
    return count


def check_microbatches(count: int, size: int) -> None:
    """Raise InputError for fewer than one microbatch, or more than a batch has rows."""
    if not 1 <= count <= size:
        raise InputError(f"microbatches={count} of a batch of {size}; choose 1 to {size}, or a larger batch.")


def compute_again(graph: Graph, table: Table, parts: Sequence[Sequence[Op]], when: str) -> Table:
    """Apply `Recompute` to the blocks of all stages (`when`: early, late), or of the stages with works R in the table.
    Return the table with all works R.
    """
    if when not in ("", "early", "late"):
        raise InputError(f"recompute={when}: choose early or late.")
    table = computed_again(table) if when == "early" else table
    own = {work.stage for row in table for work in row if when or work.kind == "R"}
    inside = {op.name for stage in own for op in parts[stage]}
    if regions := [layer.ops for layer in layers(graph) if layer.ops[0].name in inside]:
        op_trans(graph, regions, Recompute())
    return table


def place_table(
    graph: Graph,
    axis: str,
    table: Table,
    parts: Sequence[Sequence[Op]],
    slices: int = 1,
    rows: Iterable[Sequence[Action | tuple[Action, Action]]] = (),
    forward_only: int = 0,
) -> None:
    """Place the ops of each stage along a mesh axis, microbatch by microbatch, and order them by a table.

    Stages of several devices are left to be cut along the axis, or replicated. Each microbatch comes in `slices` along
    the sequence, which the table counts as microbatches. `rows`: the table with pairs of works that take turns. The
    table has no backward of the first `forward_only` stages: those of the few ops that train there run at any place.
    """
    check(table, [stage for stage, ops in enumerate(parts) if stage >= forward_only and any(o.has_mirror for o in ops)])
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
    order(graph, rows or table, parts, whole=False)


def slice_tokens(graph: Graph, slices: int) -> None:
    """Cut all ops of tokens into slices along the sequence, each a microbatch of a microbatch.

    Raises InputError for an op whose slice reads later slices.
    """
    factors = tuple(sequences(graph, "a pipeline", slices, "slices"))
    for op in graph.forward_ops:
        if not op.from_data and (tensor := reads_ahead(graph, op, factors)):
            why = (
                "its queries may read keys of slice 1 (known is is_causal, or a constant mask of all keys so far)"
                if "attention" in op.target
                else f"it may read {tensor} of slice 1 (the rule of {op.target} says of no dim that it is causal)"
            )
            raise InputError(
                f"{op.name} ({op.module or op.target}) is not known to be causal along {' and '.join(factors)}: of "
                f"{slices} slices, in slice 0 {why}. Choose a schedule without slices, as pipeline_1f1b."
            )
    op_trans(graph, graph.forward_ops, Microbatch(slices, factors))
