"""What is said of schedules with a cycle, word for word.

After a wanted change: pytest tests/schedule --update-golden.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import superscaler as ss
from superscaler.cli.main import main
from superscaler.compiler import compile_graph
from superscaler.errors import ScheduleError
from superscaler.plans.lib import schedules
from superscaler.plans.lib.stages import stages as stages_of
from superscaler.verbs import Action, Cluster, Graph, Microbatch, op_assign, op_order, op_trans
from tests.helpers.graphs import graph_of

HERE = Path(__file__).parent
MODEL = "mlp:layers=8,hidden=8,inputs=4,classes=4,batch=16"
Rows = list[list[Action]]


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_of(MODEL, "SGD")


def pipeline(graph: Graph, cluster: Cluster, rows: Rows, microbatches: int = 4, chunks: int = 1) -> None:
    """Stages on the devices in turn, `chunks` on each, in the order of the rows."""
    world = len(cluster.devices)
    parts = stages_of(graph, chunks * world)
    for stage, ops in enumerate(parts):
        op_assign(graph, op_trans(graph, ops, Microbatch(microbatches)), stage % world)
    if rows:
        ss.order(graph, rows, parts)


def parse(*rows: str) -> Rows:
    return [[Action.parse(word) for word in row.split()] for row in rows]


def backward_first(graph: Graph, cluster: Cluster) -> None:
    """Updates are in an order too, but none runs before the cycle is met."""
    rows = schedules.schedule_1f1b(4, 4)
    rows[3][4:6] = rows[3][5:3:-1]
    pipeline(graph, cluster, rows)
    op_order(graph, graph.op("update.head.weight"), graph.op("update.head.bias"))


def no_warm_up(graph: Graph, cluster: Cluster) -> None:
    rows = schedules.schedule_1f1b(4, 4)
    rows[0] = parse("0F0 0B0 0F1 0B1 0F2 0B2 0F3 0B3")[0]
    pipeline(graph, cluster, rows)


def interleaved(graph: Graph, cluster: Cluster) -> None:
    rows = parse(*(f"{d}F0 {d}F1 {d + 4}F0 {d + 4}F1" for d in range(3)), "3F1 7F1 3F0 7F0")
    pipeline(graph, cluster, rows, 2, chunks=2)


def late(graph: Graph, cluster: Cluster) -> None:
    rows = schedules.schedule_1f1b(2, 16)
    first, last = (row.index(Action(stage, "F", 14)) for stage, row in enumerate(rows))
    rows[0].insert(first, rows[0].pop(rows[0].index(Action(0, "B", 14))))
    rows[1].insert(last + 1, rows[1].pop(last))
    pipeline(graph, cluster, rows, 16)


def unnamed(graph: Graph, cluster: Cluster) -> None:
    """Two chunks on each of two devices, whose work has no names: the second chunks wait for each other."""
    pipeline(graph, cluster, [], 2, chunks=2)
    stages = stages_of(graph, 4)
    before, after = (graph.select(ops=stages[stage], microbatch=0) for stage in (3, 2))
    op_order(graph, before, after)


def within(graph: Graph, cluster: Cluster) -> None:
    """A product and what reads it, of one microbatch on one device."""
    pipeline(graph, cluster, [], 2)
    op_order(graph, graph.select(module="layers.1", microbatch=1), graph.select(module="layers.0", microbatch=1))


def plain(graph: Graph, cluster: Cluster) -> None:
    """Layers in turn on two devices: the third, on device 0, is to wait for the fourth, which reads what it makes."""
    for layer, ops in enumerate(stages_of(graph, 4)):
        op_assign(graph, ops, layer % 2)
    op_order(graph, stages_of(graph, 4)[3], stages_of(graph, 4)[2])


def updates(graph: Graph, cluster: Cluster) -> None:
    """Two updates in one order on the first device's weight and the other's, and in the other order."""
    pipeline(graph, cluster, schedules.schedule_1f1b(2, 2), 2)
    first, last = graph.op("update.layers.0.weight"), graph.op("update.head.bias")
    op_order(graph, first, last)
    op_order(graph, last, first)


def many(graph: Graph, cluster: Cluster) -> None:
    """A ring of ten devices."""
    stages = stages_of(graph, 10)
    for device, ops in enumerate(stages):
        op_assign(graph, ops, device)
    op_order(graph, stages[9], stages[0])


@pytest.mark.parametrize(
    ("plan", "world"),
    [
        (backward_first, 4),
        (no_warm_up, 4),
        (interleaved, 4),
        (late, 2),
        (unnamed, 2),
        (within, 1),
        (plain, 2),
        (updates, 2),
        (many, 10),
    ],
)
def test_a_cycle_is_told_with_what_each_device_does_until_then(
    plan: Callable[[Graph, Cluster], None], world: int, graph: Graph, request: pytest.FixtureRequest
) -> None:
    with pytest.raises(ScheduleError) as caught:
        compile_graph(graph, plan, Cluster.local(world))
    text = re.sub(r"/\S*/(\w+\.py):\d+", r"\1", str(caught.value)) + "\n"
    path = HERE / "cycles" / f"{plan.__name__}.txt.golden"
    if request.config.getoption("--update-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, path
    assert all(len(line) <= 100 for line in text.splitlines() if re.match("  (step|device|and) ", line))


def test_compile_tells_it_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.py"
    plan.write_text(
        "from superscaler.verbs import op_assign, op_order, sprogram\n\n\n"
        "@sprogram\n"
        "def f(graph, cluster):\n"
        "    first, last = graph.forward_ops[:2], graph.forward_ops[2:]\n"
        "    op_assign(graph, first, 0)\n"
        "    op_assign(graph, last, 1)\n"
        "    op_order(graph, last, first)\n"
    )
    with pytest.raises(SystemExit) as ended:
        main(["compile", MODEL, "--plan", f"{plan}:f", "--cluster", "local:2"])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    assert "  device 1  ? F gelu waits for F linear on device 0\n" in err
    assert f"at {plan}:9\n" in err
    assert not out


def test_microbatches_whose_order_ends_in_a_cycle_are_refused(graph: Graph) -> None:
    def plan(graph: Graph, cluster: Cluster) -> None:
        pipeline(graph, cluster, [])
        groups = [graph.select(ops=graph.forward_ops, microbatch=number, kind="F") for number in range(3)]
        for before, after in ((0, 1), (1, 2), (2, 1)):
            op_order(graph, groups[before], groups[after])

    with pytest.raises(
        ScheduleError, match=r"(?s)Remove or reverse one op_order.* of microbatch 2 before .* of microbatch 1"
    ):
        compile_graph(graph, plan, Cluster.local(1))
