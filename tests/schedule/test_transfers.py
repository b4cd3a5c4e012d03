"""Who reads a tensor, and how many transfers that makes: local readers, and those of the same pieces, are apart."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.compiler import Compiled
from superscaler.schedule.residents import follow
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal, kinds


def axial_attention(m: Around, x: Tensor, y: Tensor) -> Tensor:
    """Attention along each axis of a grid in turn, around a residual."""
    x = nn.functional.gelu(m.into(x))
    x = x + m.rows(torch.softmax(x @ x.transpose(-1, -2), -1) @ x)
    turned = x.transpose(1, 2)
    x = x + m.columns(torch.softmax(turned @ turned.transpose(-1, -2), -1) @ turned).transpose(1, 2)
    return nn.functional.mse_loss(x, y)


def tied_head(m: Around, x: Tensor, y: Tensor) -> Tensor:
    """An embedding whose weight also makes the logits."""
    hidden = nn.functional.gelu(m.middle(m.words(x)))
    return nn.functional.cross_entropy((hidden @ m.words.weight.t()).flatten(0, 1), y.flatten())


def by_tensor(plan: Compiled) -> Counter[str]:
    """Return the bytes on links by tensor, `d ` before gradients."""
    found = Counter[str]()
    for move in plan.moves:
        found[f"d {move.tensor}" if move.is_backward else move.tensor] += move.moved
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_a_residual_that_is_read_as_it_is_and_along_another_axis_is_one_all_to_all(world: int) -> None:
    layers = {name: nn.Linear(8, 8) for name in ("into", "rows", "columns")}
    batch = torch.randn(2, 8, 8, 8), torch.randn(2, 8, 8, 8)
    graph = captured(lambda: (Around(axial_attention, **layers), batch))

    def axial(graph: ss.Graph, cluster: ss.Cluster) -> None:
        names = [op.name for op in graph.ops]
        columns = names[names.index("transpose_1") : names.index("linear_2") + 1]
        for op in graph.ops:
            cut = (
                ss.Split("inputs_0.2" if op.name in columns else "inputs_0.1", world)
                if op.is_forward
                else ss.Replicate(world)
            )
            ss.op_assign(graph, ss.op_trans(graph, op, cut), cluster.devices)

    ran = equal(graph, axial, world)
    assert kinds(ran.program) == {"all_to_all": 4, "all_reduce": 1}
    weights = by_tensor(ran.compiled)
    # The residual there, its gradient, and what columns add to it: a part of each device's slice stays.
    share = 8 * 2 * 8 * 8 * 8 * (world - 1) // world
    assert weights["add"] == weights["d add"] == weights["linear_2"] == weights["d linear_2"] == share


@pytest.mark.parametrize("rest", ["vocabulary", "hidden"])
def test_a_tied_weight_that_is_read_whole_and_in_slices_comes_by_collectives(rest: str) -> None:
    """At rest as the logits read it, it is gathered; at rest otherwise, their slices are cut out of the whole."""
    module = Around(tied_head, words=nn.Embedding(16, 8), middle=nn.Linear(8, 8))
    graph = captured(lambda: (module, (torch.randint(16, (4, 8)), torch.randint(16, (4, 8)))))

    def tied(graph: ss.Graph, cluster: ss.Cluster) -> None:
        for op in graph.ops:
            factor = rest if op.name == "update.words.weight" else "sequence" if op.is_forward else "hidden"
            factor = "vocabulary" if op.name in ("t", "matmul") else factor
            ss.op_assign(graph, ss.op_trans(graph, op, ss.Split(factor, 2)), cluster.devices)

    ran = equal(graph, tied)
    assert not kinds(ran.program)["send"]
    assert by_tensor(ran.compiled)["words.weight"] == 8 * 16 * 8


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


@pytest.mark.parametrize("rests", ["where it is read", "on device 0"])
def test_a_weight_is_gathered_for_each_microbatch_and_recomputation_unless_it_rests_where_it_is_read(
    rests: str,
) -> None:
    graph = graph_of("mlp", "SGD")
    weight = next(iter(graph.updates))

    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        ss.op_trans(graph, graph.forward_ops, ss.Microbatch(2))
        ss.op_trans(graph, graph.forward_ops, ss.Split("batch", 2, axis="dp"))
        ss.op_trans(graph, graph.forward_ops, ss.Recompute())
        ss.op_assign(graph, graph.forward_ops, cluster.mesh(dp=2))
        if rests == "on device 0":
            ss.op_assign(graph, graph.updates[weight], cluster.devices[0])

    ran = equal(graph, plan)
    moved = [t for t in ran.compiled.schedule.transfers if t.kind == "F" and t.tensor == weight and not t.is_local]
    # Two microbatches, for the forward and again for the backward.
    assert len(moved) == (4 if rests == "on device 0" else 0)
    local = [t for t in ran.compiled.schedule.transfers if t.kind == "F" and t.tensor == weight and t.is_local]
    if rests == "where it is read":
        # Each device reads it four times.
        assert [len(t.readers[0].places) for t in local] == [4, 4]
