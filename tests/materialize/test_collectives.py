"""Collectives that give what they make to one device: sums of gradients for it alone, slices that it joins."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.certify.meanings import MEANINGS, Meaning
from superscaler.collectives import KINDS, Ends, Kind
from superscaler.ir.communication import bytes_moved
from superscaler.ir.mask import Box
from superscaler.materialize.collectives import match_boxes
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal, kinds

WORLD = 3


def weights_shared_out(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Each weight rests whole on one device: the optimizer's work is shared out by weights."""
    world = len(cluster.devices)
    for op in graph.forward_ops:
        ss.op_assign(graph, ss.op_trans(graph, op, ss.Split("batch", world)), cluster.devices)
    for number, op in enumerate(op for op in graph.ops if not op.is_forward):
        ss.op_assign(graph, op, number % world)


def test_gradients_are_summed_for_the_one_device_that_updates_their_weight() -> None:
    """A sum there, in a bucket per device, and a broadcast from there, each of a weight to all devices but one."""
    graph = graph_of("mlp:hidden=8,inputs=6,classes=4,batch=6")
    program, weights = equal(graph, weights_shared_out, WORLD).program, list(graph.model.parameters())
    assert kinds(program) == {"reduce": WORLD, "broadcast": len(weights), "all_reduce": 1}
    scalars = 8 * 2 * (WORLD - 1)
    assert bytes_moved(program) == 2 * (WORLD - 1) * 8 * sum(prod(w.shape) for w in weights) + scalars


def wide(m: Around, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(m.down(nn.functional.gelu(m.up(x))), y)


def widened() -> ss.Graph:
    layers = {"up": nn.Linear(4, 12, bias=False), "down": nn.Linear(12, 4, bias=False)}
    return captured(lambda: (Around(wide, **layers), (torch.randn(5, 4), torch.randn(5, 4))))


def narrowing(graph: ss.Graph, cluster: ss.Cluster) -> None:
    width = next(i.factor for op in graph.ops for i in op.indices if i.size == 12)
    for op in graph.ops:
        if op.target == "aten.gelu.default" or op.inputs[0].tensor == "inputs_0":
            ss.op_assign(graph, ss.op_trans(graph, op, ss.Split(width, WORLD)), [2, 0, 1])
        elif op.is_forward:
            ss.op_assign(graph, op, 1)


def test_slices_are_gathered_on_the_one_device_that_goes_on() -> None:
    program = equal(widened(), narrowing, WORLD).program
    assert kinds(program) == {"rd_gather": 1, "send": WORLD - 1}
    # A slice to device 1 from each other one, and its gradient back.
    assert bytes_moved(program) == 2 * (WORLD - 1) * 8 * 5 * 12 // WORLD


def test_slices_with_a_gap_or_an_overlap_are_no_collective() -> None:
    whole = dict.fromkeys(range(2), ((0, 4),))
    for held, kind in (((0, 2), (2, 4)), "all_gather"), (((0, 2), (3, 4)), ""), (((0, 3), (2, 4)), ""):
        found = match_boxes({device: (box,) for device, box in enumerate(held)}, whole)
        assert (found.kind if found else "") == kind


def _boxes(end: Ends, slot: int) -> dict[int, Box]:
    """Return boxes of a matrix on one device, or on all: slices along a slot, or the whole."""
    lines = {d: (4 * d, 4 * d + 4) if end is Ends.TILE else (0, 12) for d in ([0] if end is Ends.ONE else range(WORLD))}
    return {d: (line, (0, 12))[:: -1 if slot else 1] for d, line in lines.items()}


@pytest.mark.parametrize("kind", KINDS.values(), ids=lambda kind: kind.name)
def test_boxes_with_the_ends_of_a_row_are_its_collective(kind: Kind) -> None:
    """So no row hides another one. The certificate, which has its own table, knows each."""
    held, read = (_boxes(end, slot) for slot, end in enumerate(kind.ends))
    found = match_boxes(held, read)
    assert found is not None
    assert found.kind == kind.name
    assert MEANINGS[kind.name] == Meaning(
        adds=kind.held is Ends.PART, cuts=kind.read is Ends.TILE, joins=kind.held is Ends.TILE,
        to_one=kind.read is Ends.ONE, from_one=kind.held is Ends.ONE, rounds=MEANINGS[kind.name].rounds,
    )  # fmt: skip
