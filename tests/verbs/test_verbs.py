"""The three verbs: what they make of a graph, and every way in which they refuse."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from random_graphs import random_model

from superscaler.cluster import Cluster
from superscaler.compiler import compile_graph
from superscaler.errors import InputError, PlanError, ScheduleError, TransformError
from superscaler.ir.graph import Factor, Index, Model, Op, Operand, Optimizer, PTensor, Ref
from superscaler.ir.parts import Axis
from superscaler.ir.transformed import Graph
from superscaler.verbs import Microbatch, Replicate, Split, op_assign, op_order, op_trans


def chain(length: int = 3, size: int = 8) -> Graph:
    """x -> tanh -> tanh ... -> sum, with a factor `batch` and a factor `hidden`; each tanh adds a weight."""
    factors = {"batch": Factor("batch", size), "hidden": Factor("hidden", 6)}
    slots, extents = (("batch",), ("hidden",)), (size, 6)
    tensors = {"x": PTensor("x", (size, 6), "float64", "input", slots, extents)}
    tensors["w"] = PTensor("w", (6,), "float64", "parameter", (("hidden",),), (6,), True)
    both = (Index(size, "batch", "spatial"), Index(6, "hidden", "spatial"))
    ops = []
    last = "x"
    for k in range(length):
        tensors[f"h{k}"] = PTensor(f"h{k}", (size, 6), "float64", "activation", slots, extents, True)
        inputs = (Operand(last, (0, 1)), Operand("w", (1,)))
        ops.append(
            Op(f"mul{k}", "aten.mul.Tensor", (Ref(0), Ref(1)), (), inputs, (Operand(f"h{k}", (0, 1)),), both,
               has_mirror=True, module=f"blocks.{k}", flops=1)
        )  # fmt: skip
        last = f"h{k}"
    tensors["loss"] = PTensor("loss", (), "float64", "activation", (), (), True)
    summed = (Index(size, "batch", "summed"), Index(6, "hidden", "summed"))
    ops.append(
        Op(
            "sum",
            "aten.sum.default",
            (Ref(0),),
            (),
            (Operand(last, (0, 1)),),
            (Operand("loss", ()),),
            summed,
            has_mirror=True,
        )
    )
    weight = (Operand("w", (0,)),)
    ops.append(Op("update.w", "ss.SGD", (), (), weight, weight, (Index(6, "hidden", "spatial"),), kind="optimizer"))
    return Graph(Model(tensors, tuple(ops), factors, ("x",), "loss", Optimizer("SGD", ((("lr", 0.1),),)), {}, {}))


def test_algorithms_nest_and_boxes_follow() -> None:
    graph = chain()
    op = graph.op("mul0")
    parts = op_trans(graph, op_trans(graph, op_trans(graph, op, Microbatch(2)), Split("batch", 2)), Split("hidden", 3))
    assert parts.cells.shape == (2, 2, 3)
    rows = graph.rows(op)
    assert rows.lo[5].tolist() == [2, 4]
    assert rows.hi[5].tolist() == [4, 6]
    assert rows.microbatch.tolist() == [0] * 6 + [1] * 6


def test_a_part_can_be_cut_apart_from_its_neighbours() -> None:
    graph = chain()
    op = graph.op("mul0")
    first, second = op_trans(graph, op, Split("batch", sizes=(3, 5)))
    op_trans(graph, second, Split("batch", 5))
    rows = graph.rows(op)
    assert [row[0] for row in rows.lo.tolist()] == [0, 3, 4, 5, 6, 7]
    op_assign(graph, first, 3)
    assert graph.rows(op).device.tolist() == [3, -1, -1, -1, -1, -1]


def test_a_replaced_part_says_where_it_was_replaced() -> None:
    graph = chain()
    parts = op_trans(graph, graph.op("mul0"), Split("batch", 2))
    op_trans(graph, parts, Split("hidden", 2))
    with pytest.raises(TransformError, match=r"replaced by the op_trans at .*test_verbs.py:\d+"):
        op_assign(graph, parts, 0)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Split("batch", 3), "8 % 3 = 2"),
        (Split("batch", sizes=(3, 4)), "covers 7 elements, but mul0 .* has 8"),
        (Split("bach", 2), "unknown factor 'bach'; did you mean 'batch'"),
        (Replicate(0), "at least 1"),
        (Split("batch", 2.0), "2.0 parts; the number of parts must be an integer"),
        (Split("batch", sizes=(4.0, 4.0)), "must be an integer of at least 1"),
        (Split("batch", 3, sizes=(4, 4)), "asks for 3 parts, but gives 2 sizes"),
        (Replicate(2, "rout"), "unknown mirror 'rout'; did you mean 'route'"),
    ],
)
def test_a_wrong_algorithm_is_refused_with_both_numbers(algorithm, message: str) -> None:  # type: ignore[no-untyped-def]
    graph = chain()
    with pytest.raises(InputError, match=message):
        op_trans(graph, graph.op("mul0"), algorithm)


@dataclass(frozen=True)
class Own:
    """A user's own algorithm, which makes any axis."""

    made: object

    def axis(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        return self.made  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Axis(0, (3, 4)), r"cuts index 0 \(batch\) into \(3, 4\), 7 elements, but the part has 8; cover 8"),
        (Axis(0, (8, 0)), r"makes parts of sizes \(8, 0\); give one or more, each an integer of at least 1"),
        (Axis(0, (9, -1)), r"sizes \(9, -1\)"),
        (Axis(0, (4.0, 4.0)), r"sizes \(4.0, 4.0\)"),
        (Axis(None, ()), r"sizes \(\)"),
        (Axis(None, 2), "makes parts of sizes 2; give one or more"),  # type: ignore[arg-type]
        (Axis(2, (4, 4)), "cuts index 2, but the op has 2, numbered from 0"),
        (Axis(-1, (3, 3)), "cuts index -1, but the op has 2"),
        (Axis(1, (3, 3)), r"cuts index 1 \(hidden\), which the op needs whole"),
        (Axis(None, (1, 1), value=(0,)), r"addends of inputs \(0,\); the op is linear in: none"),
        (Axis(0, (4, 4), value=(0,)), "cuts index 0 .* do one after the other"),
        (Axis(None, (1, 1), "rout"), "unknown mirror 'rout'"),
        ((0, (4, 4)), "gives .*; its method axis must return an Axis"),
    ],
)
def test_what_an_own_algorithm_makes_is_checked(made: object, message: str) -> None:
    graph = chain()
    op = replace(graph.op("mul0"), indices=(Index(8, "batch", "spatial"), Index(6, "hidden", "frozen")))
    graph = Graph(replace(graph.model, ops=(op, *graph.ops[1:])))
    with pytest.raises(TransformError, match=rf"op_trans at .*test_verbs.py:\d+: Own of mul0 \(aten.*{message}"):
        op_trans(graph, op, Own(made))


