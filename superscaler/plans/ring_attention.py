"""Ring attention: the sequence is cut everywhere; keys and values pass around the devices of a ring.

Device i has chunk i of n chunks of the sequence; with `zigzag` it has chunks i and 2n - 1 - i of 2n, which evens the
work of causal attention. A device keeps its own keys and values; those of others are sent again for the backward, or
(`recompute=false`) are kept. Scores are kept nowhere: memory is linear in the sequence.

zigzag=documents      several chunks of each device even the work of packed rows
documents=A+B         the lengths of documents in a row, for which it is even; default: those of the captured batch;
                      with any others the plan is exact too
chunks                of a device; default: as few as make it even to 5 %, of 1, 2, 4 and 8
"""

from __future__ import annotations

from typing import Literal

from superscaler.plans.lib.documents import ring
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import along, attentions
from superscaler.verbs import AttentionBlocks, Graph, Split, op_trans


@along_axis(first=True)
def ring_attention(
    graph: Graph,
    n: int,
    axis: str,
    zigzag: bool | Literal["documents"] = False,
    recompute: bool = True,
    documents: str = "",
    chunks: int = 0,
) -> None:
    found = attentions(graph, "ring_attention")
    places = ring(graph, found, n, zigzag, documents, chunks)
    count = len(places)
    made = [parts.op for parts in op_trans(graph, found, AttentionBlocks(count, again=recompute))]
    followed = [(op.indices[i.follows[0]], i) for op in made for i in op.indices if i.follows]
    factors = dict.fromkeys(index.factor for pair in followed for index in pair)
    steps: dict[str, int] = {}
    for op in graph.forward_ops:
        first = next((o.tensor for o in op.inputs), "")
        if op.is_copy or first in steps:
            steps[op.outputs[0].tensor] = steps.get(first, -1) + op.is_copy
        step = steps.get(op.outputs[0].tensor, 0)
        if factor := along(op, factors):
            op_trans(graph, op, Split(factor, count, axis=axis, at=places[step:] + places[:step]))
