"""Pipeline parallelism: contiguous stages, embedding and head included, that work in the order of a table.

schedule      a rule of plans/lib/schedules.py (gpipe, zb_h1, ...: each is a plan by its own name, too); an order as
              text, as F(FB)B/(FB), where parentheses repeat (plans/lib/order_text.py); or a file with a row of actions
              for each device: `0F0 0F1 0B0 0B1`
microbatches  by default two for each device
chunks        stages on each device, for schedules with a choice (interleaved, breadth_first)
slices        of each microbatch along the sequence, for schedules with a choice (terapipe, seq1f1b) and causal models.
              They are numbered through all microbatches: slice 1 of 4 of microbatch 2 is 9
blocks        number of the model's blocks in each stage, as 3+5+4; by default stages are balanced by FLOPs. The first
              may be 0, of a stage of the embedding alone, and the last, of one of the head alone
recompute     late: blocks are recomputed when the gradient of their stage is there; early: before that, so that the
              device does not wait for it idle. A file has R for early recomputation: `0R0 0B0`
offload       number of tapes that a device keeps, each what autograd keeps of a stage and a microbatch. Others are in
              the memory of its host between forward and backward; 2 leaves time to copy them back. 0: it keeps all
"""

from __future__ import annotations

from superscaler.plans.lib.order_text import microbatches_of
from superscaler.plans.lib.place_table import compute_again, count_microbatches, place_table
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.schedules import RULES, is_text, table_of
from superscaler.plans.lib.sizes import check_stages
from superscaler.plans.lib.stages import stages as balanced
from superscaler.verbs import Graph, InputError


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
    offload: int = 0,
) -> None:
    check_stages(n, stages)
    if is_text(schedule):
        microbatches = count_microbatches(graph, n, microbatches or microbatches_of(schedule))
    elif schedule in RULES:
        microbatches = count_microbatches(graph, n, microbatches)
    if offload < 0:
        raise InputError(f"offload={offload}: a device keeps 1 tape or more; choose 1, 2, ..., or 0 to keep all.")
    if offload:
        graph.offload_tapes(offload)
    options = {"microbatches": microbatches, "chunks": chunks, "slices": slices}
    table, slices = table_of(schedule, n, {k: v for k, v in options.items() if v is not None})
    if schedule == "breadth_first":
        graph.gather_once()
    parts = balanced(graph, 1 + max(work.stage for row in table for work in row), blocks)
    place_table(graph, axis, compute_again(graph, table, parts, recompute), parts, slices)