def test_an_own_algorithm_may_give_numbers_of_numpy() -> None:
    graph = chain()
    first, _ = op_trans(graph, graph.op("mul0"), Own(Axis(np.int64(0), [np.int64(3), np.int64(5)])))  # type: ignore[arg-type]
    op_trans(graph, first, Own(Axis(0, (1, 2))))
    assert graph.rows(graph.op("mul0")).lo.tolist() == [[0, 0], [1, 0], [3, 0]]


def test_a_missing_factor_replicates_unless_required() -> None:
    graph, _ = Graph(random_model(0, 4)[0]), None
    op = graph.ops[0]
    factor = next(f for f in graph.factors if not f.startswith(op.name))
    assert len(op_trans(graph, op, Split(factor, 2))) == 2
    assert "replicated" in str(graph.journal[-1])
    with pytest.raises(TransformError, match="required"):
        op_trans(graph, graph.ops[1], Split(next(f for f in graph.factors if f.startswith("w0")), 2, required=True))


def test_an_unassigned_op_is_named() -> None:
    def plan(graph: Graph, cluster: Cluster) -> None:
        op_assign(graph, graph.ops[:2], 0)

    with pytest.raises(ScheduleError, match=r"(?s)2 of 5 ops .*mul2 \(blocks.2\): 1 parts.*sum"):
        compile_graph(chain(), plan, Cluster.local(1))


