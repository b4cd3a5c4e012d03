"""Megatron-LM whole: data, tensor and pipeline parallelism together, dp x tp devices for each of pp stages.

microbatches  of the batch of each data-parallel device, in the order of 1F1B
chunks        stages on each pipeline device; several are in the interleaved order
sequence      ops that tensor parallelism leaves whole are cut along the sequence, and gathered inputs of products are
              gathered again for the backward instead of being kept (`sequence_parallel:regather=true`)
recompute     none; selective: the products of attention; full: each layer, which keeps its input only
zero          1: weights and optimizer state rest in slices over dp (ZeRO-1); 0: each dp device has all
vocabulary    embedding, head and loss are cut on the vocabulary if tp divides it
halves        gradients of bf16 and fp16 weights are sent over dp in that dtype, and added in float32
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from superscaler.plans.data_parallel import data_parallel
from superscaler.plans.lib.place_table import check_microbatches
from superscaler.plans.lib.schedules import check_rounds
from superscaler.plans.lib.shared import batch_of
from superscaler.plans.pipeline import pipeline
from superscaler.plans.recompute import recompute as recomputing
from superscaler.plans.sequence_parallel import sequence_parallel
from superscaler.plans.tensor_parallel import tensor_parallel
from superscaler.plans.zero import zero as sharding
from superscaler.specs.options import check_shared
from superscaler.verbs import Cluster, Graph, InputError, Mesh, op_assign, sprogram

REGIONS = {"none": "", "selective": "attention", "full": "block"}


def check(
    sizes: Mapping[str, int], cluster: Cluster, dp: int = 1, tp: int = 1, pp: int = 1, microbatches: int = 1,
    chunks: int = 1, sequence: bool = False, recompute: str = "none", zero: int = 0, **_: Any,
) -> Mesh:  # fmt: skip
    """Raise InputError for options that no model of these sizes has on a cluster; return the mesh of its devices."""
    if recompute not in REGIONS:
        raise InputError(f"hybrid:recompute={recompute}: choose {', '.join(REGIONS)}.")
    if zero not in (0, 1):
        raise InputError(f"hybrid:zero={zero}: choose 0 or 1; for stages 2 and 3 zero is a factor of a product.")
    mesh = cluster.mesh(pp=pp, dp=dp, tp=tp)
    if dp > 1:
        # Microbatches of one device may differ in size.
        check_shared(sizes, "batch", dp=dp, microbatches=microbatches)
    check_microbatches(microbatches, sizes.get("batch", microbatches))
    check_shared(sizes, "heads", tp=tp)
    if sequence:
        check_shared(sizes, "seq", tp=tp)
    if chunks > 1:
        check_rounds(pp, microbatches)
    return mesh


@sprogram
def hybrid(
    graph: Graph,
    cluster: Cluster,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    microbatches: int = 1,
    chunks: int = 1,
    sequence: bool = False,
    recompute: str = "none",
    zero: int = 0,
    vocabulary: bool = True,
    halves: bool = False,
) -> None:
    mesh = check({"batch": batch_of(graph)}, cluster, dp, tp, pp, microbatches, chunks, recompute=recompute, zero=zero)
    order = ("interleaved", chunks) if chunks != 1 else ("pipeline_1f1b", None)
    pipeline.cut(graph, pp, "pp", schedule=order[0], microbatches=microbatches, chunks=order[1])
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
        sharding.cut(graph, dp, "dp", halves=halves)
    op_assign(graph, graph.ops if zero else graph.forward_ops, mesh)
