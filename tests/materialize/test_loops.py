"""Loops over microbatches: code of a few of them is that of all; where it does not repeat, all are compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.certify.certificate import CHECKS, certify, check_program
from superscaler.compiler import Compiled, SProgram, compile_graph
from superscaler.ir import program as p
from superscaler.ir.communication import bytes_moved
from superscaler.ir.graph import Graph
from superscaler.ir.loops import Loop, Rolled, Span, find_spans
from superscaler.ir.text.program import parse_program, print_program
from superscaler.materialize import all_microbatches
from superscaler.materialize.loops import Aperiodic, find_shape, roll
from superscaler.plans import resolve
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal
from tests.helpers.rewrites import on_top, unrolled
from tests.helpers.sweeps import few, slow

MLP = "mlp:layers=4,hidden=8,inputs=4,classes=4,batch=64"
GPT = "gpt2:layers=2,hidden=8,heads=4,seq=4,vocab=8,batch=16,dropout=0"


@pytest.fixture
def mlp() -> Graph:
    return graph_of(MLP, "SGD")


@pytest.fixture
def gpt() -> Graph:
    return graph_of(GPT, "SGD")


def compiled(graph: Graph, plan: str | SProgram, devices: int, *, whole: bool = False) -> Compiled:
    with pytest.MonkeyPatch.context() as patch:
        if whole:
            patch.setattr("superscaler.compiler.steady_states", lambda graph: ())
        return compile_graph(graph, resolve(plan) if isinstance(plan, str) else plan, ss.Cluster.local(devices))


def loops(program: p.Program) -> list[list[int]]:
    """Return per distinct program how often each of its loops is done."""
    codes = (device.instructions for device, _ in program.distinct)
    return [[run.count for run in code.runs if isinstance(run, Loop)] for code in codes if isinstance(code, Rolled)]


PLANS = [
    ("pipeline_1f1b:microbatches=16", 2),
    ("breadth_first:microbatches=16", 2),
    ("interleaved:microbatches=16,chunks=2", 2),
    ("interleaved:microbatches=32,chunks=2", 4),
    ("zb_h1:microbatches=16", 2),
    ("zb_h2:microbatches=16", 2),
    ("zbv:microbatches=16", 2),
    ("dualpipe_v:microbatches=16", 2),
    ("chimera:microbatches=32", 2),
    ("gradient_accumulation:microbatches=16", 1),
    ("hybrid:dp=2,tp=1,pp=2,microbatches=16", 4),
    ("hybrid:dp=1,tp=2,pp=2,microbatches=16", 4),
]


@pytest.mark.parametrize(("plan", "devices"), few(PLANS, 0, 1, 4, 6, 9, 11))
def test_code_with_loops_does_what_the_code_of_all_microbatches_does(mlp: Graph, plan: str, devices: int) -> None:
    program = check_told(mlp, plan, devices)
    text = print_program(program)
    read = parse_program(text, program.model)
    assert "  loop " in text
    assert loops(read) == loops(program)
    assert print_program(read) == text
    for a, b in zip(read.devices, program.devices, strict=True):
        assert list(a.instructions) == list(b.instructions)


PARTS = "co_shard:1,parts=4 x pipeline_1f1b:2,microbatches=16"


@pytest.mark.parametrize("plan", [*slow("seq1f1b:microbatches=16"), "terapipe:microbatches=16", *slow(PARTS)])
def test_code_with_loops_over_slices_or_parts_does_what_the_code_of_all_does(gpt: Graph, plan: str) -> None:
    check_told(gpt, plan, 2)


def test_code_with_loops_over_work_of_several_devices_does_what_the_code_of_all_does(gpt: Graph) -> None:
    check_told(gpt, "interlaced:microbatches=16", 2)


def test_each_of_several_iterations_goes_in_loops(mlp: Graph) -> None:
    twice = unrolled("pipeline_1f1b:microbatches=16")
    check_told(mlp, twice, 2)
    equal(mlp, twice)


def check_told(graph: Graph, plan: str | SProgram, devices: int) -> p.Program:
    """Check that code with loops is the code of all microbatches, name by name, and return it."""
    rolled, whole = compiled(graph, plan, devices), compiled(graph, plan, devices, whole=True)
    assert all(loops(rolled.program))
    assert not loops(whole.program)
    for check in CHECKS.values():
        check(rolled.program)
    assert bytes_moved(rolled.program) == bytes_moved(whole.program)
    assert rolled.program.notes == whole.program.notes
    for a, b in zip(rolled.program.devices, whole.program.devices, strict=True):
        assert a.weights == b.weights
        assert list(a.instructions) == list(b.instructions)
    return rolled.program


@pytest.mark.parametrize(("plan", "devices"), [*PLANS[:2], PLANS[-1]])
def test_a_plan_with_loops_equals_the_model(mlp: Graph, plan: str, devices: int) -> None:
    equal(mlp, plan, devices)


@pytest.mark.parametrize(("was", "now"), [("loop 14", "loop 1"), (" of 9", " of 8"), (" of 9", " of 900")])
def test_loops_that_do_not_repeat_are_refused(mlp: Graph, was: str, now: str) -> None:
    program = compiled(mlp, PLANS[0][0], 2).program
    text = print_program(program)
    assert was in text
    with pytest.raises(ss.InputError):
        parse_program(text.replace(was, now, 1), program.model)


Wrong = Callable[[Loop], Loop]


def bodies(turn: Callable[[list[Any]], object], *, later: bool = False) -> Wrong:
    """Return the change of both repetitions that are given, or of the second one alone: then what moves does so by
    another step.
    """

    def change(loop: Loop) -> Loop:
        first, second = list(loop.first), list(loop.second)
        for body in (second,) if later else (first, second):
            turn(body)
        return replace(loop, first=tuple(first), second=tuple(second))

    return change


def place(body: Sequence[p.Instruction], kind: type) -> int:
    return next(n for n, i in enumerate(body) if isinstance(i, kind))


def left_out(kind: type) -> Wrong:
    return bodies(lambda body: body.pop(place(body, kind)))


def other(kind: type, turn: Callable[[Any], dict[str, Any]], *, later: bool = False) -> Wrong:
    """Return the change of some fields of the first instruction of a kind."""

    def change(body: list[Any]) -> None:
        n = place(body, kind)
        body[n] = replace(body[n], **turn(body[n]))

    return bodies(change, later=later)


def exchanged(body: list[Any]) -> None:
    a, b = place(body, p.Forward), place(body, p.Backward)
    body[a], body[b] = body[b], body[a]


def freed_early(body: list[Any]) -> None:
    n = place(body, p.Free)
    body[n - 1], body[n] = body[n], body[n - 1]


def without_first(names: Sequence[Any]) -> tuple[Any, ...]:
    first = next(n for n, name in enumerate(names) if name is not None)
    return (*names[:first], None, *names[first + 1 :])


def before(value: Any) -> Any:
    return value._replace(microbatch=value.microbatch - 1)


WRONG: dict[str, Wrong] = {
    "a part moves by another step": other(p.Forward, lambda i: {"at": tuple(2 * x for x in i.at)}, later=True),
    "a message has another number": other(p.Recv, lambda i: {"message": i.message + 1}, later=True),
    "a forward runs in other microbatches": other(p.Forward, lambda i: {"task": before(i.task)}, later=True),
    "the peer is another device": other(p.Recv, lambda i: {"peer": i.peer + 1}),
    "a group is smaller": other(p.Collective, lambda i: {"group": i.group[:1]}),
    "a backward is of the microbatch before": other(p.Backward, lambda i: {"task": before(i.task)}),
    "a gradient is in no sum": other(p.Backward, lambda i: {"sums": without_first(i.sums)}),
    "the backward comes before the forward": bodies(exchanged),
    "a value is freed before its last use": bodies(freed_early),
    "a repetition more": lambda loop: replace(loop, count=loop.count + 1),
    "a repetition less": lambda loop: replace(loop, count=loop.count - 1),
    **{f"no {kind.__name__}": left_out(kind) for kind in (p.Forward, p.Backward, p.Send, p.Recv, p.Wait, p.Collective)},
}


def with_loop(code: Rolled, wrong: Wrong) -> Rolled:
    """Return code with another longest loop."""
    n = max(range(len(code.runs)), key=lambda n: isinstance(code.runs[n], Loop) * len(code.runs[n]))
    loop = code.runs[n]
    assert isinstance(loop, Loop)
    return Rolled((*code.runs[:n], wrong(loop), *code.runs[n + 1 :]))


@cache
def with_collectives() -> p.Program:
    return compiled(graph_of(MLP, "SGD"), "hybrid:dp=1,tp=2,pp=2,microbatches=16", 4).program


@pytest.mark.parametrize("name", WRONG)
def test_wrong_loops_are_refused(name: str) -> None:
    program = with_collectives()
    ranks = {device.rank for device in program.groups[0][1]}

    def change(device: p.Device) -> p.Device:
        if device.rank not in ranks:
            return device
        assert isinstance(device.instructions, Rolled)
        return replace(device, instructions=with_loop(device.instructions, WRONG[name]))

    with pytest.raises(ss.PlanError):
        check_program(program.changed(change))


# The certificate refuses the first two. It does not ask whether all values are freed, nor for the plan's order.
@pytest.mark.parametrize("name", ["a value is freed before its last use", "a message has another number", "no Free"])
def test_code_that_does_not_go_on_evenly_is_compiled_whole(
    mlp: Graph, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rolled(*given: Any) -> Rolled:
        return with_loop(roll(*given), WRONG.get(name, left_out(p.Free)))

    monkeypatch.setattr(all_microbatches, "roll", rolled)
    program = compiled(mlp, PLANS[0][0], 2).program
    assert not loops(program)
    check_program(program)


def test_code_in_another_order_than_the_plans_is_compiled_whole(mlp: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    def early(body: list[Any]) -> None:
        # The second half of a backward may run at any time, but for the plan.
        halves = [n for n, i in enumerate(body) if isinstance(i, p.Backward) and i.half == "weight"]
        body[:0] = [body.pop(n) for n in halves[:1]]

    monkeypatch.setattr(all_microbatches, "roll", lambda *given: with_loop(roll(*given), bodies(early)))
    assert not loops(compiled(mlp, "zb_h1:microbatches=16", 2).program)
    monkeypatch.setattr(all_microbatches, "_check_orders", lambda *given: None)
    program = compiled(mlp, "zb_h1:microbatches=16", 2).program
    assert loops(program)
    check_program(program)


def test_a_plan_with_loops_is_certified_when_it_is_compiled_and_not_again(monkeypatch: pytest.MonkeyPatch) -> None:
    certified = list[p.Program]()
    for room in ("compiler", "plan"):
        monkeypatch.setattr(
            f"superscaler.{room}.certify", lambda program: certified.append(program) or certify(program)
        )
    plan = ss.compile(graph_of(MLP, "SGD"), PLANS[0][0], "local:2")
    assert plan.seconds["certify"] > 0
    for _ in range(2):
        plan.validate()
    assert certified.count(plan.compiled.program) == 1
    wrong = replace(plan.compiled, program=plan.compiled.program.changed(lambda device: replace(device, weights=())))
    assert not wrong.certified
    with pytest.raises(ss.PlanError):
        ss.Plan(wrong).validate()


@pytest.mark.parametrize("plan", [*slow("pipeline_1f1b"), *slow("zbv"), "chimera"])
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
        at = next(n for n, order in enumerate(graph.orders) if str(order.before) == "0B6")
        a, b = graph.orders[at], graph.orders[at + 1]
        graph.orders[at - 1] = replace(graph.orders[at - 1], after=a.after)
        graph.orders[at] = replace(a, before=a.after, after=a.before)
        graph.orders[at + 1] = replace(b, before=a.before)

    assert not loops(compile_graph(mlp, on_top(PLANS[0][0], swapped), ss.Cluster.local(2)).program)


def test_few_microbatches_are_compiled_whole(mlp: Graph) -> None:
    assert not loops(compiled(mlp, "pipeline_1f1b:microbatches=8", 2).program)


class Weighed(nn.Linear):
    """A loss with another weight for each sample."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x).mean(1) * torch.arange(16, device=x.device)).mean()


