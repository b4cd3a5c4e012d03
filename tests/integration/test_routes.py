"""Exchanges between groups of devices that no single collective does take several steps, and are exact."""

from __future__ import annotations

import itertools
import re
from functools import cache

import pytest
import torch
from torch import nn

import superscaler as ss
from superscaler.materialize.rvd import route
from superscaler.plan import Plan
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, SProgram, captured, equal
from tests.helpers.sweeps import few, slow


def two(width: int) -> nn.Module:
    """Return two products, the first of which may leave value parts."""
    first, second = nn.Linear(8, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)
    return Around(lambda m, x: m.second(m.first(x)).square().sum(), first=first, second=second)


@cache
def small() -> ss.Graph:
    return captured(lambda: (two(8).double(), torch.randn(8, 8, dtype=torch.float64)))


@cache
def large() -> ss.Graph:
    with torch.device("meta"):
        return captured(lambda: (two(8192), torch.randn(8192, 8)))


CUTS = ("batch", "inner", "outer", "copies")


def plan_of(made: str, read: str, before: list[int], after: list[int], graph: ss.Graph | None = None) -> Plan:
    return ss.compile(graph or small(), written(made, read, before, after), "v100:2x4")


def written(made: str, read: str, before: list[int], after: list[int]) -> SProgram:
    """The first product is cut on its batch, contraction or result over devices `before`, the rest over `after`."""

    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        first = next(op for op in graph.forward_ops if op.module == "first" and op.target != "aten.t.default")
        marks = {i.mark: i.factor for i in first.indices if i.factor != "batch"}
        factors = {"batch": "batch", "inner": marks["summed"], "outer": marks["spatial"]}
        for op in graph.forward_ops:
            how, devices = (made, before) if op.module == "first" else (read, after)
            factor = factors.get(how) if op.module == "first" or how != "inner" else factors["outer"]
            algorithm = ss.Replicate(len(devices)) if factor is None else ss.Split(factor, len(devices))
            ss.op_assign(graph, ss.op_trans(graph, op, algorithm), devices)

    return plan


ORDERS = [
    ([0, 1, 2, 3], [4, 5, 6, 7]),
    ([3, 2, 1, 0], [4, 6, 5, 7]),
    ([0, 2, 1, 3], [5, 7]),
    ([0, 1], [2, 3, 4, 5]),
    ([0, 1, 2, 3], [2, 3, 4, 5]),
]


@pytest.mark.parametrize(("before", "after"), few(ORDERS, 4), ids=str)
def test_every_pair_of_cuts_is_equal(before: list[int], after: list[int]) -> None:
    for made, read in itertools.product(CUTS, ("batch", "inner", "copies")):
        equal(small(), written(made, read, before, after), "v100:2x4")


@pytest.mark.parametrize("before", [[0, 1, 2, 3], [0, 1]], ids=str)
def test_value_parts_cross_servers_once(before: list[int]) -> None:
    """Value parts to 4 copies on another server: summed in slices, each of which crosses once, and joined there."""
    plan = plan_of("inner", "copies", before, [4, 5, 6, 7], large())
    tensor = next(m.tensor for m in plan.compiled.moves if "cheapest path" in m.reason)
    moves = [m for m in plan.compiled.moves if m.tensor == tensor and not m.is_backward]
    assert {m.kind for m in moves} == {"reduce_scatter", "send", "all_gather"}
    assert sum(m.moved for m in moves if m.kind == "send") == 8192 * 16384 * 4
    assert "step 1 of 3 of the cheapest path to another layout" in plan.explain()


def test_messages_of_one_point_start_together() -> None:
    """Rows on some devices become columns on the same ones in another order, forward and backward."""
    emitted = equal(small(), written("batch", "outer", [0, 1, 2, 3], [1, 0, 3, 2]), "v100:2x4").compiled.emitted
    for program in emitted.programs[:4]:
        code = emitted.files[f"{program}.py"]
        blocks = re.findall(r"    with rt.together\(\):\n((?:        .*\n)+)", code)
        calls = [re.findall(r"rt\.(send|recv)", block) for block in blocks]
        assert [(c.count("send"), c.count("recv")) for c in calls] == [(3, 3), (3, 3)]
        assert len(re.findall(r"rt\.(?:send|recv)", code)) == 12


@pytest.mark.parametrize(
    ("dp", "spec"), [(1, "hybrid:dp=1,tp=4,pp=2,microbatches=2"), *slow((3, "hybrid:dp=3,tp=4,pp=2"))]
)
def test_stages_of_copies_share_out_what_they_send(dp: int, spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between stages on two servers each tensor-parallel device sends a part, forward and backward."""
    monkeypatch.setattr(route, "START", 0.0)
    free = "{intra: {alpha: 1e-12}, network: {alpha: 1e-12}}"
    servers = f"{{name: lab, preset: v100, servers: 2, devices_per_server: {4 * dp}, links: {free}}}"
    plan = equal(graph_of("gpt2:size=tiny" + ",batch=12" * (dp == 3)), spec, servers).compiled
    moves = [m for m in plan.moves if "cheapest path" in m.reason]
    assert {m.kind for m in moves} == {"send", "all_gather"}
    assert {m.is_backward for m in moves} == {False, True}
