"""Rounds that the certificate leaves out: they have the effect that they have when they run, or they do run."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.certify.masks import Masks
from superscaler.certify.rounds import Rounds
from superscaler.compiler import compile_graph
from superscaler.errors import ScheduleError
from superscaler.ir.codes import Loop, Rolled, Run
from superscaler.ir.interpret import Interpreter
from superscaler.ir.program import Device, Free, Instruction, Load, Program
from superscaler.plans import resolve
from tests.graphs import graph_of

PLANS = [
    ("hybrid:dp=1,tp=2,pp=2,microbatches=32", 4),
    ("gpipe:microbatches=32", 2),
    ("zb_h1:microbatches=32", 2),
    ("interleaved:microbatches=32,chunks=2", 2),
]


@cache
def compiled(plan: str, devices: int) -> Program:
    graph = graph_of("mlp:layers=4,hidden=8,inputs=4,classes=4,batch=64", "SGD")
    return compile_graph(graph, resolve(plan), ss.Cluster.local(devices)).program


@pytest.mark.parametrize(("plan", "devices"), PLANS)
def test_left_out_rounds_change_the_state_as_if_they_had_run(plan: str, devices: int) -> None:
    program = compiled(plan, devices)
    ends = []
    for kind in (Rounds, Interpreter):
        masks, steps = Masks(program), list[int]()
        runs = kind(program, masks)
        step = runs._step
        runs._step = lambda run, i, step=step, steps=steps: steps.append(run.at) or step(run, i)  # type: ignore
        runs.run()
        values = {(run.cohort.number, name): str(value.box) for run in runs.runs for name, value in run.values.items()}
        past = [(run.gone, run.handles, run.at) for run in runs.runs]
        losses = {n: [str(content.box) for content, _ in some] for n, some in masks.losses.items()}
        ends.append((values, past, losses, masks.passes.ran, masks.passes.tapes, masks.memories.works, masks.updated))
        ends.append(len(steps))
    assert ends[0] == ends[2]
    assert ends[1] < 0.8 * ends[3]


def later(free: Instruction) -> Instruction:
    """Return a Free of the names of five microbatches later."""
    assert isinstance(free, Free)
    return Free(tuple(name._replace(microbatch=name.microbatch + 5) for name in free.names))


def other_label(run: Run) -> Run:
    """Return a loop without its rolling, in which the label of microbatch 15 is that of the next one."""
    labels = [i for i in run if isinstance(i, Load)]
    boxes = {i.out: after.box for i, after in pairwise(labels) if i.out.microbatch == 15}
    return tuple(replace(i, box=boxes.get(i.out, i.box)) if isinstance(i, Load) else i for i in run)


def freed_ahead(run: Run) -> Run:
    """Return a loop that frees the names of inputs of later microbatches, long before their use."""
    assert isinstance(run, Loop)
    first = next(n for n, i in enumerate(run.first) if isinstance(i, Free))
    sides = ((*side[:first], later(side[first]), *side[first + 1 :]) for side in (run.first, run.second))
    return Loop(*sides, run.count)


@pytest.mark.parametrize("wrong", [other_label, freed_ahead])
def test_a_fault_that_only_a_later_round_meets_is_found(wrong: Callable[[Run], Run]) -> None:
    program = compiled(*PLANS[0])
    device = program.distinct[-1][0]
    assert isinstance(device.instructions, Rolled)
    loops = [n for n, run in enumerate(device.instructions.runs) if isinstance(run, Loop)]
    at = loops[0 if wrong is other_label else 1]

    def change(one: Device) -> Device:
        code = one.instructions
        assert isinstance(code, Rolled)
        runs = (wrong(run) if n == at else run for n, run in enumerate(code.runs))
        return replace(one, instructions=Rolled(tuple(runs))) if one.rank == device.rank else one

    with pytest.raises(ScheduleError):
        check_program(program.changed(change))
