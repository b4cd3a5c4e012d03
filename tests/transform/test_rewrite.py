"""What algorithms make of whole ops, and what they may not make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from superscaler.errors import InputError, TransformError
from superscaler.ir.grid import HOSTS
from superscaler.ir.model import Model, Op, Operand
from superscaler.ir.text.model import parse_model, print_model
from superscaler.ir.variants import without_twins
from superscaler.transform.place import place_twins
from superscaler.verbs import Insert, Recompute, Split, op_assign, op_order, op_trans
from tests.verbs.chains import chain


def test_recompute_makes_twins_that_have_the_mirrors() -> None:
    graph = chain()
    captured = graph.model
    made = op_trans(graph, graph.forward_ops[:2], Recompute())
    assert [parts.op.name for parts in made] == ["mul0.r", "mul1.r"]
    first, second = (graph.op(name) for name in ("mul1", "mul1.r"))
    assert (first.has_mirror, second.has_mirror) == (False, True)
    assert [o.tensor for o in second.inputs] == ["h0.r", "w"]
    assert graph.model.mirror(second).inputs[0].tensor == graph.model.gradient("h1") == "d(h1)"
    assert [op.name for op in graph.ops] == [op.name for op in captured.ops]
    assert without_twins(graph.model) == captured
    assert parse_model(print_model(graph.model)) == graph.model


def test_lists_of_ops_are_one_region_each() -> None:
    graph, other = chain(), chain()
    first, second = graph.forward_ops[:2]
    op_trans(graph, [[first, second], [second]], Recompute())
    for ops in ([first, second], [second]):
        op_trans(other, ops, Recompute())
    assert graph.model == other.model
    assert [entry.op for entry in graph.journal] == [entry.op for entry in other.journal] == ["mul0", "mul1", "mul1"]


def test_twins_have_the_parts_of_their_ops_unless_they_are_given_others() -> None:
    graph = chain()
    op_trans(graph, graph.forward_ops[:2], Recompute())
    for op in graph.forward_ops[:2]:
        op_assign(graph, op_trans(graph, op, Split("batch", 2)), 0)
    op_assign(graph, graph.op("mul1.r"), 1)
    place_twins(graph)
    assert graph.grids["mul0.r"] is graph.grids["mul0"]
    assert graph.grids["mul1.r"].used() == {1}


def test_insert_lets_readers_read_a_copy_whose_gradient_is_that_of_the_original() -> None:
    graph = chain()
    captured = graph.model
    again = op_trans(graph, graph.forward_ops[1:3], Recompute())
    (made,) = op_trans(graph, again, Insert())
    assert (made.op.name, made.op.is_copy, made.op.has_mirror) == ("h0.c", True, False)
    assert [op.inputs[0].tensor for op in map(graph.op, ("mul1", "mul1.r", "mul2.r"))] == ["h0", "h0.c", "h1.r"]
    assert graph.model.gradient("h0.c") == graph.model.gradient("h0") == "d(h0)"
    assert [op.name for op in graph.model.ops][:2] == ["mul0", "h0.c"]
    (other,) = op_trans(graph, graph.op("mul1"), Insert("h0"))
    assert other.op.name == "h0.c_2"
    with pytest.raises(
        TransformError,
        match=r"none of these do\. These are mul0; give other ops, or leave this",
    ):
        op_trans(graph, graph.op("mul0"), Insert())
    assert without_twins(graph.model) == captured
    assert parse_model(print_model(graph.model)) == graph.model


def test_copies_have_the_parts_that_their_first_reader_reads() -> None:
    graph = chain()
    (copy,) = op_trans(graph, graph.op("mul1"), Insert())
    op_assign(graph, op_trans(graph, graph.op("mul1"), Split("batch", 2)), [0, 1])
    (other,) = op_trans(graph, graph.op("mul2"), Insert())
    op_assign(graph, other, 2)
    place_twins(graph)
    assert (len(graph.grids[copy.op.name]), graph.grids[copy.op.name].used()) == (2, {0, 1})
    assert (len(graph.grids[other.op.name]), graph.grids[other.op.name].used()) == (1, {2})
    assert graph.grids[copy.op.name].on_hosts().used() == {HOSTS, HOSTS + 1}


def test_orders_of_backwards_are_those_of_twins() -> None:
    graph = chain()
    first, second, *_ = graph.forward_ops
    op_order(graph, graph.select(ops=[second], kind="B"), graph.select(ops=[first], kind="B"))
    op_trans(graph, [first], Recompute())
    op_order(graph, graph.select(ops=[first], kind="R"), graph.select(ops=[second], kind="B"))
    place_twins(graph)
    members = [[(group.kind, group.members[0][0]) for group in (o.before, o.after)] for o in graph.orders]
    assert members == [[("B", "mul1"), ("B", "mul0.r")], [("F", "mul0.r"), ("B", "mul1")]]
    with pytest.raises(InputError, match="matches no op"):
        graph.select(ops=[second], kind="R")


def test_recompute_is_refused_where_it_has_no_meaning() -> None:
    graph = chain()
    part = op_trans(graph, graph.op("mul2"), Split("batch", 2))[0]
    with pytest.raises(TransformError, match="whole ops, not to 1 of the 2 parts of mul2"):
        op_trans(graph, part, Recompute())
    op_trans(graph, graph.forward_ops[:2], Recompute())
    with pytest.raises(TransformError, match="Recompute of mul0 is asked for twice"):
        op_trans(graph, graph.forward_ops[:2], Recompute())
    with pytest.raises(TransformError, match="needs ops that have a backward"):
        op_trans(graph, graph.ops[-1:], Recompute())


@dataclass(frozen=True)
class Own:
    """A user's own algorithm, which makes any model."""

    make: Callable[[Model], object]

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model:
        return self.make(model)  # type: ignore[return-value]


