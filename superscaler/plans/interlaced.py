"""The interlaced pipeline (the paper's algorithm 2): for models whose embedding and head are heavy, as mBART.

Each device has a slice of the vocabulary. All devices compute look-ups, scores and loss together, between the work of
the other layers, which are a pipeline. What a decoder looks up is looked up before all blocks. Uncut ops belong to
stages: those that sum looked up rows, and the last one, which also sums the gradient of the head's input. `recompute`
(early, late) recomputes blocks, as in a pipeline.
"""

from __future__ import annotations

from superscaler.plans.lib import schedules
from superscaler.plans.lib.around_blocks import in_three, made_by, read_by
from superscaler.plans.lib.place_table import compute_again, count_microbatches, place_table
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import decompose_losses, tensor_splits
from superscaler.plans.lib.stages import stages
from superscaler.verbs import Graph, InputError, op_trans


@along_axis(batches=True)
def interlaced(graph: Graph, n: int, axis: str, microbatches: int | None = None, recompute: str = "") -> None:
    microbatches = count_microbatches(graph, n, microbatches)
    decompose_losses(graph, n)
    splits = tensor_splits(graph, n, axis, in_blocks=False, lookups=True)
    before, within, after = in_three(graph)
    if all(op.from_data for op in before) or all(op.from_data for op in after):
        raise InputError("interlaced needs an embedding, repeated blocks and a head; choose pipeline_1f1b.")
    middle = stages(graph, n, ops=within)
    middle = [[*read_by(graph, before, stage, splits), *stage] for stage in middle]
    middle[-1] += made_by(after, middle[-1], splits)
    own = {op.name for stage in middle for op in stage}
    parts = [[op for op in before if op.name not in own], *middle, [op for op in after if op.name not in own]]
    place_table(graph, axis, compute_again(graph, schedules.interlaced(n, microbatches), parts, recompute), parts)
    for op in (*before, *after):
        for split in splits.get(op.name, ()):
            op_trans(graph, [op], split)
