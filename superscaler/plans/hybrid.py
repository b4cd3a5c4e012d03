"""Megatron-LM whole: data, tensor and pipeline parallelism together, dp x tp devices for each of pp stages.

dp, tp        of all stages; or of each, as dp=4+1,tp=1+2: stages of other cuts, here of 4 and of 2 devices
microbatches  of the batch of each data-parallel device
schedule      pipeline_1f1b, gpipe, zb_h1, zb_h2, zbv or dualpipe_v; or an order as text, as of `pipeline`
chunks        stages on each pipeline device; several are in the interleaved order
sequence      what tensor parallelism leaves whole is cut along the sequence; inputs of products are gathered again for
              the backward (`sequence_parallel:regather=true`), unless the schedule has backwards in halves
recompute     none; selective: products of attention; full: each layer; of all stages, or of each, as full+none
zero          1: weights and optimizer state rest in slices over dp (ZeRO-1); 0: each dp device has all
vocabulary    embedding, head and loss are cut on the vocabulary if tp divides it
halves        gradients of bf16 and fp16 weights are sent over dp in that dtype, and added in float32
blocks        number of the model's blocks in each stage, as 3+5+4 (0: see `pipeline`); by default balanced by FLOPs
gather_halves with zero=1, weights that autocast casts to these are cast in slices, and gathered in that dtype
"""

from __future__ import annotations

from superscaler.plans.lib.meshes import at_place, each
from superscaler.plans.lib.regions import recompute_stages
from superscaler.plans.lib.shared import batch_of
from superscaler.plans.lib.sizes import check_hybrid
from superscaler.plans.lib.slices import rest_at
from superscaler.plans.pipeline import pipeline
from superscaler.plans.sequence_parallel import cut_sequence
from superscaler.plans.tensor_parallel import cut_tensors
from superscaler.verbs import Cluster, Graph, Split, op_assign, op_trans, sprogram


@sprogram
def hybrid(
    graph: Graph, cluster: Cluster, dp: int | str = 1, tp: int | str = 1, pp: int = 1, microbatches: int = 1,
    chunks: int = 1, sequence: bool = False, recompute: str = "none", zero: int = 0, vocabulary: bool = True,
    halves: bool = False, gather_halves: bool = False, blocks: str = "", schedule: str = "pipeline_1f1b",
) -> None:  # fmt: skip
    meshes = check_hybrid(
        {"batch": batch_of(graph)}, cluster, dp, tp, pp, microbatches, chunks, recompute=recompute, zero=zero,
        gather_halves=gather_halves, schedule=schedule,
    )  # fmt: skip
    order = ("interleaved", chunks) if chunks != 1 else (schedule, None)
    pipeline.cut(graph, pp, "pp", schedule=order[0], microbatches=microbatches, chunks=order[1], blocks=blocks)
    regathers = any(op.has_mirror for op in graph.forward_ops) and not any(op.split for op in graph.forward_ops)
    recompute_stages(graph, each("hybrid:recompute", recompute, pp))
    if halves:
        graph.send_halves()
    if gather_halves:
        graph.gather_halves()
    if zero:
        graph.keep_gathered(graph.updates)
    for place, mesh in meshes.items():
        for n in mesh.by_server("dp") if not zero else ():
            op_trans(graph, at_place(graph, graph.forward_ops, place), Split("batch", n, axis="dp"))
        if sequence:
            cut_sequence(graph, mesh.sizes["tp"], "tp", regathers, vocabulary, place)
        else:
            cut_tensors(graph, mesh.sizes["tp"], "tp", vocabulary, place)
    for place, mesh in meshes.items():
        if zero:
            rest_at(graph, mesh.sizes["dp"], "dp", place)
        op_assign(graph, at_place(graph, graph.ops if zero else graph.forward_ops, place), mesh)
