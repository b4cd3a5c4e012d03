"""Sums of gradients by the cheapest steps: the closed form or a searched path, priced by the links of a cluster."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import superscaler as ss
from superscaler.cluster import Cluster
from superscaler.ir import program
from superscaler.ir.model import PTensor
from superscaler.materialize.lowering import lower, seconds
from superscaler.materialize.steps import CollectiveStep, Lowered, LoweringOptions
from superscaler.materialize.sums import reduction
from superscaler.schedule.transfers import BACKWARD, UPDATE, End, Place, Transfer
from tests.helpers.ran import Around, captured, equal

SIZE = 4096


def context(cluster: str) -> LoweringOptions:
    tensor = PTensor("x", (SIZE, SIZE), "float32", "parameter", ((0,), (1,)), (SIZE, SIZE))
    return LoweringOptions({"x": tensor}, frozenset(), Cluster.parse(cluster))


def gradient(groups: Sequence[Sequence[int]]) -> Transfer:
    """The gradient of a matrix: every device has an addend of it all, and reads its slice of its group's rows."""
    slices = {
        device: ((at * SIZE // len(group), (at + 1) * SIZE // len(group)), (0, SIZE))
        for group in groups
        for at, device in enumerate(group)
    }
    pieces = tuple(End(d, ((0, SIZE), (0, SIZE)), (Place(BACKWARD, 0, (d, 0, 0), 0),)) for d in sorted(slices))
    readers = tuple(End(d, box, (Place(UPDATE, 1, (d, 0, 0), 0),)) for d, box in sorted(slices.items()))
    links = tuple((p, r) for p in range(len(pieces)) for r in range(len(readers)))
    return Transfer("x", BACKWARD, pieces, readers, links)


def shown(lowered: Lowered) -> list[tuple[str, tuple[int, ...]]]:
    return [(s.how.kind, s.how.group) for some in lowered.rounds for s in some if isinstance(s, CollectiveStep)]


def test_slices_inside_servers_are_summed_there_and_then_between_them() -> None:
    found = lower(gradient([range(4), range(4, 8)]), context("v100:2x4"))
    assert shown(found) == [
        ("reduce_scatter", (0, 1, 2, 3)),
        ("reduce_scatter", (4, 5, 6, 7)),
        *(("all_reduce", (d, d + 4)) for d in range(4)),
    ]


def test_where_rings_are_all_there_is_a_sum_over_servers_is_nested() -> None:
    slow = "{name: slow, preset: local, servers: 2, devices_per_server: 2, links: {network: {bandwidth: 1e8}}}"
    whole = gradient([[d] for d in range(4)])
    assert shown(lower(whole, context(slow))) == [
        *(("reduce_scatter", row) for row in ((0, 1), (2, 3))),
        *(("all_reduce", column) for column in ((0, 2), (1, 3))),
        *(("all_gather", row) for row in ((0, 1), (2, 3))),
    ]
    for cluster in (
        "local:4",
        "v100:2x2",
        slow.replace("servers: 2, devices_per_server: 2", "servers: 4, devices_per_server: 1"),
    ):
        assert shown(lower(whole, context(cluster))) == [("all_reduce", (0, 1, 2, 3))]


@pytest.mark.parametrize(("servers", "devices"), [(2, 4), (8, 8)])
def test_slices_across_servers_are_summed_in_finer_ones_where_that_is_cheaper(servers: int, devices: int) -> None:
    """Else each device's addend would go through the one NIC of its server. Of 64 devices no path is searched."""
    groups = [range(d, servers * devices, devices) for d in range(devices)]
    transfer, given = gradient(groups), context(f"v100:{servers}x{devices}")
    found, other = lower(transfer, given), reduction(transfer, given)
    assert other is not None
    assert [kind for kind, _ in shown(other)] == ["reduce_scatter"] * devices + ["all_reduce"] * servers
    assert shown(found) == [
        ("reduce_scatter", tuple(range(servers * devices))),
        *(("all_gather", tuple(range(devices * s, devices * (s + 1)))) for s in range(servers)),
    ]
    assert seconds(found, given, 4) < 0.3 * seconds(other, given, 4)


def test_a_plan_whose_slices_lie_across_servers_is_equal() -> None:
    module = Around(lambda m, x: torch.tanh(m.up(x)).square().mean(), up=nn.Linear(256, 1024))
    graph = captured(lambda: (module, torch.randn(8, 256)))

    def across(graph: ss.Graph, cluster: ss.Cluster) -> None:
        for op in graph.ops:
            even = [i.factor for i in op.indices if i.size % 2 == 0]
            rest = [ss.Split(even[0], 2), ss.Replicate(2)] if even and not op.is_forward else [ss.Replicate(4)]
            parts = graph.parts(op)
            for cut in [ss.Split("batch", 4)] if op.is_forward else rest:
                parts = ss.op_trans(graph, parts, cut)
            ss.op_assign(graph, parts, [0, 1, 2, 3] if op.is_forward or len(rest) == 1 else [[0, 1], [2, 3]])

    code = equal(graph, across, "v100:2x2").code()
    sums = [i.group for i in code if isinstance(i, program.Collective) and i.kind == "reduce_scatter"]
    assert set(sums) == {(0, 1, 2, 3)}


@pytest.mark.parametrize(("servers", "devices"), [(2, 8), (4, 8), (16, 8)])
def test_an_all_reduce_over_servers_is_priced_as_the_hierarchy_that_it_is(servers: int, devices: int) -> None:
    """Steps of our own, inside, between and inside again, would move as much and start three times."""
    given, size = context(f"v100:{servers}x{devices}"), SIZE * SIZE * 4
    links, place = given.costs.links, given.costs.seconds  # type: ignore[attr-defined]
    everyone = range(servers * devices)
    one = place("all_reduce", [everyone], size)
    inside = 2 * (devices - 1) * (links.intra.alpha + size / devices / links.intra.bandwidth)
    between = 2 * (servers - 1) * (links.network.alpha + size / servers / links.network.bandwidth)
    assert one == pytest.approx(inside + between)
    rows = [range(devices * s, devices * (s + 1)) for s in range(servers)]
    columns = [range(d, len(everyone), devices) for d in range(devices)]
    three = place("reduce_scatter", rows, size) + place("all_reduce", columns, size / devices)
    three += place("all_gather", rows, size / devices)
    assert one == pytest.approx(three)
