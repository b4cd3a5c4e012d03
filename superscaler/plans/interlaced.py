"""The interlaced pipeline (the paper's algorithm 2): for models whose embedding and head are heavy, as mBART.

All devices have a slice of the vocabulary: they look up, and compute scores and loss, together, between the work of the
other layers, which are a pipeline. `recompute` (early, late) computes blocks again, as in a pipeline.
"""

from __future__ import annotations

from superscaler.plans.lib import schedules
from superscaler.plans.lib.place_table import compute_again, count_microbatches, place_table
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import decompose_losses, stages, tensor_splits
from superscaler.verbs import Graph, InputError, op_trans


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
    table = schedules.interlaced(n, microbatches)
    parts = [ops[:first], *stages(graph, n, ops=ops[first:last]), ops[last:]]
    place_table(graph, axis, compute_again(graph, table, parts, recompute), parts)
    for op in (*ops[:first], *ops[last:]):
        for split in splits.get(op.name, ()):
            op_trans(graph, [op], split)
