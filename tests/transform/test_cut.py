"""What `op_trans` makes of grids, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

import superscaler as ss
from superscaler.errors import InputError, TransformError
from superscaler.ir.graph import Graph
from superscaler.ir.grid import Axis
from superscaler.ir.model import Op
from superscaler.ir.op import Index
from superscaler.verbs import Algorithm, Microbatch, Replicate, Shard, Split, op_assign, op_trans
from tests.helpers.graphs import assert_equal, graph_of
from tests.helpers.random_graphs import random_model
from tests.verbs.chains import chain


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


def test_the_first_microbatches_are_a_row_larger_where_they_do_not_divide_the_batch() -> None:
    graph = chain(size=10)
    parts = op_trans(graph, graph.op("mul0"), Microbatch(4))
    # One part of each is a part of any size; two are not.
    op_trans(graph, op_trans(graph, parts, Split("batch", 1)), Split("hidden", 2))
    rows = graph.rows(graph.op("mul0"))
    assert rows.microbatch.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [(lo[0], hi[0]) for lo, hi in zip(rows.lo.tolist(), rows.hi.tolist(), strict=True)] == [
        box for box in ((0, 3), (3, 6), (6, 8), (8, 10)) for _ in range(2)
    ]
    with pytest.raises(TransformError, match=r"Microbatch\(11\) makes more parts .*: 10\. Choose 1 to 10"):
        op_trans(graph, graph.op("mul1"), Microbatch(11))


def test_a_replaced_part_says_where_it_was_replaced() -> None:
    graph = chain()
    parts = op_trans(graph, graph.op("mul0"), Split("batch", 2))
    op_trans(graph, parts, Split("hidden", 2))
    with pytest.raises(TransformError, match=r"replaced by the op_trans at .*test_cut.py:\d+"):
        op_assign(graph, parts, 0)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Split("batch", 3), r"mul0 \(blocks\.0\) has 8 elements of batch .*3 does not divide 8.*Choose 1, 2, 4 or 8"),
        (Split(("batch", "hidden"), 5), r"Split\(\('batch', 'hidden'\), 5\) does not"),
        (Split("batch", sizes=(3, 4)), "covers 7 elements, but mul0 .* has 8"),
        (Split((), 2), r"Split\(\(\), parts=2\) names no factor; name one, or make copies by Replicate"),
        (Split("bach", 2), "unknown factor 'bach'; did you mean 'batch'"),
        (Split(("batch", "h.*"), 2), r"unknown factor 'h\.\*'"),
        (Split("batch@sum", 2), "'batch@sum': unknown index 'sum'; did you mean 'summed'"),
        (Replicate(0), "at least 1"),
        (Split("batch", 3, sizes=(4, 4)), "asks for 3 parts, but gives 2 sizes"),
        (Replicate(2, "rout"), "unknown mirror 'rout'; did you mean 'route'"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_algorithm_is_refused_with_both_numbers(algorithm: Algorithm, message: str) -> None:
    graph = chain()
    with pytest.raises((InputError, TransformError), match=rf"(?s)op_trans at .*test_cut.py:\d+: .*{message}"):
        op_trans(graph, graph.op("mul0"), algorithm)


@dataclass(frozen=True)
class Own:
    """A user's own algorithm, which makes any axis."""

    made: object

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Axis:
        return self.made  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Axis(0, (3, 4)), r"cuts index 0 \(batch\) into \(3, 4\), 7 elements, but the part has 8; cover 8"),
        (Axis(0, (8, 0)), r"makes parts of sizes \(8, 0\); give one or more, each an integer of at least 1"),
        (Axis(0, (4.0, 4.0)), r"sizes \(4.0, 4.0\)"),
        (Axis(None, ()), r"sizes \(\)"),
        (Axis(None, 2), "makes parts of sizes 2; give one or more"),  # type: ignore[arg-type]
        (Axis(2, (4, 4)), "cuts index 2, but the op has 2, numbered from 0"),
        (Axis(-1, (3, 3)), "cuts index -1, but the op has 2"),
        (Axis(1, (3, 3)), r"cuts index 1 \(hidden\), which the op needs whole"),
        (Axis(None, (1, 1), partial_inputs=(0,)), r"addends of inputs \(0,\); the op is linear in: none"),
        (Axis(0, (4, 4), partial_inputs=(0,)), "cuts index 0 .* do one after the other"),
        (Axis(None, (1, 1), "rout"), "unknown mirror 'rout'"),
        (Axis(0, (4, 4), at=5), "has the places 5; give a tuple of numbers from 0"),  # type: ignore[arg-type]
        (Axis(0, (4, 4), at=[0, 1]), r"has the places \[0, 1\]; give a tuple"),  # type: ignore[arg-type]
        (Axis(0, (4, 4), name=3), "has the name 3; give the name of an axis"),  # type: ignore[arg-type]
        (Axis(None, (1, 1), partial_inputs=[0]), r"the addends of \[0\]; give a tuple"),  # type: ignore[arg-type]
        (Axis(None, (1, 1), is_microbatch=2), "has is_microbatch 2; give True or False"),  # type: ignore[arg-type]
        ((0, (4, 4)), "gives .*; its method cut must return an Axis"),
    ],
)
def test_what_an_own_algorithm_makes_is_checked(made: object, message: str) -> None:
    graph = chain()
    op = replace(graph.op("mul0"), indices=(Index(8, "batch", "spatial"), Index(6, "hidden", "frozen")))
    graph = Graph(replace(graph.model, ops=(op, *graph.ops[1:])))
    with pytest.raises(TransformError, match=rf"op_trans at .*test_cut.py:\d+: Own of mul0 \(aten.*{message}"):
        op_trans(graph, op, Own(made))


