"""The three verbs: what they make of a graph, and every way in which they refuse."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from superscaler.cluster import Cluster
from superscaler.compiler import compile_graph
from superscaler.errors import InputError, PlanError, ScheduleError, TransformError
from superscaler.ir.graph import Graph
from superscaler.ir.orders import parse_schedule
from superscaler.ir.parts import Parts
from superscaler.ir.program import Backward, Forward
from superscaler.verbs import (
    Action,
    Insert,
    Microbatch,
    Recompute,
    Replicate,
    Save,
    Split,
    SplitBackward,
    op_assign,
    op_order,
    op_trans,
    order,
    place,
)  # fmt: skip
from tests.verbs.chains import chain


def contradiction(graph: Graph, cluster: Cluster) -> None:
    first, second = op_trans(graph, graph.op("mul0"), Split("batch", 2))
    op_assign(graph, graph.ops[1:4], 0)
    op_assign(graph, [first, second], 0)
    op_order(graph, first, second)
    op_order(graph, second, first)


def late(graph: Graph, cluster: Cluster) -> None:
    op_assign(graph, op_trans(graph, graph.forward_ops, Microbatch(2)), 0)
    op_order(graph, graph.select(microbatch=0), graph.select(microbatch=2))


def communicating(graph: Graph, cluster: Cluster) -> None:
    for op in graph.forward_ops:
        op_assign(graph, op_trans(graph, op, Split("batch", 2)), [0, 1])
    gradients = graph.select(ops=[graph.op("update.w")], kind="C")
    op_order(graph, gradients, gradients)


REFUSED: dict[str, tuple[Any, int, type, str]] = {
    "unassigned": (lambda g, c: op_assign(g, g.ops[:2], 0), 1, ScheduleError, r"2 of 5 ops .*mul2 \(blocks.2\)"),
    "no device": (lambda g, c: op_assign(g, g.ops, 5), 2, PlanError, "device 5, but local:2 has devices 0 to 1"),
    "no microbatch": (late, 1, ScheduleError, r"no part of F.* of microbatch 2 exists"),
    "contradiction": (contradiction, 1, ScheduleError, "op_order"),
    "communication": (communicating, 2, ScheduleError, r"cycle.*Remove or reverse this .* before C\(update.w\), at "),
}


@pytest.mark.parametrize(("plan", "devices", "error", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_scheduled_is_named(plan: Any, devices: int, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=f"(?s){told}"):
        compile_graph(chain(), plan, Cluster.local(devices))


def halves(graph: Graph) -> Parts:
    return op_trans(graph, graph.op("mul0"), Split("batch", 2))


HERE = r"at .*test_verbs.py:\d+"
WRONG: list[tuple[Any, type, str]] = [
    (lambda g: op_assign(g, halves(g), [0, 1, 2]), InputError, "has 2 parts, but 3 devices"),
    (lambda g: op_assign(g, g.op("mul1"), [0, 1]), InputError,
     r"mul1 has 1 part, but 2 devices .* Replicate\(2\) it, or give a mesh, as "),
    (lambda g: op_trans(g, halves(g)[2:], Replicate(2)), TransformError, "selects none of the parts of mul0"),
    *((lambda g, a=a: op_trans(g, g.op("mul0"), a), InputError,
       rf"needs an algorithm, not its class; write {a.__name__}\(\.\.\.\)") for a in (Split, Recompute)),
    (lambda g: op_trans(g, g.op("mul0"), Split("batch", 2, axis=3)), InputError,
     "Split at .*test_verbs.py:\\d+: axis is 3 of type int; give str"),
    (lambda g: g.rows(3), InputError, f"rows {HERE}: op is 3 of type int; give Op"),
    (lambda g: place(g, "w", halves(g), [0, 1]), InputError, r"w is at rest in parts of update\.w, not of mul0; give"),
    (lambda g: place(g, "w", Split("hidden", 2), [0, 1], ahead=-1), InputError,
     "ahead=-1 is no number of segments; give 0, 1, 2"),
    (lambda g: place(g, "w", Split("hidden", 4), [0, 1, 2, 3]), TransformError,
     r"does not divide: update\.w \(ss\.SGD\) has 6"),
    (lambda g: order(g, [[Action(0, "F", 0), Action(1, "F", 0)]], [g.forward_ops]), InputError,
     f"order {HERE}: 1F0 names stage 1, but there are 1"),
    (lambda g: g.select(kind="I"), InputError, f"select {HERE}: I selects ops whose backward is split"),
    (lambda g: g.select(kind="Z"), InputError, f"select {HERE}: unknown kind of work 'Z'"),
    (lambda g: g.select(module="block.0"), InputError,
     f"select {HERE}: unknown module 'block.0'; did you mean 'blocks.0'"),
    (lambda g: g.select(microbatch="first"), InputError, f"select {HERE}: microbatch is 'first' of type str; give int"),
    (lambda g: g.select(ops=()), InputError, f"select {HERE}: it matches no op"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "error", "told"), WRONG)
def test_a_wrong_call_names_what_is_wrong_and_the_line(ask: Any, error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        ask(chain())


def test_microbatches_of_an_update_leave_its_parts() -> None:
    graph = chain()
    update = graph.op("update.w")
    parts = op_trans(graph, op_trans(graph, update, Split("hidden", 2)), Microbatch(4))
    assert len(parts) == len(graph.rows(update)) == 2
    assert graph.copy().policy.reduced == {"update.w": 4}
    assert parts.cells.tolist() == [0, 1]


def test_one_part_moves_after_all_were_assigned_by_a_broadcast() -> None:
    graph = chain()
    parts = op_trans(graph, op_trans(graph, graph.op("mul0"), Split("batch", 2)), Split("hidden", 3))
    op_assign(graph, parts, [[0], [1]])
    op_assign(graph, parts[0, 2], 5)
    assert graph.rows(graph.op("mul0")).device.tolist() == [0, 0, 5, 1, 1, 1]
    op_assign(graph, parts, [0, 1, 2])
    op_assign(graph, parts[1, 0], 5)
    assert graph.rows(graph.op("mul0")).device.tolist() == [0, 1, 2, 5, 1, 2]


def cyclic(graph: Graph, cluster: Cluster) -> None:
    for op in graph.forward_ops:
        op_assign(graph, op_trans(graph, op, Microbatch(2)), 0 if op.name in ("mul0", "mul1") else 1)
    op_order(graph, graph.select(module="blocks.2", microbatch=1), graph.select(module="blocks.0", microbatch=1))


def test_a_cycle_is_shown_shortest_with_the_line_that_made_it() -> None:
    with pytest.raises(ScheduleError) as caught:
        compile_graph(chain(), cyclic, Cluster.local(2))
    text = str(caught.value)
    assert "cycle" in text
    assert f"{__file__}:" in text
    assert "data h1[4:8, 0:6]" in text
    # mul0 -> mul1 -> mul2 by data, back by the order: mul0 and mul1 share a device, so h0 never travels.
    assert text.count(" needs ") == 3


def test_compiling_leaves_the_graph_as_it_was() -> None:
    graph = chain()
    for world in (1, 2):
        compiled = compile_graph(graph, lambda g, c: op_assign(g, g.ops, c.devices[-1]), Cluster.local(world))
        assert compiled.program.world == world
    assert not graph.journal
    assert graph.rows(graph.op("mul0")).device.tolist() == [-1]


def test_place_cuts_and_places_the_update_of_a_weight() -> None:
    graph = chain()
    parts = place(graph, "w", [Split("hidden", 3), Replicate(2)], [[0], [1], [2]], ahead=0)
    assert parts.cells.shape == (3, 2)
    assert graph.rows(graph.op("update.w")).device.tolist() == [0, 0, 1, 1, 2, 2]
    assert place(graph, graph.model.tensors["w"], parts, 4) is parts
    assert graph.rows(graph.op("update.w")).device.tolist() == [4] * 6
    assert graph.copy().policy.ahead == {"w": 0}
    assert [entry.verb for entry in graph.journal] == ["op_trans", "op_trans", "op_assign", "place", "op_assign"]
    assert all("test_verbs.py" in entry.where for entry in graph.journal)


def test_place_finds_a_tied_weight() -> None:
    model = chain().model
    graph = Graph(replace(model, aliases={"tied": "w"}))
    place(graph, "tied", Split("hidden", 2), [0, 1], ahead=2)
    assert graph.rows(graph.op("update.w")).device.tolist() == [0, 1]
    assert graph.policy.ahead == {"w": 2}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ww", "unknown parameter 'ww'; did you mean 'w'"),
        ("packed", r"packed is packed; place its segments packed\.0, packed\.1\."),
    ],
)
def test_place_says_what_it_cannot_place(name: str, message: str) -> None:
    model = chain().model
    tensors = {**model.tensors, "frozen": replace(model.tensors["w"], name="frozen", requires_grad=False)}
    pieces = {f"packed.{k}": ("packed", 0, 3 * k, 3 * k + 3) for k in range(2)}
    with pytest.raises(InputError, match=rf"place at .*test_verbs.py:\d+: {message}"):
        place(Graph(replace(model, tensors=tensors, segments=pieces)), name, Split("hidden", 2), [0, 1])


def test_rows_are_ordered_each_in_turn() -> None:
    def plan(graph: Graph, cluster: Cluster) -> None:
        op_assign(graph, op_trans(graph, graph.forward_ops, Microbatch(2)), 0)
        first, second = (graph.select(microbatch=k) for k in range(2))
        order(graph, [[second, first]])
        order(graph, [[Action(0, "B", 0), Action(0, "B", 1)]], [graph.forward_ops])

    code = compile_graph(chain(), plan, Cluster.local(1)).program.devices[0].instructions
    assert [i.task.microbatch for i in code if isinstance(i, Forward)] == [1, 0]
    assert [i.task.microbatch for i in code if isinstance(i, Backward)] == [0, 1]


TABLES = [
    ("0F0 0F1 0B0", "1F0 1B0 1F1 1B1", "row 0 (0F0 0F1 0B0) has works of stage 0, but no row has 0B1 (or 0I1 and 0W1)"),
    ("0F0 0F1", "1F0 1B0 1F1 1B1", "row 0 (0F0 0F1) has works of stage 0, but no row has 0B0 (or 0I0 and 0W0)"),
    ("0F0 0F1 0B0 0B1", "1F0 1I0 1F1 1I1 1W1", "row 1 (1F0 1I0 1F1 1I1 1W1) has works of stage 1, but no row has 1W0,"),
    ("0F0 0F1 0B0 0B1", "1F0 1B0 1B1", "row 1 (1F0 1B0 1B1) has works of stage 1, but no row has 1F1,"),
    ("0F0 0B0", "1F0 1B0", "row 0 (0F0 0B0) has works of stage 0, but no row has 0F1,"),
    ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", ""),
    # Rows of forwards, of backwards, and of some stages order these.
    ("0F0 0F1", "1F0", ""),
    ("0B1", "1B1 1B0", ""),
    ("0F1 0B1", "", ""),
]


@pytest.mark.parametrize(("first", "second", "message"), TABLES)
def test_rows_lack_no_work_of_a_stage(first: str, second: str, message: str) -> None:
    """One that is missing was done at any place that was left, in silence."""

    def plan(graph: Graph, cluster: Cluster, whole: bool = True) -> None:
        stages = [[op for op in graph.forward_ops if (op.module == "blocks.0") == (k == 0)] for k in range(2)]
        for device, ops in enumerate(stages):
            op_assign(graph, op_trans(graph, ops, Microbatch(2)), device)
        if "I" in second:
            op_trans(graph, stages[1], SplitBackward())
        order(graph, parse_schedule(f"{first}\n{second}"), stages, whole=whole)

    if message:
        with pytest.raises(InputError, match=rf"^order at .*test_verbs.py:\d+: {re.escape(message)}"):
            plan(chain().copy(), Cluster.local(2))
        plan(chain().copy(), Cluster.local(2), whole=False)
    else:
        plan(chain().copy(), Cluster.local(2))


def test_a_cut_without_a_name_is_refused_where_nothing_is_cut_along_an_axis() -> None:
    """Its parts share a device, and both devices computed everything."""

    def plan(graph: Graph, cluster: Cluster, axis: str = "", copies: bool = False) -> None:
        op_trans(graph, graph.forward_ops, Split("batch", 2, axis=axis))
        if copies:
            op_trans(graph, graph.forward_ops, Replicate(2, axis="dp"))
        op_assign(graph, graph.forward_ops, cluster.mesh(dp=2))

    with pytest.raises(InputError) as caught:
        compile_graph(chain(), plan, Cluster.local(2))
    found = re.fullmatch(
        r"op_trans at .*test_verbs.py:(\d+): Split\('batch', parts=2\) of \S+ names no axis, .* no op is cut along dp "
        r"of the mesh: .* would compute the same. Name it, as Split\(..., axis='dp'\); .* Replicate\(n, axis='dp'\).",
        str(caught.value),
    )
    assert found is not None
    assert "Split(" in Path(__file__).read_text().splitlines()[int(found[1]) - 1]
    # Parts of a named cut are on two devices; of copies that are asked for, each device has both parts.
    for options, each in (({"axis": "dp"}, 1), ({"copies": True}, 2)):
        devices = compile_graph(chain(), partial(plan, **options), Cluster.local(2)).program.devices
        assert [sum(isinstance(i, Forward) for i in d.instructions) for d in devices] == [each, each]


def test_joined_groups_are_ordered_as_one() -> None:
    graph = chain()
    a, b, c = (graph.select(module=f"blocks.{k}") for k in range(3))
    assert a | b | c == (a | b) | c == a | (b | c)
    op_order(graph, a | b, c)
    assert [(o.before, o.after) for o in graph.orders] == [(a, c), (b, c)]
    assert all("test_verbs.py" in o.where for o in graph.orders)


def test_a_block_tells_the_calls_of_its_module() -> None:
    model = chain(4).model
    ops = [replace(op, module="blocks.0") if op.name.startswith("mul") else op for op in model.ops]
    (block,) = Graph(replace(model, ops=tuple(ops))).blocks
    assert [[op.name for op in call] for call in block.calls] == [["mul0"], ["mul1"], ["mul2"], ["mul3"]]
    assert [len(block.calls) for block in chain().blocks] == [1, 1, 1]


def test_an_update_follows_what_reads_its_weight() -> None:
    graph = chain(2)
    for op in graph.forward_ops[:2]:
        op_trans(graph, op_trans(graph, op, Split("batch", 2)), Split("hidden", 3, axis="tp"))
    parts = graph.follow("w")
    assert [(a.index, a.sizes, a.name) for a in parts.grid.axes] == [(0, (2, 2, 2), "tp")]
    with pytest.raises(TransformError, match=r"update\.w comes after it was cut or placed"):
        graph.follow(graph.op("update.w"))
    with pytest.raises(InputError, match="unknown parameter 'v'"):
        graph.follow("v")
    graph = chain(2)
    op_trans(graph, graph.op("mul0"), Split("hidden", 3))
    assert graph.follow("w").cells.shape == (), "only cuts of all readers are followed"


IDLE = [
    (lambda g: op_trans(g, [], Replicate(2)), "a verb is given an empty list"),
    (lambda g: op_assign(g, [], 0), "a verb is given an empty list"),
    (lambda g: op_trans(g, g.op("mul1"), Insert()), "the copy h0.c is where mul1 reads it, so it changes nothing"),
    (lambda g: op_trans(g, g.op("update.w"), Insert()), "Insert needs ops that read activations from outside"),
    (lambda g: op_trans(g, g.op("mul1"), Save()), "Save needs ops that the model wraps in torch.utils.checkpoint"),
    (lambda g: op_trans(g, g.op("update.w"), Replicate(2, "route")), "an update has no backward; leave mirror"),
    (lambda g: order(g, []), "no rows; give one for each device"),
    (lambda g: op_order(g, *[g.select(ops=[g.op("update.w")], kind="C")] * 2), "neither travels"),
    (lambda g: op_order(g, g.op("mul0"), g.op("mul2"), turns=True), "but no device has both; leave turns"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "told"), IDLE)
def test_a_verb_that_would_change_nothing_is_refused(ask: Any, told: str) -> None:
    def plan(graph: Graph, cluster: Cluster) -> None:
        ask(graph)
        op_assign(graph, graph.forward_ops, 0)
        op_assign(graph, graph.op("mul2" if "turns" in told else "mul0"), int("turns" in told))

    with pytest.raises(PlanError, match=rf"test_verbs.py:\d+: .*{told}"):
        compile_graph(chain(), plan, Cluster.local(2))


def test_an_update_on_a_mesh_keeps_the_cuts_of_what_reads_its_weight() -> None:
    graph, mesh = chain(2), Cluster.local(6).mesh(dp=2, tp=3)
    for op in graph.forward_ops:
        op_trans(graph, op_trans(graph, op, Split("batch", 2, axis="dp")), Split("hidden", 3, axis="tp"))
    op_assign(graph, graph.ops, mesh)
    rows = graph.rows(graph.op("update.w"))
    assert sorted(zip(rows.lo[:, 0].tolist(), rows.hi[:, 0].tolist(), rows.device.tolist(), strict=True)) == [
        (lo, lo + 2, device) for lo, tp in ((0, 0), (2, 1), (4, 2)) for device in (tp, tp + 3)
    ]
