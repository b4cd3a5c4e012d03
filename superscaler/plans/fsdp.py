"""FSDP as in PyTorch: data parallel, with all weights in slices. The weights of a block are gathered for its forward,
and again for its backward.

shard         devices that share one copy of the weights (0: all). With as many as a server has, slices are inside of
              servers and copies between them (HSDP)
recompute     blocks are recomputed in the backward, as under activation checkpointing; else they keep activations
microbatches  forwards and backwards of a step; each gathers weights and scatters gradients
secondary     devices side by side that share a copy of the weights of blocks, in slices, from which blocks gather: a
              server, where slices are over several (hpZ of ZeRO++)
gather_halves weights that autocast casts are cast in slices, and gathered in bf16 or fp16 (as by `param_dtype`)
halves        gradients of these, and of weights in 16 bits, are sent in that dtype (`reduce_dtype`), else in float32

This is `zero:stage=3`, which also has what lies between: `keep=N` recomputes all but the last N blocks.
"""

from __future__ import annotations

from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import layers
from superscaler.plans.zero import zero
from superscaler.verbs import Graph


@along_axis(last=True)
def fsdp(
    graph: Graph, n: int, axis: str, shard: int = 0, recompute: bool = False, microbatches: int = 1, secondary: int = 0,
    halves: bool = False, gather_halves: bool = False,
) -> None:  # fmt: skip
    kept, ways = 0 if recompute else len(layers(graph)), {"halves": halves, "gather_halves": gather_halves}
    zero.cut(graph, n, axis, stage=3, shard=shard, microbatches=microbatches, keep=kept, secondary=secondary, **ways)
