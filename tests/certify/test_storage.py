"""Values that lie in the memory of others: what changes that memory makes them stale, and no stale value is read.

Nothing but copies goes between a device and its host.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.certify.certificate import check_program
from superscaler.errors import ScheduleError
from superscaler.ir import program as p
from superscaler.plans import resolve
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, exact
from tests.helpers.rewrites import offloaded, swapped

Code = list[p.Instruction]


def product(m: Around, x: Tensor) -> Tensor:
    """A product whose backward reads a view of the weight of another one."""
    return m.e(m.a(x).tanh()).square().sum() + (m.b(x).tanh() @ m.e.weight.detach()).square().sum()


def viewed(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Let the product with the view be a segment of its own, and the update of the weight one by itself."""
    resolve("data_parallel")(graph, cluster)
    (product,) = [op for op in graph.forward_ops if "matmul" in op.target]
    ss.op_order(graph, graph.select(ops=[product], kind="B"), graph.op("update.e.weight"))
    ss.op_order(graph, graph.op("update.e.weight"), graph.select(module="b", kind="B"))


@cache
def program(world: int, plan: str = "") -> p.Program:
    layers = {name: nn.Linear(4, 4, bias=False) for name in "abe"}
    graph = captured(lambda: (Around(product, **layers), torch.randn(4, 4)))
    return ss.compile(graph, plan or viewed, f"local:{world}").compiled.program


def at(code: Code, of: type) -> int:
    return next(n for n, i in enumerate(code) if isinstance(i, of))


def updated_before_the_backward(code: Code) -> None:
    """The update comes right behind its gradient, and the backward that reads the view later."""
    update = at(code, p.Update)
    maker = next(n for n, i in enumerate(code) if isinstance(i, p.Backward) and code[update].gradients[0] in i.outputs)  # type: ignore[union-attr]
    moved = [code[maker], code.pop(update)]
    del code[maker]
    first = at(code, p.Backward) + 1
    code[first:first] = moved


def updated_before_the_forward(code: Code) -> None:
    """The forward that reads the view runs once more, behind the update."""
    update = at(code, p.Update)
    view = next(n for n, i in enumerate(code) if isinstance(i, p.Forward) and "detach" in map(str, i.outputs))
    reader = next(i for i in code if isinstance(i, p.Forward) and code[view].outputs[0] in i.inputs)  # type: ignore[union-attr]
    outs = tuple(out._replace(number=9) for out in reader.outputs)
    code.insert(update + 1, replace(reader, task=reader.task._replace(part=7), outputs=outs))


def waited_for_twice(code: Code) -> None:
    """What came has two names."""
    wait = at(code, p.Wait)
    code.insert(wait + 1, replace(code[wait], out=code[wait].out._replace(number=9)))  # type: ignore[call-arg, union-attr]


def added_to_a_collective_over_one_device(code: Code) -> None:
    start = at(code, p.Collective)
    code[start] = replace(code[start], group=(0,))  # type: ignore[call-arg]
    wait = at(code, p.Wait)
    out: p.Value = code[wait].out  # type: ignore[union-attr]
    code.insert(wait + 1, p.Accumulate(out, out, out, True))


MUTANTS: list[tuple[Callable[[Code], None], int, str]] = [
    (updated_before_the_backward, 1, r"Backward s\d+ needs detach .* Update of e_weight, \w+ has changed its memory"),
    (updated_before_the_forward, 1, r"Forward s\d+_p7 \(matmul..\w+\) reads detach, whose memory Update of e_weight"),
    (waited_for_twice, 2, r"Wait of d_\w+__9 waits for d_\w+_work, which is waited for already"),
    (added_to_a_collective_over_one_device, 2, r"changes \w+ in place, which Backward s\d+ holds"),
]


def test_a_weight_that_a_collective_still_reads_is_not_updated() -> None:
    made = program(2, "zero:stage=1")
    devices = list(made.devices)
    code = [i for i in devices[0].instructions if not isinstance(i, p.Free)]
    start = code[at(code, p.Collective)]
    assert isinstance(start, p.Collective)
    assert start.kind == "all_gather"
    # The slice is gathered once more, and nothing waits for that.
    works = tuple(work and work._replace(number=9) for work in start.works)
    code.insert(at(code, p.Update), replace(start, works=works))
    devices[0] = replace(devices[0], instructions=tuple(code))
    with pytest.raises(ScheduleError, match=r"changes memory that all_gather .* may still read"):
        check_program(replace(made, devices=tuple(devices)))


