"""Plans that keep activations, weights and the optimizer's state in the memory of the hosts: equal, in less memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import superscaler as ss
from superscaler.errors import PlanError, ScheduleError
from superscaler.ir.communication import bytes_moved
from superscaler.ir.program import Copy, Value, ended
from superscaler.plans import resolve
from superscaler.runtime.saved_tensors import Copies
from superscaler.runtime.step import Step
from superscaler.verify.plan_dir import validate_directory
from tests.helpers.graphs import graph_of
from tests.helpers.live import Live
from tests.helpers.ran import SProgram, equal, exact, on_ranks, trained
from tests.helpers.rewrites import offloaded, on_top, recomputed, sharded, swapped
from tests.helpers.sweeps import few
from tests.integration.test_recompute import normed, stack

PLANS = [("single", 1), ("data_parallel", 2), ("pipeline_1f1b:microbatches=2", 2)]
MODELS = ["gpt2:size=tiny", "llama:size=tiny", "mbart:size=tiny", "alphafold2:size=tiny,layers=1,passes=2", "normed"]


@pytest.mark.parametrize("spec", few(MODELS, 0))
def test_hosts_change_no_number(spec: str) -> None:
    graph = normed() if spec == "normed" else graph_of(spec, "SGD")
    for plan, world in PLANS if spec == "normed" else PLANS[1:]:
        # The norms are of the whole batch.
        given = plan.replace("microbatches=2", "microbatches=1") if spec == "normed" else plan
        found = equal(graph, offloaded(swapped(given)), world).program
        # What goes between devices anyway goes once.
        assert bytes_moved(found) == bytes_moved(exact(graph, recomputed(given), world).program)
        weights = [w for rank in range(world) for w in found.weights(rank)]
        assert all(w.host == (w.trained or "running" in w.tensor or "num_batches" in w.tensor) for w in weights)


def crossed(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Copies and weights on the hosts of other devices than those that make and read them."""
    resolve("data_parallel")(graph, cluster)
    for block in graph.blocks:
        again = ss.op_trans(graph, graph.select(module=block.path), ss.Recompute())
        for copy in ss.op_trans(graph, again, ss.Insert()):
            ss.op_assign(graph, ss.op_trans(graph, copy, ss.Split("batch", 2)), cluster.hosts[::-1])
    for number, op in enumerate(op for op in graph.ops if op.kind == "optimizer"):
        if number % 3:
            ss.op_assign(graph, op, cluster.hosts[number % 2])


