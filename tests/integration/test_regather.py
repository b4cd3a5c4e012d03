"""Weights at rest in slices are gathered again for the backward, without a second forward: equal, and soon gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

import pytest

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import ScheduleError, TransformError
from superscaler.ir.communication import bytes_moved
from superscaler.ir.program import Backward, Collective, Forward, Program
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal, exact
from tests.helpers.rewrites import on_top, regathered, sharded
from tests.integration.test_recompute import blocks_at_once


@pytest.mark.parametrize(
    "spec",
    [
        "gpt2:size=tiny",
        pytest.param("alphafold2:size=tiny,layers=1,passes=2", marks=pytest.mark.slow),
        pytest.param("llama:size=tiny", marks=pytest.mark.slow),
        pytest.param("mbart:size=tiny", marks=pytest.mark.slow),
    ],
)
def test_weights_brought_again_change_no_number(spec: str) -> None:
    graph = graph_of(spec)
    pairs = [("zero:stage=3,keep=9,shard=2", 4), (regathered("tensor_parallel"), 2)]
    for plan, world in pairs[:1] if spec.startswith("alphafold2") else pairs:
        equal(graph, plan, world)


# Of the activations of sequence parallelism and the weights of ZeRO-3, both: in blocks that keep the rest, and in those
# that are computed again.
@pytest.mark.parametrize(
    ("plan", "world"),
    [
        ("zero:2,stage=3,keep=1 x sequence_parallel:2,regather=true", 4),
        pytest.param("fsdp:2 x sequence_parallel:2,regather=true", 4, marks=pytest.mark.slow),
        pytest.param("sequence_parallel:2,regather=true x recompute", 2, marks=pytest.mark.slow),
        ("sequence_parallel:2,regather=true x recompute:what=attention", 2),
    ],
)
def test_what_is_gathered_again_for_two_reasons_changes_no_number(plan: str, world: int) -> None:
    equal(graph_of("gpt2:size=tiny"), plan, world)


def test_gathers_are_made_again_late_and_freed_early() -> None:
    graph = graph_of("gpt2:size=tiny,layers=4,batch=16")
    plain, again = (ss.compile(graph, plan, "local:2") for plan in ("zero:stage=1", "zero:stage=3,keep=4"))
    inside = 4 * sum(prod(t.shape) for t in graph.model.parameters() if ".h." in t.name)
    assert bytes_moved(again.compiled.program) == bytes_moved(plain.compiled.program) + inside
    program = again.compiled.program
    code = program.devices[0].instructions
    trained = [i for i in code if isinstance(i, Forward) and program.functions[i.function].grads]
    assert len(trained) == sum(isinstance(i, Backward) for i in code)
    assert blocks_at_once(again.compiled.program) == 2


def test_gathered_activations_are_kept_in_pieces_and_gathered_again() -> None:
    graph = graph_of("gpt2:size=tiny")
    plain, again = exact(graph, "sequence_parallel").program, equal(graph, "sequence_parallel:regather=true")
    tokens = next(t for t in graph.model.tensors.values() if t.name == graph.blocks[1].ops[0].inputs[0].tensor)
    # Two products a block and the head, of which each of two devices lacks half.
    more = (2 * len(graph.blocks) + 1) * prod(tokens.shape) * 8
    assert bytes_moved(again.program) == bytes_moved(plain) + more
    run = [again.program.functions[i.function] for i in again.code() if isinstance(i, Forward)]
    inside = [function for function in run if len(function.again) == len(function.inputs)]
    assert len(inside) == 2 * len(graph.blocks) + 1


def test_each_microbatch_brings_them_again() -> None:
    graph = graph_of("gpt2:size=tiny")
    code = equal(graph, "zero:stage=3,keep=4,microbatches=2").code()
    gathered = [i for i in code if isinstance(i, Collective) and i.kind == "all_gather"]
    inside = [work for i in gathered for work in i.works if "_h_" in str(work)]
    assert len(inside) == 2 * 2 * sum(".h." in t.name for t in graph.model.parameters())


def test_another_weight_than_the_forward_had_is_refused() -> None:
    program = ss.compile(graph_of("gpt2:size=tiny"), "zero:stage=3,keep=2", "local:2").compiled.program

    def changed(i: Backward) -> Backward:
        return replace(i, again=(*i.again[1:], i.again[0]))

    def check(change: Callable[[Backward], Backward]) -> None:
        code = program.devices[0].instructions
        at = next(n for n, i in enumerate(code) if isinstance(i, Backward) and i.again)
        last = change(code[at])  # type: ignore[arg-type]
        device = replace(program.devices[0], instructions=(*code[:at], last, *code[at + 1 :]))
        check_program(Program(program.model, program.functions, (device, *program.devices[1:])))

    check(lambda i: i)
    with pytest.raises(ScheduleError):
        check(changed)
    with pytest.raises(ScheduleError):
        check(lambda i: replace(i, again=()))


def test_what_is_computed_again_or_split_is_not_regathered_too() -> None:
    for one, other in ((ss.Recompute, ss.Regather), (ss.Regather, ss.SplitBackward), (ss.SplitBackward, ss.Regather)):
        graph = graph_of("mlp").copy()
        ss.op_trans(graph, graph.forward_ops, one())
        with pytest.raises(TransformError, match=r"test_regather.py:\d+: .* leave it out of one of them"):
            ss.op_trans(graph, graph.forward_ops, other())


def test_what_is_computed_again_leaves_its_region_of_regathered_ops() -> None:
    graph = graph_of("mlp").copy()
    ss.op_trans(graph, graph.forward_ops, ss.Regather())
    first, *others = [op.name for op in graph.forward_ops if op.regather]
    ss.op_trans(graph, [graph.op(first)], ss.Recompute())
    assert not graph.op(first).regather
    assert not any(op.regather for op in graph.ops if op.origin)
    assert all(graph.op(name).regather for name in others)


def test_weights_that_are_all_kept_are_not_regathered_too() -> None:
    def keep(graph: ss.Graph) -> None:
        graph.keep_gathered(graph.updates)

    graph = graph_of("gpt2:size=tiny")
    told = r"op_trans at .*rewrites.py:\d+: Regather gathers nothing again for the backward of layer_norm, since "
    told += r"keep_gathered at .*{}.py:\d+ keeps .*h.0.* and 9 more until the last reader"
    for plan, where in (("zero:stage=1", "zero"), (on_top("data_parallel", keep), "test_regather")):
        with pytest.raises(ScheduleError, match=told.format(where)):
            exact(graph, regathered(plan))
    with pytest.raises(ScheduleError, match=told.format("test_regather")):
        exact(graph, on_top(regathered("data_parallel"), keep))


def test_a_weight_that_is_kept_is_gathered_once_among_regathered_ones() -> None:
    def keep(graph: ss.Graph) -> None:
        graph.keep_gathered([weight])

    graph = graph_of("gpt2:size=tiny")
    weight = next(name for name in graph.updates if ".h.1." in name and len(graph.model.tensors[name].shape) == 2)
    plain, kept = (equal(graph, plan).program for plan in (regathered(sharded), on_top(regathered(sharded), keep)))
    assert bytes_moved(plain) == bytes_moved(kept) + 8 * prod(graph.model.tensors[weight].shape)


def test_activations_are_regathered_where_weights_are_kept() -> None:
    graph = graph_of("gpt2:size=tiny")
    plans = (f"zero:2,stage=1 x sequence_parallel:2,regather={again}" for again in ("false", "true"))
    once, again = (bytes_moved(exact(graph, plan, 4).program) for plan in plans)
    assert again > once
