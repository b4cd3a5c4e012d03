"""DeepSpeed-Ulysses: the sequence is cut everywhere, but heads inside attention, with an all_to_all on either side.

Ops that depend on inputs alone are computed by all devices.
"""

from __future__ import annotations

from math import gcd

from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import along, attentions, made_for, sequences
from superscaler.verbs import Graph, InputError, Op, Split, op_trans


@along_axis()
def ulysses(graph: Graph, n: int, axis: str) -> None:
    heads: dict[str, list[Split]] = {}
    # What repeats heads for the queries that share them comes after the all_to_all.
    repeating = {op.name for op in graph.forward_ops if any(word in op.target for word in ("expand", "view"))}
    for attention in attentions(graph, "ulysses"):
        own = made_for(graph, [attention], repeating)
        heads |= dict.fromkeys((op.name for op in own), _heads(graph, attention, n, axis))
    tokens = sequences(graph, "ulysses", n)
    for op in graph.forward_ops:
        factor = "" if op.from_data else along(op, tokens)
        for cut in heads.get(op.name, [Split(factor, n, axis=axis)] if factor else []):
            op_trans(graph, op, cut)


def _heads(graph: Graph, op: Op, count: int, axis: str) -> list[Split]:
    """Return the cuts of the heads of an attention; of grouped ones those of keys first, then queries of each."""
    out, left, cuts, seen = op.outputs[0], count, list[Split](), list[str]()
    dims = graph.model.tensors[out.tensor].slots
    first = sum(map(len, dims[:-3]))
    for index in (op.indices[i] for i in out.slots[first : first + len(dims[-3])] if i is not None):
        seen.append(f"{index.factor} of {index.size}")
        cuts.append(Split(index.factor, gcd(left, index.size), axis=axis))
        left //= cuts[-1].parts
    if left > 1:
        raise InputError(
            f"ulysses over {count} devices cuts heads, but {op.name} ({op.module}) has {', '.join(seen) or 'none'}; "
            "choose a number of devices that divides them."
        )
    return cuts