def test_slices_of_a_constant_for_each_microbatch_are_compiled_whole() -> None:
    module = Weighed(4, 4)
    graph = ss.capture(module, (torch.ones(16, 4),), optimizer=torch.optim.SGD(module.parameters()), check=False)
    program = compiled(graph, "gradient_accumulation:microbatches=16", 1).program
    assert not loops(program)
    check_program(program)


@pytest.mark.parametrize("model", [f"{GPT},attention=eager", *slow("llama:size=tiny,batch=16,device=meta")])
def test_masks_and_rotary_angles_are_no_work_of_a_microbatch(model: str) -> None:
    assert all(loops(compiled(graph_of(model, "SGD"), "pipeline_1f1b:microbatches=16", 2).program))


@pytest.mark.parametrize("fifth", ["y0", "e0"])
def test_a_body_seen_once_has_only_work_that_is_done_around_it(fifth: str) -> None:
    rounds = f"a0 b0 c0 d0  a1 w0 b1 x0 c1 {fifth} d1 z0  a2 w1 b2 x1  y1 c2 z1 d2 w2 x2 y2 z2"
    code = [p.Backward(p.Task(ord(name), int(at)), (), ()) for name, at in rounds.split()]
    with nullcontext() if fifth == "y0" else pytest.raises(Aperiodic):
        assert find_shape(code, 1, 3, 1.5).spans == (Span(4, 8, 1),)


def test_a_sequence_repeats_where_it_goes_on_later() -> None:
    forms, at = "ffbfbfbfbb", [0, 1, 0, 2, 1, 3, 2, 4, 3, 4]
    assert find_spans(forms, at, 1) == [Span(1, 2, 4)]
    assert find_spans(forms, at, 2) == []
