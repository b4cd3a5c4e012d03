"""Parts that must know where they are: rows of a vocabulary, and queries that see no later key."""

from __future__ import annotations

import pytest

from superscaler.cluster import Cluster
from superscaler.emit.segments import emit_segments
from superscaler.plan import Graph, compile
from superscaler.verbs import Split, op_assign, op_trans, sprogram
from tests.graphs import graph_of


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(("target", "slot", "function"), [
    ("aten.embedding.default", 0, "embedding_part"),
    ("aten.scaled_dot_product_attention.default", -2, "causal_mask"),
])  # fmt: skip
def test_a_part_knows_where_it_starts(target: str, slot: int, function: str, parts: int) -> None:
    graph = graph_of("gpt2:size=tiny", "SGD")
    op = next(op for op in graph.forward_ops if op.target == target)
    index = op.inputs[0].slots[slot]
    assert index is not None
    factor, size = op.indices[index].factor, op.indices[index].size
    sizes = (*[size // parts + 1] * (parts - 1), size - (size // parts + 1) * (parts - 1))

    @sprogram
    def uneven(graph: Graph, cluster: Cluster) -> None:
        for op in graph.forward_ops:
            op_assign(graph, op_trans(graph, op, Split(factor, sizes=sizes)), cluster.devices)

    plan = compile(graph, uneven, Cluster.local(parts))
    assert f"functional.{function}(" in emit_segments(plan.compiled.program)[0]
    result = plan.verify()
    assert result["equal"], result
