"""Searched exchanges between groups of devices, in any order of the devices, on real gloo processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import superscaler as ss
from superscaler.plan import Plan
from tests.helpers.sweeps import slow

pytestmark = pytest.mark.dist

WIDTH = 8
# Slow links, so that bytes count although the tensors are small: collectives inside a server, each byte once between.
SLOW = (
    "{{name: slow, preset: v100, servers: 2, devices_per_server: {0}, links: {{pair: {{bandwidth: 1e6}}, "
    "intra: {{bandwidth: 1e6}}, network: {{bandwidth: 1e5}}}}}}"
)
# How each product of a chain is cut, and the devices of its parts: each neighbouring pair exchanges both ways.
APART = [
    ("inner", (3, 2, 1, 0)),
    ("copies", (4, 6, 5, 7)),
    ("outer", (0, 2, 1, 3)),
    ("copies", (7, 6, 5, 4)),
    ("batch", (3, 2, 1, 0)),
    ("inner", (5, 7)),
    ("outer", (0, 2, 1, 3)),
]
OVERLAPPING = [
    ("inner", (3, 2, 1, 0)),
    ("batch", (2, 3, 4, 5)),
    ("outer", (0, 2, 1, 3)),
    ("inner", (4, 2)),
    ("copies", (3, 2, 1, 0)),
    ("inner", (5, 4, 3, 2)),
    ("copies", (0, 2, 1, 3)),
]


def plan_of(cuts: list[tuple[str, tuple[int, ...]]], cluster: str) -> Plan:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in cuts)).double()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.chain(x).square().sum()

    loss = Loss()
    optimizer = torch.optim.SGD(loss.parameters(), lr=1e-2)
    graph = ss.capture(loss, (torch.randn(WIDTH, WIDTH, dtype=torch.float64),), optimizer=optimizer)

    @ss.sprogram
    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        at = 0
        for op in graph.forward_ops:
            if op.module.startswith("chain."):
                at = int(op.module.removeprefix("chain."))
            how, devices = cuts[at]
            marks = {i.mark: i.factor for i in op.indices if i.factor != "batch"}
            factor = {"batch": "batch", "inner": marks.get("summed"), "outer": marks.get("spatial")}.get(how)
            algorithm = ss.Split(factor, len(devices)) if factor else ss.Replicate(len(devices))
            ss.op_assign(graph, ss.op_trans(graph, op, algorithm), list(devices))

    return ss.compile(graph, plan, cluster)


@pytest.mark.parametrize(
    ("cuts", "cluster"), [*slow((APART, SLOW.format(4))), (OVERLAPPING, SLOW.format(3))], ids=["apart", "overlap"]
)
def test_searched_exchanges_are_equal_on_processes(cuts: list[tuple[str, tuple[int, ...]]], cluster: str) -> None:
    plan = plan_of(cuts, cluster)
    searched = [move for move in plan.compiled.moves if "cheapest path" in move.reason]
    assert {"send", "reduce_scatter", "all_gather"} <= {move.kind for move in searched}
    assert len({(move.tensor, move.is_backward) for move in searched}) >= 8
    result = plan.verify("processes")
    assert result["equal"], result["first_difference"]
