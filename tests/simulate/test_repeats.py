"""Loops are run until they repeat: memory and kernels are those of the code written out."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache

import numpy as np
import pytest

import superscaler as ss
from superscaler.ir.loops import Loop, Rolled, runs_of
from superscaler.ir.program import Forward, Program
from superscaler.plans import resolve
from superscaler.simulate.kernels import Segments, Works
from superscaler.simulate.liveness import Liveness
from superscaler.simulate.memory import memories
from superscaler.simulate.repeats.steady import laps_of
from tests.helpers.sweeps import few
from tests.simulate.by_hand import chain

# The number of microbatches is enough for loops of several repetitions.
PLANS = {
    "pipeline_1f1b:microbatches=40": 4,
    "interleaved:microbatches=40,chunks=2": 4,
    "zb_h1:microbatches=40": 4,
    "hybrid:tp=2,pp=2,microbatches=40,recompute=full": 4,
}


@cache
def program_of(spec: str) -> Program:
    return ss.compile(chain(8, 40), resolve(spec), ss.Cluster.local(PLANS[spec])).compiled.program


@pytest.mark.parametrize("spec", few(PLANS, 0, 1))
def test_loops_that_repeat_are_cut_short_and_nothing_changes(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[int]()
    step = Liveness.step
    monkeypatch.setattr(Liveness, "step", lambda run, at, i: steps.append(at) or step(run, at, i))  # type: ignore[func-returns-value]
    program = program_of(spec)
    rolled = [device for device, _ in program.distinct]
    assert any(len(runs_of(device.instructions)) > 1 for device in rolled)
    found, ran = memories(program, largest=1000), len(steps)
    assert ran < sum(len(device.instructions) for device in rolled)
    devices = [replace(device, instructions=tuple(device.instructions)) for device in program.devices]
    written = replace(program, devices=tuple(devices))
    of = {memory.rank: memory for memory in memories(written, largest=1000)}
    assert len(steps) - ran == sum(len(devices[memory.rank].instructions) for memory in of.values())
    for memory in found:
        # Written out, more devices may be of one program.
        for name in (field.name for field in fields(memory) if field.name != "count"):
            one, two = getattr(memory, name), getattr(of[memory.rank], name)
            assert np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two, name
    for device in rolled:
        assert Works(program).of(device) == Works(written).of(devices[device.rank])


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("spec", few(PLANS, 0, 2))
def test_after_a_loop_the_memory_is_that_of_all_repetitions(spec: str, is_whole: bool) -> None:
    """The code ends after the last loop. Without `is_whole` nothing is known of the backwards behind it, so that the
    last forwards of the loop keep no tape.
    """
    program = program_of(spec)
    for device, _ in program.distinct:
        runs = list(runs_of(device.instructions))
        while not isinstance(runs[-1], Loop):
            del runs[-1]
        ends = []
        for code in (Rolled(tuple(runs)), tuple(Rolled(tuple(runs)))):
            segments = Segments(program)
            if is_whole:
                segments.tasks(device)
            run = Liveness(program, segments, replace(device, instructions=code), lambda w: 0, lambda sizes: 0)
            run.run()
            alive = sorted((s.born, s.bytes, str(s.name), s.category) for s in run.every if s.died is None)
            ends.append((alive, run.rows, run.during, sorted(run.sizes.items()), sorted(run.tapes)))
        assert ends[0] == ends[1]


def test_a_loop_whose_last_task_is_another_one_does_not_repeat() -> None:
    program = program_of("zb_h1:microbatches=40")
    code = program.devices[1].instructions
    tasks = {i.task: "a segment" for i in code if isinstance(i, Forward)}
    (lap,) = laps_of(code, tasks)
    assert lap.step.microbatches == 1
    loop = next(run for run in runs_of(code) if isinstance(run, Loop))
    last = max(i.task for i in loop if isinstance(i, Forward))
    assert laps_of(code, {**tasks, last: "another segment"}) == []