def test_a_device_that_the_cluster_lacks_is_named() -> None:
    with pytest.raises(PlanError, match="device 5, but local:2 has devices 0 to 1"):
        compile_graph(chain(), lambda graph, cluster: op_assign(graph, graph.ops, 5), Cluster.local(2))


def test_a_wrong_number_of_devices_is_refused() -> None:
    graph = chain()
    parts = op_trans(graph, graph.op("mul0"), Split("batch", 2))
    with pytest.raises(InputError, match="has 2 parts, but 3 devices"):
        op_assign(graph, parts, [0, 1, 2])


@pytest.mark.parametrize("factor", ["hidden", "batch"])
def test_an_update_is_not_cut_into_microbatches(factor: str) -> None:
    graph = chain()
    with pytest.raises(TransformError, match=r"op_trans at .*test_verbs.py:\d+ cuts update.w .* an update runs once"):
        op_trans(graph, graph.ops, Microbatch(2, factor))


def test_one_part_moves_after_all_were_assigned_by_a_broadcast() -> None:
    graph = chain()
    parts = op_trans(graph, op_trans(graph, graph.op("mul0"), Split("batch", 2)), Split("hidden", 3))
    op_assign(graph, parts, [[0], [1]])
    op_assign(graph, parts[0, 2], 5)
    assert graph.rows(graph.op("mul0")).device.tolist() == [0, 0, 5, 1, 1, 1]
    op_assign(graph, parts, [0, 1, 2])
    op_assign(graph, parts[1, 0], 5)
    assert graph.rows(graph.op("mul0")).device.tolist() == [0, 1, 2, 5, 1, 2]


def test_a_transformation_of_no_parts_is_refused() -> None:
    graph = chain()
    parts = op_trans(graph, graph.op("mul0"), Split("batch", 2))
    with pytest.raises(TransformError, match="selects none of the parts of mul0"):
        op_trans(graph, parts[2:], Replicate(2))


def test_an_order_of_a_microbatch_that_does_not_exist_is_refused() -> None:
    def plan(graph: Graph, cluster: Cluster) -> None:
        op_assign(graph, op_trans(graph, graph.forward_ops, Microbatch(2)), 0)
        op_order(graph, graph.select(microbatch=0), graph.select(microbatch=2))

    with pytest.raises(ScheduleError, match=r"no part of F.* of microbatch 2 exists"):
        compile_graph(chain(), plan, Cluster.local(1))


def test_a_selection_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(InputError, match=r"unknown module 'block.0'; did you mean 'blocks.0'"):
        chain().select(module="block.0")


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


def test_orders_of_parts_are_kept_and_contradictions_refused() -> None:
    def contradiction(graph: Graph, cluster: Cluster) -> None:
        first, second = op_trans(graph, graph.op("mul0"), Split("batch", 2))
        op_assign(graph, graph.ops[1:4], 0)
        op_assign(graph, [first, second], 0)
        op_order(graph, first, second)
        op_order(graph, second, first)

    with pytest.raises(ScheduleError, match="op_order"):
        compile_graph(chain(), contradiction, Cluster.local(1))


def test_compiling_leaves_the_graph_as_it_was() -> None:
    graph = chain()
    for world in (1, 2):
        compiled = compile_graph(graph, lambda g, c: op_assign(g, g.ops, c.devices[-1]), Cluster.local(world))
        assert compiled.program.world == world
    assert not graph.journal
    assert graph.rows(graph.op("mul0")).device.tolist() == [-1]
