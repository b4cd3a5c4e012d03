"""ZeRO: data parallel, with the optimizer's state, the gradients, or all resident tensors in slices over devices.

`shard` devices (0: all) share one copy of the weights; further groups of as many have copies of their own (hybrid
sharding). A weight is cut on its largest index that `shard` divides; a large weight without one is cut unevenly.

stage 1  weights and optimizer state rest in slices; each weight is gathered once a step and stays whole until its last
         reader, however many microbatches there are and whatever is recomputed
stage 2  also: under accumulation (`microbatches`) the gradients of each microbatch are added up in slices
stage 3  also: weights of blocks are gathered again for the backward. All blocks but the last `keep` are recomputed then
         (`Recompute`, one region a block), those keep activations (`Regather`). Frozen weights rest in slices, too

With `secondary` under stage 3, blocks gather their weights from copies, each in slices over so many devices side by
side: a server. Copies are made once a step, for the first forward; other servers are then not asked again (hpZ of
ZeRO++).

Matrices of an optimizer that needs them whole (Muon) rest whole, each on the one of `shard` devices with the fewest
elements. `halves`: gradients of bf16 and fp16 weights are sent to their slices in that dtype, and added in float32.

`gather_halves`: weights that autocast casts to bf16 or fp16 rest in float32, are cast in slices, and are gathered in
that dtype, as by `param_dtype` of FSDP2. With `halves`, their gradients are sent in it, too.
"""

from __future__ import annotations

from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import batch_of, layers
from superscaler.plans.lib.sizes import check_shards
from superscaler.plans.lib.slices import Slices, check_stage
from superscaler.verbs import Graph, Microbatch, Recompute, Regather, op_trans


@along_axis(last=True)
def zero(
    graph: Graph, n: int, axis: str, stage: int = 1, shard: int = 0, microbatches: int = 1, keep: int = 0,
    halves: bool = False, secondary: int = 0, gather_halves: bool = False,
) -> None:  # fmt: skip
    shard = shard or n
    check_stage(stage, shard, microbatches, keep, secondary)
    check_shards({"batch": batch_of(graph)}, n, shard, microbatches, gather_halves)
    if halves:
        graph.send_halves()
    if gather_halves:
        graph.gather_halves()
    if stage < 3:
        graph.keep_gathered(graph.updates)
    if microbatches > 1:
        op_trans(graph, graph.forward_ops, Microbatch(microbatches))
    slices = Slices(graph, n, shard, secondary, axis)
    slices.cut(graph.forward_ops)
    frozen = [t.name for t in graph.model.parameters() if t.name not in graph.updates and graph.model.uses[t.name]]
    for weight in (*graph.updates, *(frozen if stage == 3 else ())):
        parts = slices.rest(weight)
        if stage > 1 and microbatches > 1 and weight in graph.updates:
            op_trans(graph, parts, Microbatch(microbatches))
    regions = [[op for op in layer.ops if not op.region] for layer in layers(graph)] if stage == 3 else []
    first = max(len(regions) - keep, 0)
    for algorithm, some in ((Recompute(), regions[:first]), (Regather(), regions[first:])):
        if trained := [ops for ops in some if any(op.has_mirror for op in ops)]:
            op_trans(graph, trained, algorithm)