def changed(model: Model, at: int, **fields: object) -> Model:
    ops = list(model.ops)
    ops[at] = replace(ops[at], **fields)  # type: ignore[arg-type]
    return replace(model, ops=tuple(ops))


def with_sums(model: Model) -> Model:
    """Return the model with a second result of mul1, of its rows alone."""
    whole, made = model.tensors["h1"], model.ops[1].outputs
    rows = replace(whole, name="rows", shape=(8,), slots=whole.slots[:1], extents=whole.extents[:1])
    more = changed(model, 1, outputs=(*made, Operand("rows", made[0].slots[:1])))
    return replace(more, tensors={**model.tensors, "rows": rows})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (with_sums, "lets mul1 be cut along .*, which rows lacks, so that its parts would be added"),
        (lambda m: None, "gives None; its method rewrite must return a Model"),
        (lambda m: changed(m, 1, name="mul0"), "makes two ops named mul0"),
        (lambda m: changed(m, 1, inputs=(Operand("h9", (0, 1)),)), "lets mul1 have h9 as .* it has slots None"),
        (lambda m: changed(m, 1, inputs=(Operand("h0", (0,)),)), r"lets mul1 have h0 as \(0,\) .* slots \(8, 6\)"),
        (lambda m: changed(m, 1, inputs=(Operand("h0", (1, 0)),)), r"of \(8, 6\) as indices of \[6, 8\]; make these"),
        (lambda m: changed(m, 1, inputs=(Operand("h2", (0, 1)),)), "lets mul1 read h2 before it is made"),
        (lambda m: changed(m, 1, outputs=(Operand("h0", (0, 1)),)), "lets mul1 make h0, which is made already"),
        (lambda m: changed(m, -1, group=3), "changes the updates"),
        (lambda m: replace(m, ops=m.ops[:-2] + m.ops[-1:]), "loses the loss"),
    ],
)
def test_what_an_own_algorithm_makes_is_checked(make: Callable[[Model], object], message: str) -> None:
    graph = chain()
    with pytest.raises(TransformError, match=rf"op_trans at .*test_rewrite.py:\d+: Own .*{message}"):
        op_trans(graph, graph.forward_ops, Own(make))