def test_an_own_algorithm_may_give_numbers_of_numpy() -> None:
    graph = chain()
    first, _ = op_trans(graph, graph.op("mul0"), Own(Axis(np.int64(0), [np.int64(3), np.int64(5)])))  # type: ignore[arg-type]
    op_trans(graph, first, Own(Axis(0, (1, 2))))
    assert graph.rows(graph.op("mul0")).lo.tolist() == [[0, 0], [1, 0], [3, 0]]


def test_a_missing_factor_replicates_unless_required() -> None:
    graph = Graph(random_model(0, 4)[0])
    op = graph.ops[0]
    factor = next(f for f in graph.factors if not f.startswith(op.name))
    assert len(op_trans(graph, op, Split(factor, 2))) == 2
    assert "replicated" in str(graph.journal[-1])
    with pytest.raises(TransformError, match="required"):
        op_trans(graph, graph.ops[1], Split(next(f for f in graph.factors if f.startswith("w0")), 2, required=True))


SQUARE = tuple(Index(8, f, mark) for f, mark in (("h.0.mlp", "spatial"), ("h.0.mlp", "summed"), ("batch", "spatial")))


@pytest.mark.parametrize(
    ("factor", "parts", "index"),
    [
        ("h.*.mlp", 2, 0),
        ("h.0.mlp@1", 2, 1),
        ("h.0.mlp@summed", 2, 1),
        ("*@spatial", 2, 0),
        (("batch", "h.0.mlp"), 2, 2),
        ("h.0.mlp@2", 2, None),
        ("batch@summed", 2, None),
    ],
)
def test_a_factor_is_named_by_a_pattern_a_number_or_a_mark(factor: str, parts: int, index: int | None) -> None:
    op = replace(chain().op("mul0"), indices=SQUARE, outputs=())
    assert Split(factor, parts).cut(op, (8, 8, 8)).index == index


def test_of_several_factors_the_first_that_divides_is_cut() -> None:
    graph = chain(size=8)
    op_trans(graph, graph.op("mul0"), Split(("batch", "hidden"), 3))
    assert graph.grids["mul0"].axes == (Axis(1, (2, 2, 2)),)


def test_a_batch_of_one_comes_in_one_part() -> None:
    for plan, devices in (("pipeline_1f1b:microbatches=1", 2), ("zero:stage=3", 1)):
        assert_equal(graph_of("mlp:batch=1"), plan, devices)
    with pytest.raises(InputError, match=r"unknown factor 'batch'.* A dim of size 1, as of a batch of one, has no"):
        ss.compile(graph_of("mlp:batch=1"), "data_parallel", "local:2")


@pytest.mark.parametrize(
    ("extents", "parts", "index", "sizes"),
    [
        ((8, 6), 4, 0, (2, 2, 2, 2)),
        ((8, 6), 3, 1, (2, 2, 2)),
        # A small tensor in parts of 1 and 2 is whole; a large one, and parts of 8 and 9, are cut.
        ((8, 6), 5, None, (1, 1, 1, 1, 1)),
        ((8, 1 << 13 | 1), 5, 1, (1638, 1639, 1638, 1639, 1639)),
        ((42, 6), 5, 0, (8, 8, 9, 8, 9)),
        ((8, 8), 2, 0, (4, 4)),
        ((2, 3), 4, None, (1, 1, 1, 1)),
    ],
)
def test_shards_are_of_the_largest_index_that_divides(
    extents: tuple[int, ...], parts: int, index: int | None, sizes: tuple[int, ...]
) -> None:
    axis = Shard(parts, "dp").cut(chain().op("mul0"), extents)
    assert (axis.index, axis.sizes, axis.name) == (index, sizes, "dp")
