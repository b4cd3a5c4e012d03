"""Co-shard: heads and feed-forward hidden of blocks in parts on the same device, one after the other. Blocks are
recomputed, and each part inside once more: a block keeps its input, and one part of its activations exists at a time.

parts=N         number of parts, on top of the cuts of other plans in a product
blocks=first:N  the first N blocks only (default: all)
factors=A+B     the cut factors, by name or its end (`heads`); default: those of tensor parallelism

Its own devices are data parallel: `co_shard:2,parts=4 x pipeline_1f1b:2 x tensor_parallel:2`.
"""

from __future__ import annotations

import re

from superscaler.errors import unknown
from superscaler.plans.gradient_accumulation import gradient_accumulation
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import joined, layers, made_for, splits_within, undivided
from superscaler.verbs import Block, Graph, InputError, Op, Recompute, Split, op_trans


@along_axis(recomputes=True)
def co_shard(
    graph: Graph, n: int, axis: str, parts: int = 4, blocks: str = "all", factors: str = "", microbatches: int = 1
) -> None:
    if parts < 2:
        raise InputError(f"co_shard:parts={parts}: give 2 or more; recompute recomputes whole blocks.")
    chosen, what = _blocks(graph, blocks), f"co_shard:parts={parts}"
    cuts = _named(graph, parts, factors) if factors else splits_within(graph, parts, what)
    gradient_accumulation.cut(graph, n, axis, microbatches=microbatches)
    groups = [(block.path, ops) for block in chosen for ops in joined(op for op in block.ops if cuts.get(op.name))]
    if not groups and factors:
        raise InputError(f"{what}: none of these blocks has a factor to cut into so many parts.")
    if not groups:
        raise undivided(graph, parts, what)
    for op, cut in ((one, cut) for _, ops in groups for one in ops for cut in cuts[one.name]):
        op_trans(graph, op, cut)
    regions = list[tuple[Op, ...] | list[Op]]()
    for block in chosen:
        inner = [made_for(graph, ops, {op.name for op in block.ops}) for path, ops in groups if path == block.path]
        rest = [op for op in block.ops if op.has_mirror and not any(op in ops for ops in inner)]
        regions += [block.ops, *inner] if rest and inner else inner
    op_trans(graph, regions, Recompute())


def _blocks(graph: Graph, blocks: str) -> list[Block]:
    if not (count := re.fullmatch(r"first:([1-9]\d*)", blocks)) and blocks != "all":
        raise InputError(f"co_shard:blocks={blocks}: give all, or first:N.")
    return layers(graph)[: int(count[1]) if count else None]


def _named(graph: Graph, parts: int, factors: str) -> dict[str, list[Split]]:
    found: list[str] = []
    for name in factors.split("+"):
        own = [factor for factor in graph.factors if f".{factor}".endswith(f".{name}")]
        if not own:
            known = {factor.rpartition(".")[2] for factor in graph.factors}
            raise InputError(f"co_shard:factors={factors}: {unknown('factor', name, known)}")
        found += own
    return {op.name: [Split(f, parts) for f in found if op.find(f) is not None] for op in graph.forward_ops}
