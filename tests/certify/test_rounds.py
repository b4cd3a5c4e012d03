"""Rounds that the certificate leaves out: they have the effect that they have when they run, or they do run."""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.certify.interpret import Interpreter
from superscaler.certify.masks import Masks
from superscaler.certify.rounds import Rounds
from superscaler.compiler import Compiled, compile_graph, finish
from superscaler.errors import ScheduleError
from superscaler.ir.loops import Loop, Rolled, Run
from superscaler.ir.program import Collective, Device, Free, Instruction, Program, reads, writes
from superscaler.materialize import build
from superscaler.materialize.frees import with_frees
from superscaler.plans import resolve
from tests.helpers.changes import leaves, turned
from tests.helpers.graphs import graph_of
from tests.helpers.rewrites import SProgram, offloaded, swapped
from tests.helpers.sweeps import few

# Parts of a block add up to the gradient of what one microbatch makes from weights alone.
IN_PARTS = "gradient_accumulation:1,microbatches=12 x co_shard:1,parts=2"
PLANS = [
    (IN_PARTS, 1),
    ("hybrid:dp=1,tp=2,pp=2,microbatches=32", 4),
    ("gpipe:microbatches=32", 2),
    ("zb_h1:microbatches=32", 2),
    ("interleaved:microbatches=32,chunks=2", 2),
    (offloaded(swapped("pipeline_1f1b:microbatches=16")), 2),
]


@cache
def compiled(plan: SProgram | str, devices: int) -> Program:
    model = (
        "swin:size=tiny,depths=2,batch=12" if plan == IN_PARTS else "mlp:layers=4,hidden=8,inputs=4,classes=4,batch=64"
    )
    return compile_graph(
        graph_of(model, "SGD"), resolve(plan) if isinstance(plan, str) else plan, ss.Cluster.local(devices)
    ).program


@pytest.mark.parametrize(("plan", "devices"), few(PLANS, 1, 2, 3, 4, 5))
def test_left_out_rounds_change_the_state_as_if_they_had_run(plan: SProgram | str, devices: int) -> None:
    program = compiled(plan, devices)
    ends = []
    for kind in (Rounds, Interpreter):
        masks, steps = Masks(program), list[int]()
        runs = kind(program, masks)
        step = runs._step
        runs._step = lambda run, i, step=step, steps=steps: steps.append(run.at) or step(run, i)  # type: ignore
        runs.run()
        values = {
            (run.cohort.number, name): (str(value.box), value.is_on_host)
            for run in runs.runs
            for name, value in run.values.items()
        }
        past = [(run.gone, run.handles, run.at) for run in runs.runs]
        losses = {n: [str(content.box) for content, _ in some] for n, some in masks.losses.items()}
        ends.append((values, past, losses, masks.passes.ran, masks.passes.tapes, masks.memories.works, masks.updated))
        ends.append(len(steps))
    assert ends[0] == ends[2]
    assert ends[1] < 0.8 * ends[3]


@cache
def compiled_in_parts() -> Compiled:
    """Return a plan whose cheapest way between stages gathers over 4 of 8 tensor-parallel devices: 0, 2, 4 and 6."""
    graph = graph_of("mlp:layers=4,hidden=64,inputs=64,classes=4,batch=8192", "SGD")
    plan = resolve("hybrid:dp=4,tp=8,pp=2,microbatches=16")
    return compile_graph(graph, plan, ss.Cluster.parse("v100:8x8"))


def test_the_rounds_of_a_plan_with_groups_along_a_part_of_an_axis_are_left_out() -> None:
    program, steps = compiled_in_parts().program, list[int]()
    groups = {i.group for device, _ in program.distinct for i in device.instructions if isinstance(i, Collective)}
    assert (32, 34, 36, 38) in groups
    runs = Rounds(program, Masks(program))
    step = runs._step
    runs._step = lambda run, i: steps.append(run.at) or step(run, i)  # type: ignore
    runs.run()
    # As many cohorts as stages; none runs all of its 15 repetitions.
    lengths, ran = [len(run.cohort.code) for run in runs.runs], len(steps)
    assert len(lengths) == 2
    assert ran < 0.6 * sum(lengths)


def test_an_axis_in_parts_gives_the_bytes_of_the_unfolded_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    folded = compiled_in_parts()
    widths = [fold and fold.widths for fold in (folded.full_fold, folded.fold)]
    assert widths == [(4, 8), (4, 4, 2)]
    monkeypatch.setattr("superscaler.compiler.KEPT", 64)
    unfolded = finish(folded.graph, folded.cluster)
    is_unfolded, is_equal = unfolded.fold is None, folded.emitted.files == unfolded.emitted.files
    assert (is_unfolded, is_equal) == (True, True)


def test_a_group_along_a_part_of_an_axis_is_found_before_code_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, written = compiled_in_parts(), list[int]()
    monkeypatch.setattr(build, "with_frees", lambda code, own: written.append(len(code)) or with_frees(code, own))
    assert finish(plan.graph, plan.cluster).program.devices.fold.widths == plan.fold.widths
    # The sampled devices, once: two along each of three axes in two stages.
    assert written == [8]


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
        check_program(compiled(*PLANS[1]).changed(change))


def mutated(loop: Loop, draw: random.Random) -> Loop:
    """Return a loop with one change, mostly the same one in all repetitions."""
    bodies = [list(loop.first), list(loop.second)]
    at, to = (draw.randrange(len(loop.first)) for _ in range(2))
    kind, step = draw.choice(("drop", "twice", "move", *["number"] * 6)), draw.choice((1, -1, 2, 5))
    path = draw.choice([path for path, value in leaves(bodies[0][at], names=False) if isinstance(value, int)])
    for body in bodies:
        i = body.pop(at)
        if kind == "number":
            body.insert(at, turned(i, path, lambda x: not x if isinstance(x, bool) else x + step))
        elif kind != "drop":
            body[to:to] = [i] * (1 + (kind == "twice"))
    second = loop.second if kind == "number" and not draw.randrange(8) else tuple(bodies[1])
    return Loop(tuple(bodies[0]), second, loop.count)


def is_certified(program: Program, kind: type, patch: pytest.MonkeyPatch) -> bool:
    patch.setattr("superscaler.certify.certificate.Rounds", kind)
    try:
        check_program(program)
    except (ScheduleError, LookupError, ValueError, TypeError, AssertionError):
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("plan", "devices"), [*PLANS, ("breadth_first:microbatches=32", 2)])
def test_a_changed_loop_is_refused_with_rounds_left_out_as_with_all(
    plan: SProgram | str, devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, verdicts = compiled(plan, devices), [0, 0]
    for seed in range(400):
        draw = random.Random(seed)
        device = draw.choice(program.devices)
        runs = list(device.instructions.runs)
        at = draw.choice([n for n, run in enumerate(runs) if isinstance(run, Loop)])
        try:
            runs[at] = mutated(runs[at], draw)
            list(runs[at])
        except ValueError:
            # No loop has these repetitions.
            continue
        code = Rolled(tuple(runs))
        changed = program.changed(
            lambda d, rank=device.rank, code=code: replace(d, instructions=code) if d.rank == rank else d
        )
        one, other = (is_certified(changed, kind, monkeypatch) for kind in (Rounds, Interpreter))
        assert one == other, (seed, plan)
        verdicts[one] += 1
    assert min(verdicts) > 0
