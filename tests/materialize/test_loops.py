"""Loops over microbatches: code of a few of them is that of all; where it does not repeat, all are compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest

import superscaler as ss
from superscaler.certify.certificate import CHECKS
from superscaler.compiler import Compiled, SProgram, compile_graph
from superscaler.ir.codes import Loop, Rolled, Span, find_spans
from superscaler.ir.graph import Graph
from superscaler.ir.program import Backward, Forward, Instruction, Program, Role, names
from superscaler.ir.program_text import parse_program, print_program
from superscaler.plans import resolve
from tests.graphs import graph_of
from tests.ran import equal
from tests.rewrites import on_top, unrolled
from tests.sweeps import slow


@pytest.fixture
def mlp() -> Graph:
    return graph_of("mlp:layers=4,hidden=8,inputs=4,classes=4,batch=64", "SGD")


@pytest.fixture
def gpt() -> Graph:
    return graph_of("gpt2:size=tiny,layers=1,batch=16", "SGD")


def compiled(graph: Graph, plan: str | SProgram, devices: int, *, whole: bool = False) -> Compiled:
    with pytest.MonkeyPatch.context() as patch:
        if whole:
            patch.setattr("superscaler.compiler.find_steady", lambda graph: None)
        return compile_graph(graph, resolve(plan) if isinstance(plan, str) else plan, ss.Cluster.local(devices))


def loops(program: Program) -> list[list[int]]:
    """Return per distinct program how often each of its loops is done."""
    codes = (device.instructions for device, _ in program.distinct)
    return [[run.count for run in code.runs if isinstance(run, Loop)] for code in codes if isinstance(code, Rolled)]


PLANS = [
    ("pipeline_1f1b:microbatches=32", 2),
    ("gpipe:microbatches=32", 2),
    ("interleaved:microbatches=32,chunks=2", 2),
    ("interleaved:microbatches=64,chunks=2", 4),
    ("zb_h1:microbatches=32", 2),
    ("zb_h2:microbatches=32", 2),
    ("zbv:microbatches=32", 2),
    ("dualpipe_v:microbatches=32", 2),
    ("chimera:microbatches=32", 2),
    ("gradient_accumulation:microbatches=32", 1),
    ("hybrid:dp=2,tp=1,pp=2,microbatches=32", 4),
    ("hybrid:dp=1,tp=2,pp=2,microbatches=32", 4),
]


@pytest.mark.parametrize(("plan", "devices"), [*PLANS[:3], *slow(*PLANS[3:4]), *PLANS[4:]])
def test_code_with_loops_does_what_the_code_of_all_microbatches_does(mlp: Graph, plan: str, devices: int) -> None:
    program = check_told(mlp, plan, devices)
    text = print_program(program)
    read = parse_program(text, program.model)
    assert "  loop " in text
    assert loops(read) == loops(program)
    assert print_program(read) == text
    for a, b in zip(read.devices, program.devices, strict=True):
        assert list(a.instructions) == list(b.instructions)


@pytest.mark.parametrize("plan", ["seq1f1b:microbatches=16", "terapipe:microbatches=16"])
def test_code_with_loops_over_slices_does_what_the_code_of_all_does(gpt: Graph, plan: str) -> None:
    check_told(gpt, plan, 2)


def test_each_of_several_iterations_goes_in_loops(mlp: Graph) -> None:
    twice = unrolled("pipeline_1f1b:microbatches=32")
    check_told(mlp, twice, 2)
    equal(mlp, twice)


def check_told(graph: Graph, plan: str | SProgram, devices: int) -> Program:
    """Check that code with loops does what the code of all microbatches does, and return it."""
    rolled, whole = compiled(graph, plan, devices), compiled(graph, plan, devices, whole=True)
    assert all(loops(rolled.program))
    assert not loops(whole.program)
    for check in CHECKS.values():
        check(rolled.program)
    assert rolled.program.bytes_moved == whole.program.bytes_moved
    assert rolled.program.notes == whole.program.notes
    for a, b in zip(rolled.program.devices, whole.program.devices, strict=True):
        assert a.weights == b.weights
        assert list(map(work, a.instructions)) == list(map(work, b.instructions))
    return rolled.program


def work(i: Instruction) -> object:
    """Return what an instruction does but for the names of its values."""
    kept = (i.task, i.function, i.at) if isinstance(i, Forward) else i.task if isinstance(i, Backward) else None
    return type(i), kept, *(len(names(i, role)) for role in (Role.READ, Role.WRITE, Role.SUM))


@pytest.mark.parametrize(("plan", "devices"), [*PLANS[:2], PLANS[-1]])
def test_a_plan_with_loops_equals_the_model(mlp: Graph, plan: str, devices: int) -> None:
    equal(mlp, plan, devices)


@pytest.mark.parametrize(("was", "now"), [("loop 30", "loop 1"), (" of 9", " of 8"), (" of 9", " of 900")])
def test_loops_that_do_not_repeat_are_refused(mlp: Graph, was: str, now: str) -> None:
    program = compiled(mlp, PLANS[0][0], 2).program
    text = print_program(program)
    assert was in text
    with pytest.raises(ss.InputError):
        parse_program(text.replace(was, now, 1), program.model)


@pytest.mark.parametrize("plan", ["pipeline_1f1b", "zbv", "chimera"])
def test_code_is_as_long_for_any_number_of_microbatches(mlp: Graph, plan: str) -> None:
    few, many = (compiled(mlp, f"{plan}:microbatches={count}", 2).emitted.files for count in (32, 64))
    assert {name: text.count("\n") for name, text in few.items()} == {n: t.count("\n") for n, t in many.items()}


def test_compiling_more_microbatches_compiles_no_more_of_them(mlp: Graph) -> None:
    few, many = (compiled(mlp, f"pipeline_1f1b:microbatches={count}", 2) for count in (16, 64))
    assert len(few.schedule.order) == len(many.schedule.order)
    assert len(many.whole_schedule.order) > 3 * len(many.schedule.order)


def test_rows_that_do_not_repeat_are_compiled_whole(mlp: Graph) -> None:
    def swapped(graph: Graph) -> None:
        # The one before the last forward of a device goes first.
        at = next(n for n, order in enumerate(graph.orders) if str(order.before) == "0B14")
        a, b = graph.orders[at], graph.orders[at + 1]
        graph.orders[at - 1] = replace(graph.orders[at - 1], after=a.after)
        graph.orders[at] = replace(a, before=a.after, after=a.before)
        graph.orders[at + 1] = replace(b, before=a.before)

    assert not loops(compile_graph(mlp, on_top(PLANS[0][0], swapped), ss.Cluster.local(2)).program)


def test_few_microbatches_are_compiled_whole(mlp: Graph) -> None:
    assert not loops(compiled(mlp, "pipeline_1f1b:microbatches=8", 2).program)


def test_a_sequence_repeats_where_it_goes_on_later() -> None:
    forms, at = "ffbfbfbfbb", [0, 1, 0, 2, 1, 3, 2, 4, 3, 4]
    assert find_spans(forms, at, 1) == [Span(1, 2, 4)]
    assert find_spans(forms, at, 2) == []
