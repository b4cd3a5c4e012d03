"""Tapes that are on the host between the forward and the backward of a microbatch (PipeOffload)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import ScheduleError
from superscaler.ir.loops import Rolled
from superscaler.ir.program import Device, Fetch, Instruction, Offload
from superscaler.ir.text.model import parse_model, print_model
from superscaler.ir.text.program import parse_program, print_program
from superscaler.runtime.saved_tensors import Copies, MovedTape, kept_by
from superscaler.runtime.split_backward import nodes_from
from superscaler.simulate.memory import memories
from superscaler.simulate.predict import simulate
from tests.helpers.counted import counted
from tests.helpers.graphs import assert_equal, graph_of
from tests.helpers.ran import trained
from tests.helpers.sweeps import slow

GPT2, MLP = "gpt2:size=tiny,layers=4,seq=128", "mlp:batch=32"


@cache
def kept(spec: str, tapes: int, microbatches: int) -> ss.Plan:
    plan = f"pipeline_1f1b:microbatches={microbatches},offload={tapes}"
    return ss.compile(graph_of(spec), plan, "local:4")


def test_a_device_keeps_two_tapes_and_the_tensor_that_is_copied() -> None:
    """Stage s of 4 keeps min(4 - s, 2) M, where 1F1B keeps (4 - s) M; the storages that exist are counted. What is
    copied costs no time.
    """
    plans = [kept(GPT2, tapes, 8) for tapes in (0, 2)]
    (plain, *others), (moved, *rest) = (memories(plan.compiled.program) for plan in plans)
    tape = plain.parts["activations"] // 4
    assert (plain.parts["activations"], moved.parts["activations"], moved.on_host) == (4 * tape, 2 * tape, 3 * tape)
    assert plain.peak - moved.peak == 2 * tape - moved.parts["communication"] > 1.7 * tape
    assert [counted(plan, 0) for plan in plans] == [plain.peak, moved.peak]
    assert others[0].parts["activations"] / 3 == rest[0].parts["activations"] / 2
    assert [m.peak for m in others[1:]] == [m.peak for m in rest[1:]]
    tables = [simulate(plan.compiled.program, ss.Cluster.parse("v100:1x4")).table for plan in plans]
    assert {"to_host", "to_device"} <= {*tables[1].lanes[0].streams}
    assert tables[1].seconds == pytest.approx(tables[0].seconds)


def test_bits_are_those_without_offload_and_the_code_has_a_loop() -> None:
    program = kept(MLP, 2, 32).compiled.program
    assert isinstance(program.devices[0].instructions, Rolled)
    check_program(program)
    again = parse_program(print_program(program), parse_model(print_model(program.model)))
    assert tuple(again.devices) == tuple(program.devices)
    both = (trained(kept(MLP, tapes, 32), 2) for tapes in (2, 0))
    for (losses, weights), (others, expected) in zip(*both, strict=True):
        assert losses == others
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_backward_whose_tape_is_on_the_host_is_refused() -> None:
    def without(kind: type[Instruction]) -> None:
        def change(device: Device) -> Device:
            code = list(device.instructions)
            drop = next((n for n, i in enumerate(code) if type(i) is kind), len(code))
            return replace(device, instructions=tuple(code[:drop] + code[drop + 1 :]))

        check_program(kept(MLP, 2, 32).compiled.program.changed(change))

    with pytest.raises(ScheduleError, match="needs a tape that is on the host; Fetch it before"):
        without(Fetch)
    with pytest.raises(ScheduleError, match=r"Fetch.* has no tape of a forward on the host to copy"):
        without(Offload)


def test_a_tape_goes_to_the_host_again_before_its_backward() -> None:
    """What stayed the first time, because it was alive, goes the second time; the rest goes again."""
    x, y = (torch.rand(3, 3, requires_grad=True) for _ in range(2))
    alive = y.exp()
    z = (x.exp() * alive).sin()
    expected = torch.autograd.grad(z, (x, y), torch.ones_like(z), retain_graph=True)
    kept = [kept for _, kept in kept_by(nodes_from([z.grad_fn]))]
    tape, copies = MovedTape(kept), Copies(torch.device("cpu"))
    for stays in ((alive,), ()):
        tape.offload(copies, stays)
        tape.fetch(copies)
    tape.arrive()
    assert all(map(torch.equal, torch.autograd.grad(z, (x, y), torch.ones_like(z)), expected))


@pytest.mark.parametrize(
    ("plan", "devices"),
    slow(
        ("pipeline_1f1b:2,microbatches=8,offload=1 x tensor_parallel:2", 4),
        ("pipeline_1f1b:2,microbatches=4,offload=1 x sequence_parallel:2,regather=true", 4),
        ("pipeline_1f1b:2,microbatches=4,offload=1 x zero:2,stage=1", 4),
        ("pipeline_1f1b:microbatches=8,offload=1,recompute=late", 3),
        ("zb_h1:microbatches=8,offload=1", 3),
        ("interleaved:microbatches=8,offload=2", 2),
        ("seq1f1b:microbatches=4,offload=2", 2),
    ),
)
def test_other_schedules_are_equal(plan: str, devices: int) -> None:
    assert_equal(graph_of(GPT2), plan, devices)