@pytest.mark.parametrize(("change", "world", "told"), MUTANTS)
def test_what_changes_a_memory_that_is_read_later_is_refused(
    change: Callable[[Code], None], world: int, told: str
) -> None:
    made = program(world)
    check_program(made)
    devices = list(made.devices)
    code = [i for i in devices[0].instructions if not isinstance(i, p.Free)]
    change(code)
    devices[0] = replace(devices[0], instructions=tuple(code))
    with pytest.raises(ScheduleError, match=told):
        check_program(replace(made, devices=tuple(devices)))


def turned(device: p.Device) -> p.Device:
    code = list(device.instructions)
    n = at(code, p.Copy)
    code[n] = replace(code[n], to_host=not code[n].to_host)  # type: ignore[call-arg, union-attr]
    return replace(device, instructions=tuple(code))


def left_out(device: p.Device) -> p.Device:
    """What is brought to the device is read where it is."""
    copy = next(i for i in device.instructions if isinstance(i, p.Copy) and not i.to_host)
    wait = next(n for n, i in enumerate(device.instructions) if isinstance(i, p.Wait) and i.work == copy.work)
    out = device.instructions[wait].out  # type: ignore[union-attr]
    code = list(device.instructions)
    for n, i in enumerate(code):
        if hasattr(i, "inputs") and out in i.inputs:
            code[n] = replace(i, inputs=tuple(copy.source if v == out else v for v in i.inputs))  # type: ignore[call-arg]
    return replace(device, instructions=tuple(code))


def brought(device: p.Device) -> p.Device:
    return replace(device, weights=tuple(replace(w, host=False) for w in device.weights))


@pytest.mark.parametrize(("change", "told"), [(turned, "Copy of"), (left_out, "Forward s"), (brought, "Copy of")])
def test_a_value_in_the_wrong_memory_is_named(change: Callable[[p.Device], p.Device], told: str) -> None:
    program = exact(graph_of("gpt2:size=tiny", "SGD"), offloaded(swapped("single")), 1).program
    (device,) = program.devices
    check_program(program)
    assert all(w.host for w in device.weights if w.trained)
    wrong = p.Program(program.model, program.functions, (change(device),), program.notes)
    with pytest.raises(ScheduleError, match=f"{told}.* reads a value from the wrong memory"):
        check_program(wrong)


def sums_of(code: Code, n: int) -> tuple[int, list[p.Value]]:
    """Return where the n-th backward is, and the sums that it adds to."""
    at, run = [(at, i) for at, i in enumerate(code) if isinstance(i, p.Backward)][n]
    return at, [total for total in run.sums if total is not None]


def read_before_it_is_whole(code: Code) -> None:
    n, (total, *_) = sums_of(code, 1)
    code.insert(n, p.Accumulate(total._replace(number=9), total, total, False))


def freed_before_it_is_whole(code: Code) -> None:
    n, (total, *_) = sums_of(code, 1)
    code.insert(n, p.Free((total,)))


def with_sums(turn: Callable[[list[p.Value]], list[p.Value | None]]) -> Callable[[Code], None]:
    def change(code: Code) -> None:
        n, sums = sums_of(code, 1)
        code[n] = replace(code[n], sums=tuple(turn(sums)))  # type: ignore[call-arg]

    return change


SUMS: list[tuple[Callable[[Code], None], str]] = [
    (read_before_it_is_whole, r"changes d_\w+ in place, which Accumulate of \w+__9 holds"),
    (freed_before_it_is_whole, r"adds to d_\w+, which is freed"),
    (with_sums(lambda sums: [None, *sums[1:]]), "but the gradient of .* lacks the addends of its use"),
    (with_sums(lambda sums: sums[::-1]), r"adds the gradient of \S+ \(float32\) to the gradient of"),
    (with_sums(lambda sums: [sums[0], *sums[:-1]]), "gives several gradients one name"),
    (with_sums(lambda sums: sums[:-1]), r"makes \d gradients of \d aliases"),
]


@pytest.mark.parametrize(("change", "said"), SUMS)
def test_sums_of_gradients_have_each_addend_once(change: Callable[[Code], None], said: str) -> None:
    made = program(1, "gradient_accumulation:microbatches=2")
    check_program(made)
    code = [i for i in made.devices[0].instructions if not isinstance(i, p.Free)]
    change(code)
    with pytest.raises(ScheduleError, match=said):
        check_program(replace(made, devices=(replace(made.devices[0], instructions=tuple(code)),)))
