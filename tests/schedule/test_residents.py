"""Where weights rest: as they are read, also unevenly, and whole where what is read shares them out in no way."""

from __future__ import annotations

import numpy as np

from superscaler.schedule.residents import follow
from tests.graphs import graph_of


def test_a_weight_rests_in_the_slices_in_which_it_is_read() -> None:
    graph = graph_of("mlp", "SGD")
    op = next(op for op in graph.ops if not op.is_forward)
    tensor = graph.model.tensors[op.inputs[0].tensor]
    size, *others = tensor.extents
    rest = [(0, n) for n in others]
    uneven = [(0, ((0, 3), *rest)), (1, ((3, size), *rest)), (2, ((3, size), *rest)), (3, ((0, 3), *rest))]
    found = follow(op, tensor, uneven)
    assert [axis.sizes for axis in found.axes] == [(3, size - 3), (1, 1)]
    assert np.array_equal(found.devices, [[0, 3], [1, 2]])
    # One slice is on more devices than the other.
    found = follow(op, tensor, uneven[:3])
    assert [axis.sizes for axis in found.axes] == [(1, 1, 1)]
    assert np.array_equal(found.devices, [0, 1, 2])