def beside(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Copies on another device, of one tensor that is given by name."""
    resolve("single")(graph, cluster)
    again = [p for block in graph.blocks for p in ss.op_trans(graph, graph.select(module=block.path), ss.Recompute())]
    (copy,) = ss.op_trans(graph, again, ss.Insert("add_7"))
    ss.op_assign(graph, copy, 1)


def early(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Weights of the last block are updated on the hosts before the backward of the first block."""
    offloaded(swapped("data_parallel"))(graph, cluster)
    first, last = graph.blocks
    own = {operand.tensor for op in last.ops for operand in op.inputs}
    updates = [op for op in graph.ops if op.kind == "optimizer" and op.inputs[0].tensor in own]
    ss.op_order(graph, updates, graph.select(module=first.path, kind="B"))


LAYOUTS = [(offloaded(swapped("tensor_parallel")), 2), (offloaded(sharded), 2), (swapped(sharded), 4), (crossed, 2),
           (beside, 2), (early, 2), (swapped("hybrid:dp=2,tp=2,pp=2,microbatches=2"), 8)]  # fmt: skip


@pytest.mark.parametrize(("plan", "world"), few(LAYOUTS, 4))
def test_hosts_of_other_layouts_change_no_number(plan: SProgram, world: int) -> None:
    equal(graph_of("gpt2:size=tiny", "SGD"), plan, world)


def test_two_steps_train_as_without_hosts() -> None:
    """Clipped, too: the norm is of gradients on all hosts."""
    graph = graph_of("gpt2:size=tiny", "SGD")
    ((losses, weights),) = trained(exact(graph, "single", 1), 2, clip=0.5)
    for name, world in PLANS[1:]:
        for found, others in trained(exact(graph, offloaded(swapped(name)), world), 2, clip=0.5):
            assert found == pytest.approx(losses, rel=1e-12)
            alike = [n for n in others if n in weights and weights[n].shape == others[n].shape]
            assert alike
            assert all(torch.allclose(others[n], weights[n], rtol=1e-9, atol=1e-12) for n in alike)


def peaks(plan: SProgram, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return the most bytes that a step makes at once on the device, and how many it copies to the host."""
    start, copied = Copies.start, list[int]()

    def run(step: Step) -> int:
        with Live() as live:

            def start_outside(copies: Copies, x: Tensor, to_host: bool) -> Any:
                if not to_host:
                    return start(copies, x, to_host)
                with _disable_current_modes():
                    later = start(copies, x, to_host)
                storage = later.wait().untyped_storage()
                live.known.add(storage)
                copied.append(storage.nbytes())
                return later

            monkeypatch.setattr(Copies, "start", start_outside)
            step(stack().captured.batch)
        return live.peak

    (peak,) = on_ranks(ss.compile(stack(), plan, "local:1"), run)
    return peak, sum(copied)


def test_swapped_activations_leave_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    (again, none), (swap, copied) = (peaks(plan("single"), monkeypatch) for plan in (recomputed, swapped))
    boundary = 4 * 4096 * 16
    assert none == 0
    # All inputs of blocks; then three of them are back at once at the most, of eight.
    assert copied == 8 * boundary
    assert again - swap >= 4 * boundary


def test_copies_come_back_late() -> None:
    program = exact(stack(), swapped("single"), 1).program
    (device,) = program.devices
    alive, most, hosted = set[Value](), 0, 0
    for i in device.instructions:
        hosted += isinstance(i, Copy) and i.to_host
        if isinstance(i, Copy) and not i.to_host:
            alive.add(i.work)
        alive.difference_update(ended(i))
        most = max(most, len(alive))
    assert hosted == 8
    assert most == 1


def test_a_saved_plan_knows_its_hosts(tmp_path: Path) -> None:
    plan = ss.compile(graph_of("gpt2:size=tiny", "SGD"), offloaded(swapped("single")), "local:1")
    plan.save(tmp_path / "plan", evaluation=False)
    assert validate_directory(tmp_path / "plan")["conservation"]
    assert "on the host" not in plan.summary()
    assert "to_device" in plan.summary()
    assert "whole on hosts of 0" in plan.explain()
    (device,) = plan.compiled.program.devices
    sent = [i for i in device.instructions if isinstance(i, Copy) and i.to_host]
    totals = re.findall(r"(\d+) to_host of ([\d.]+) KB, 0 B on links", plan.explain())
    assert sum(int(count) for count, _ in totals) == len(sent) > 0
    assert sum(float(size) for _, size in totals) == pytest.approx(sum(i.bytes for i in sent) / 1e3, abs=0.2)
    text = (tmp_path / "plan" / "program.txt").read_text()
    (tmp_path / "plan" / "program.txt").write_text(text.replace("to_host=True", "to_host=False", 1))
    with pytest.raises(ScheduleError, match=r"Copy of .* reads a value from the wrong memory"):
        validate_directory(tmp_path / "plan", manifest=False)


HOSTS = ss.Cluster.local(8).hosts
REFUSED: list[tuple[Callable[[ss.Graph], object], str]] = [
    (lambda g: ss.op_assign(g, g.forward_ops[3], HOSTS[0]),
     r"op_assign at .*py:\d+: layer_norm is assigned to the host of device 0, but only copies \(Insert\) and updates"),
    (lambda g: ss.op_assign(g, g.forward_ops[3], "host"), "but only copies"),
    (lambda g: ss.op_assign(g, g.forward_ops[3], "hosts"), "needs devices of the cluster or 'host', not 'hosts'"),
    (lambda g: ss.op_assign(g, g.parts(g.forward_ops[3])[0], "host"), "to whole ops, not to 1 of the 2 parts of"),
    (lambda g: ss.op_assign(g, g.ops[-1], HOSTS[5]), "to device 5, but local:2 has"),
    (lambda g: ss.op_trans(g, g.forward_ops[:5], ss.Insert("input_ids")),
     "Insert needs ops that read the activation or the weight 'input_ids'; none of these do. Inputs are everywhere"),
]  # fmt: skip


@pytest.mark.parametrize(("rewrite", "told"), REFUSED)
def test_careless_use_is_told_in_one_line(rewrite: Callable[[ss.Graph], object], told: str) -> None:
    with pytest.raises(PlanError, match=told) as error:
        ss.compile(graph_of("gpt2:size=tiny", "SGD"), on_top("data_parallel", rewrite), "local:2")
    assert "\n" not in str(error.value)
