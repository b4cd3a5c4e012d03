"""Rounds that the certificate leaves out: they have the effect that they have when they run, or they do run."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.certify.masks import Masks
from superscaler.certify.rounds import Rounds
from superscaler.compiler import compile_graph
from superscaler.errors import ScheduleError
from superscaler.ir.codes import Loop, Rolled, Run
from superscaler.ir.interpret import Interpreter
from superscaler.ir.program import Device, Free, Instruction, Program, reads, writes
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


def without_one(runs: tuple[Run, ...]) -> Iterator[Run]:
    """Yield runs that free a value of microbatch 15 of the first loop, which the second one reads, between them."""
    one, two = (run for run in runs if isinstance(run, Loop))
    made = {name for i in one for name in writes(i)} & {name for i in two for name in reads(i)}
    for run in runs:
        yield run
        if run is one:
            yield (Free(tuple(name for name in made if name.microbatch == 15)),)


def freed_ahead(runs: tuple[Run, ...]) -> Iterator[Run]:
    """Yield runs whose last loop frees what the first one made for five microbatches later."""
    one, _ = (run for run in runs if isinstance(run, Loop))
    made = {name._replace(microbatch=0) for i in one for name in writes(i)}

    def later(i: Instruction) -> Instruction:
        names = i.names if isinstance(i, Free) else ()
        ahead = (n._replace(microbatch=n.microbatch + 5 * (n._replace(microbatch=0) in made)) for n in names)
        return Free(tuple(ahead)) if names else i

    for run in runs:
        if isinstance(run, Loop) and run is not one:
            yield Loop((*map(later, run.first),), (*map(later, run.second),), run.count)
        else:
            yield run


@pytest.mark.parametrize("wrong", [without_one, freed_ahead])
def test_a_fault_that_only_a_later_round_meets_is_found(wrong: Callable[[tuple[Run, ...]], Iterator[Run]]) -> None:
    def change(device: Device) -> Device:
        code = device.instructions
        assert isinstance(code, Rolled)
        is_last_stage = sum(isinstance(run, Loop) for run in code.runs) == 2
        return replace(device, instructions=Rolled(tuple(wrong(code.runs)))) if is_last_stage else device

    with pytest.raises(ScheduleError, match="which is freed"):
        check_program(compiled(*PLANS[0]).changed(change))
