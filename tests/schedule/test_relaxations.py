"""Where no order exists, as little as possible is given up, and the plan tells what."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import ScheduleError
from superscaler.schedule import order
from superscaler.schedule.order import OTHERS, SEPARATE, SPLIT
from tests.helpers.ran import Around, captured, equal


def network(m: Around, x: Tensor) -> Tensor:
    """z -> q -> a, and c; the result reads q, a and c."""
    q = m.q(m.z(x))
    a, c = m.a(q), m.c(x)
    return (q * c).sum() + a.sum()


def crossed() -> ss.Graph:
    layers = {name: nn.Linear(4, 4, bias=False) for name in "zqac"}
    return captured(lambda: (Around(network, **layers), torch.randn(4, 4)))


def ops_of(graph: ss.Graph, module: str) -> list[ss.Op]:
    return [op for op in graph.forward_ops if op.module == module]


@ss.sprogram
def split(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Device 0 has q and its product with c, which could be one segment, but c is to wait for a, which reads q."""
    for op in graph.forward_ops:
        ss.op_assign(graph, op, int(op.module in ("z", "a", "c")))
    ss.op_order(graph, ops_of(graph, "a"), ops_of(graph, "c"))


def copied(graph: ss.Graph, others: list[int]) -> dict[str, list[ss.Part]]:
    """Make two copies of all, of z on devices 0 and 1, and of `others` on theirs; return the parts of each module."""
    parts: dict[str, list[ss.Part]] = {}
    for op in graph.forward_ops:
        made = ss.op_trans(graph, op, ss.Replicate(2))
        ss.op_assign(graph, made, [0, 1] if op.module == "z" else others)
        if not op.from_weights:
            parts[op.module] = list(made)
    return parts


@ss.sprogram
def apart(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Each copy of q reads another copy of z, the second of which is to wait for the first one's reader."""
    parts = copied(graph, [2, 3])
    ss.op_order(graph, parts["q"][0], parts["z"][1])


@ss.sprogram
def others(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """All is on two devices in two copies. The first copy of z is to wait for the reader beside it."""
    parts = copied(graph, [0, 1])
    ss.op_order(graph, parts["q"][0], parts["z"][0])


@pytest.mark.parametrize(
    ("sprogram", "name", "relax"),
    [(split, SPLIT, order._split), (apart, SEPARATE, order._send_separately), (others, OTHERS, order._read_others)],
)
def test_what_is_given_up_is_needed_and_told(
    sprogram: Callable[..., None], name: str, relax: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = crossed()
    plan = equal(graph, sprogram, 4).compiled
    assert [r.name for r in plan.schedule.relaxations] == [name]
    assert f"because of a cycle, {name}: " in ss.Plan(plan).explain()
    monkeypatch.setattr(order, "RELAXATIONS", [f for f in order.RELAXATIONS if f is not relax])
    with pytest.raises(ScheduleError, match="cycle"):
        ss.compile(graph, sprogram, ss.Cluster.local(4))


def test_nothing_is_given_up_without_need() -> None:
    plan = ss.compile(crossed(), "data_parallel", ss.Cluster.local(4))
    assert not plan.compiled.schedule.relaxations
    assert "cycle" not in plan.explain()
