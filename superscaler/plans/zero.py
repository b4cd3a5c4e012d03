"""ZeRO: data parallel, with the optimizer's state, the gradients, or all that rests in slices over devices.

`shard` devices (0: all) share one copy of the weights; further groups of as many have copies of their own (hybrid
sharding). A weight is cut on its largest index that `shard` divides, unevenly where it divides none, if large enough.

stage 1  a weight and its optimizer state rest in slices, and are gathered for the forward until the backward is done
stage 2  so, and under accumulation (`microbatches`) the gradients of each microbatch are added up in slices
stage 3  so, and weights of blocks are gathered again for the backward: all but the last `keep` are computed again then
         (`Recompute`, one region a block), those keep activations (`Regather`)
"""

from __future__ import annotations

import numpy as np

from superscaler.plans.shared import check_uses_all
from superscaler.verbs import (
    Cluster,
    Graph,
    InputError,
    Microbatch,
    Op,
    Recompute,
    Regather,
    Replicate,
    Split,
    op_assign,
    op_trans,
    sprogram,
)


@sprogram
def zero(graph: Graph, cluster: Cluster, stage: int = 1, shard: int = 0, microbatches: int = 1, keep: int = 0) -> None:
    n = len(cluster.devices)
    shard = shard or n
    check_uses_all(cluster, "zero", shard=shard, copies=n // shard)
    if stage not in (1, 2, 3) or keep < 0:
        raise InputError(f"zero:stage={stage},keep={keep}: choose stage 1, 2 or 3, and keep at least 0 blocks.")
    devices = np.arange(n).reshape(-1, shard)
    for op in graph.ops:
        cuts = [Split("batch", k) if op.is_forward else Replicate(k) for k in devices.shape]
        if not (op.is_forward or op.is_write):
            cuts[1] = _slice(op, shard)
        parts = graph.parts(op)
        if op.is_forward or (stage > 1 and microbatches > 1 and not op.is_write):
            parts = op_trans(graph, parts, Microbatch(microbatches))
        for cut in cuts:
            parts = op_trans(graph, parts, cut)
        op_assign(graph, parts, devices)
    for left, block in zip(range(len(graph.blocks), 0, -1), graph.blocks if stage == 3 else (), strict=False):
        op_trans(graph, block.ops, Regather() if left <= keep else Recompute())


def _slice(op: Op, count: int) -> Split | Replicate:
    sizes = {i.factor: op.indices[at].size for i in op.indices if (at := op.find(i.factor)) is not None}
    _, size, factor = max(((size % count == 0, size, f) for f, size in sizes.items()), default=(False, 0, ""))
    parts = tuple((k + 1) * size // count - k * size // count for k in range(count))
    return Split(factor, sizes=parts) if size >= count else Replicate(count)
