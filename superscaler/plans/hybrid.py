"""Megatron-LM whole: data, tensor and pipeline parallelism together, dp x tp devices for each of pp stages.

microbatches  of the batch of each data-parallel device, in the order of 1F1B
chunks        stages on each pipeline device; several are in the interleaved order
sequence      ops that tensor parallelism leaves whole are cut along the sequence, and gathered inputs of products are
              gathered again for the backward instead of being kept (`sequence_parallel:regather=true`)
recompute     none; selective: the products of attention; full: each layer, which keeps its input only
zero          1: weights and optimizer state rest in slices over dp (ZeRO-1); 0: each dp device has all
vocabulary    embedding, head and loss are cut on the vocabulary if tp divides it
halves        gradients of bf16 and fp16 weights are sent over dp in that dtype, and added in float32
blocks        number of the model's blocks in each stage, as 3+5+4; by default stages are balanced by FLOPs
gather_halves with zero=1, weights that autocast casts to these are cast in slices, and gathered in that dtype
"""

from __future__ import annotations

from superscaler.plans.data_parallel import data_parallel
from superscaler.plans.lib.shared import batch_of
from superscaler.plans.lib.sizes import REGIONS, check_hybrid
from superscaler.plans.pipeline import pipeline
from superscaler.plans.recompute import recompute as recomputing
from superscaler.plans.sequence_parallel import sequence_parallel
from superscaler.plans.tensor_parallel import tensor_parallel
from superscaler.plans.zero import zero as sharding
from superscaler.verbs import Cluster, Graph, op_assign, sprogram


@sprogram
def hybrid(
    graph: Graph, cluster: Cluster, dp: int = 1, tp: int = 1, pp: int = 1, microbatches: int = 1, chunks: int = 1,
    sequence: bool = False, recompute: str = "none", zero: int = 0, vocabulary: bool = True, halves: bool = False,
    gather_halves: bool = False, blocks: str = "",
) -> None:  # fmt: skip
    mesh = check_hybrid(
        {"batch": batch_of(graph)}, cluster, dp, tp, pp, microbatches, chunks, recompute=recompute, zero=zero,
        gather_halves=gather_halves,
    )  # fmt: skip
    order = ("interleaved", chunks) if chunks != 1 else ("pipeline_1f1b", None)
    pipeline.cut(graph, pp, "pp", schedule=order[0], microbatches=microbatches, chunks=order[1], blocks=blocks)
    is_trained = any(op.has_mirror for op in graph.forward_ops)
    if what := REGIONS[recompute]:
        recomputing.cut(graph, 1, "", what=what)
    for n in mesh.by_server("dp") if not zero else ():
        data_parallel.cut(graph, n, "dp", halves=halves)
    if sequence:
        sequence_parallel.cut(graph, tp, "tp", vocabulary=vocabulary, regather=is_trained)
    else:
        tensor_parallel.cut(graph, tp, "tp", vocabulary=vocabulary)
    if zero:
        sharding.cut(graph, dp, "dp", halves=halves, gather_halves=gather_halves)
    op_assign(graph, graph.ops if zero else graph.forward_ops, mesh)
