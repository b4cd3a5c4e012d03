"""3F1B: a pipeline of several forward passes, the last of them trained alone (the paper's AlphaFold2).

Stage s of each pass is on device s, so that all passes share its weights.
"""

from __future__ import annotations

from itertools import pairwise

from superscaler.plans.lib import schedules
from superscaler.plans.lib.place_table import count_microbatches, place_table
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.stages import stages
from superscaler.verbs import Graph, InputError, Op


@along_axis(batches=True)
def three_f_one_b(graph: Graph, n: int, axis: str, microbatches: int | None = None) -> None:
    ops = list(graph.forward_ops)
    calls = graph.blocks[0].calls if graph.blocks else ()
    trained = [any(op.has_mirror for op in call) for call in calls]
    if len(calls) < 2 or trained.index(True) != len(calls) - 1:
        raise InputError(
            f"three_f_one_b: the model's first block runs {len(calls)} times a step, {sum(trained)} of them with a "
            "backward; it needs several passes, all but the last without gradients. Choose pipeline_1f1b."
        )
    bounds = [0, *(ops.index(call[0]) for call in calls[1:]), len(ops)]
    passes = [ops[a:b] for a, b in pairwise(bounds)]
    parts = stages(graph, n, ops=passes[-1])
    stage_of = {op.name: stage for stage, own in enumerate(parts) for op in own}
    blocks = {op.name: stage_of[block.calls[-1][0].name] for block in graph.blocks for op in block.ops}
    others = [part for own in passes[:-1] for part in _like(own, blocks, n)]
    if not all(others):
        raise InputError(
            f"three_f_one_b over {n} devices: stage {others.index([]) % n} of the passes without gradients has none of "
            f"the model's {len(graph.blocks)} blocks; choose fewer devices, or more layers."
        )
    table = schedules.three_f_one_b(n, count_microbatches(graph, n, microbatches), len(calls))
    place_table(graph, axis, table, others + parts, forward_only=len(others))


def _like(ops: list[Op], blocks: dict[str, int], n: int) -> list[list[Op]]:
    """Return the stages of a pass: each block in its own stage, all other ops with the block before them."""
    parts: list[list[Op]] = [[] for _ in range(n)]
    stage = 0
    for op in ops:
        stage = blocks.get(op.name, stage)
        parts[stage].append(op)
    return parts
