"""The interlaced pipeline (the paper's algorithm 2): for models whose embedding and head are heavy, as mBART.

Each device has a slice of the vocabulary. All devices compute look-ups, scores and loss together, between the work of
the other layers, which are a pipeline. Uncut ops belong to stages: the first one sums the looked up rows, the last one
the gradient of the head's input. `recompute` (early, late) recomputes blocks, as in a pipeline.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from superscaler.plans.lib import schedules
from superscaler.plans.lib.place_table import compute_again, count_microbatches, place_table
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import decompose_losses, stages, tensor_splits
from superscaler.verbs import Graph, InputError, Op, op_trans


@along_axis(batches=True)
def interlaced(graph: Graph, n: int, axis: str, microbatches: int | None = None, recompute: str = "") -> None:
    microbatches = count_microbatches(graph, n, microbatches)
    decompose_losses(graph, n)
    splits = tensor_splits(graph, n, axis, in_blocks=False, lookups=True)
    inside = {op.name for block in graph.blocks for op in block.ops}
    ops = list(graph.forward_ops)
    at = [k for k, op in enumerate(ops) if op.name in inside]
    first, last = (at[0], at[-1] + 1) if at else (0, 0)
    if all(op.from_data for op in ops[:first]) or all(op.from_data for op in ops[last:]):
        raise InputError("interlaced needs an embedding, repeated blocks and a head; choose pipeline_1f1b.")
    middle = stages(graph, n, ops=ops[first:last])
    before = _read_by(graph, ops[:first], middle[0], splits)
    after = _made_by([op for op in ops[last:] if not op.from_data], middle[-1], splits)
    middle[0], middle[-1] = [*before, *middle[0]], [*middle[-1], *after]
    shared = [[op for op in some if op not in (*before, *after)] for some in (ops[:first], ops[last:])]
    parts = [shared[0], *middle, shared[1]]
    place_table(graph, axis, compute_again(graph, schedules.interlaced(n, microbatches), parts, recompute), parts)
    for op in (*ops[:first], *ops[last:]):
        for split in splits.get(op.name, ()):
            op_trans(graph, [op], split)


def _read_by(graph: Graph, ops: Sequence[Op], stage: Sequence[Op], splits: Collection[str]) -> list[Op]:
    """Return, beside cut ops, the uncut ops whose results only this stage reads. The stage needs the sum of rows."""
    inside = {op.name for op in stage}
    for op in reversed(ops) if any(op.name in splits for op in ops) else ():
        readers = {reader.name for o in op.outputs for reader, _ in graph.model.uses[o.tensor]}
        if readers and readers <= inside and op.name not in splits and not op.from_data:
            inside.add(op.name)
    return [op for op in ops if op.name in inside]


def _made_by(ops: Sequence[Op], stage: Sequence[Op], splits: Collection[str]) -> list[Op]:
    """Return, beside cut ops, uncut ops of a stage alone: they read its values, and none made on all devices."""
    made, shared, found = {o.tensor for op in stage for o in op.outputs}, set[str](), list[Op]()
    for op in ops if any(op.name in splits for op in ops) else ():
        inputs = {o.tensor for o in op.inputs}
        if is_alone := op.name not in splits and inputs & made and not inputs & shared:
            found.append(op)
        (made if is_alone else shared).update(o.tensor for o in op.outputs)
    return found
