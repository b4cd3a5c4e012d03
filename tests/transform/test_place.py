"""Parts on a mesh: each is where its cuts along the named axes say, whatever their order and nesting."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from superscaler.cluster import Cluster, Mesh
from superscaler.compiler import compile_graph
from superscaler.errors import InputError, TransformError
from superscaler.ir.graph import Graph
from superscaler.verbs import Algorithm, Microbatch, Replicate, Split, Stage, op_assign, op_trans, place
from tests.verbs.chains import chain

BATCH, HIDDEN = Split("batch", 2, axis="dp"), Split("hidden", 3, axis="tp")


def devices(graph: Graph, op: str) -> list[int]:
    return graph.rows(graph.op(op)).device.tolist()


def cut(graph: Graph, *algorithms: Algorithm, op: str = "mul0") -> None:
    for algorithm in algorithms:
        op_trans(graph, graph.op(op), algorithm)


@pytest.mark.parametrize(
    ("algorithms", "expected"),
    [
        ((BATCH, HIDDEN), [0, 1, 2, 3, 4, 5]),
        ((HIDDEN, BATCH), [0, 3, 1, 4, 2, 5]),
        # What has no name is on one device; what is not cut along an axis is there once a place.
        ((Microbatch(2), HIDDEN), [0, 3, 1, 4, 2, 5] * 2),
        ((), [0, 1, 2, 3, 4, 5]),
        ((Stage(1, "dp"), HIDDEN), [3, 4, 5]),
        ((Replicate(3, axis="tp"), Stage(0, "dp")), [0, 1, 2]),
    ],
)
def test_parts_are_where_their_cuts_say(algorithms: Sequence[Algorithm], expected: list[int]) -> None:
    graph = chain()
    cut(graph, *algorithms)
    op_assign(graph, graph.op("mul0"), Cluster.local(6).mesh(dp=2, tp=3))
    assert devices(graph, "mul0") == expected


def test_several_cuts_along_one_axis_count_as_one() -> None:
    graph = chain(size=12)
    cut(graph, Split("hidden", 2, axis="tp"), Split("batch", 3, axis="dp"), Split("hidden", 3, axis="tp"))
    op_assign(graph, graph.op("mul0"), Mesh({"tp": 6, "dp": 3}, range(100, 118)))
    found = np.array(devices(graph, "mul0")).reshape(2, 3, 3) - 100
    assert all(found[a, d, b] == (a * 3 + b) * 3 + d for a, d, b in np.ndindex(2, 3, 3))


def test_places_of_a_cut_are_among_those_that_the_cuts_above_leave() -> None:
    graph, runs = chain(), Split("hidden", 3, axis="dp", at=(0, 1, 2))
    cut(graph, Replicate(2, axis="dp"), runs, Split("hidden", 2, axis="dp", at=(0, 3)))
    op_assign(graph, graph.op("mul0"), Cluster.local(12).mesh(dp=12))
    assert devices(graph, "mul0") == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_parts_that_are_cut_apart_are_placed_by_the_cuts_above_them() -> None:
    graph, mesh = chain(), Cluster.local(6).mesh(dp=2, tp=3)
    first, second = op_trans(graph, graph.op("mul0"), BATCH)
    op_trans(graph, first, HIDDEN)
    op_assign(graph, graph.op("mul0"), mesh)
    # The second has no cut along tp, so there are three of it.
    assert devices(graph, "mul0") == [0, 1, 2, 3, 4, 5]
    assert len(graph.grids["mul0"].children[1].axes) == 1
    with pytest.raises(TransformError, match="was replaced by the op_trans at"):
        op_assign(graph, second, mesh)


def test_some_parts_and_the_update_of_a_weight_are_placed_on_a_mesh() -> None:
    graph, mesh = chain(), Cluster.local(2).mesh(dp=2)
    parts = op_trans(graph, op_trans(graph, graph.op("mul0"), BATCH), Microbatch(2))
    op_assign(graph, parts, 7)
    op_assign(graph, parts[:, 1], mesh)
    assert devices(graph, "mul0") == [7, 0, 7, 1]
    place(graph, "w", [Split("hidden", 2, axis="dp")], mesh)
    assert devices(graph, "update.w") == [0, 1]


@pytest.mark.parametrize(
    ("algorithms", "message"),
    [
        ((Split("batch", 4, axis="dp"),), "mul0 is cut into 4 along dp, but the mesh is dp=2,tp=3; make the two"),
        ((BATCH, Split("batch", 2, axis="dp")), "mul0 is cut into 4 along dp, but the mesh is dp=2,tp=3"),
        ((Replicate(2, axis="tpp"),), "mul0 is cut along tpp, but unknown axis of the mesh 'tpp'; did you mean 'tp'"),
        ((Stage(2, "dp"),), "mul0 is at place 2 of dp, but the mesh is dp=2,tp=3; choose 0 to 1"),
    ],
)
def test_cuts_that_do_not_fit_a_mesh_are_refused_with_both_numbers(
    algorithms: Sequence[Algorithm], message: str
) -> None:
    graph = chain()
    cut(graph, *algorithms)
    with pytest.raises(InputError, match=rf"op_assign at .*test_place.py:\d+: {re.escape(message)}"):
        op_assign(graph, graph.op("mul0"), Cluster.local(6).mesh(dp=2, tp=3))


def test_a_cut_after_the_placement_is_refused() -> None:
    def late(graph: Graph, cluster: Cluster) -> None:
        op_assign(graph, graph.ops, cluster.mesh(tp=2))
        op_trans(graph, graph.forward_ops, HIDDEN)

    with pytest.raises(InputError, match=r"mul0 is cut along tp at .*test_place\.py:\d+, but it was placed before"):
        compile_graph(chain(), late, Cluster.local(2))


def test_a_stage_is_a_number_from_zero() -> None:
    graph = chain()
    with pytest.raises(TransformError, match=r"mul0 cannot be at stage -1 of pp; give 0, 1, 2"):
        cut(graph, Stage(-1, "pp"))


def test_parts_of_a_cut_are_at_the_places_that_it_names() -> None:
    graph = chain()
    cut(graph, Split("batch", 4, axis="dp", at=(0, 1, 1, 0)))
    op_assign(graph, graph.op("mul0"), Mesh({"dp": 2, "tp": 2}, range(4)))
    assert graph.grids["mul0"].devices.tolist() == [[0, 1], [2, 3], [2, 3], [0, 1]]
    with pytest.raises(TransformError, match=r"has the places \(0, 1\) for 4 parts; give each one from 0 on"):
        cut(graph, Split("batch", 4, axis="dp", at=(0, 1)), op="mul1")
