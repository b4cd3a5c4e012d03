"""Tensor parallelism as in Megatron-LM: heads and MLP hidden of each block, found from the factors.

With `vocabulary` embedding, head and loss are cut on the vocabulary, too: no scores travel, and three numbers a token.
Devices then run programs of their own, as each has other classes, so many devices take longer to compile.
"""

from __future__ import annotations

from superscaler.plans.along import along_axis
from superscaler.plans.shared import tensor_splits
from superscaler.verbs import Graph, op_trans


@along_axis()
def tensor_parallel(graph: Graph, n: int, axis: str, vocabulary: bool = False) -> None:
    for name, cuts in tensor_splits(graph, n, axis, vocabulary=vocabulary).items():
        for cut in cuts:
            op_trans(graph, [graph.op(name)], cut)
