"""Updates that run as soon as a plan says: equal, with fewer gradients at once, clipped and scaled alike."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import ScheduleError
from superscaler.ir.communication import check_rendezvous
from superscaler.ir.program import Accumulate, Collective, Free, Send, Update, writes
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, SProgram, captured, equal, trained
from tests.helpers.rewrites import early, on_top
from tests.helpers.sweeps import few

PLANS = ["single", "data_parallel", "tensor_parallel", "pipeline_1f1b:microbatches=2", "hybrid:dp=2,tp=2,pp=1"]


@pytest.mark.parametrize("plan", few(PLANS, 0))
def test_updates_right_after_their_gradients_change_no_number(plan: str) -> None:
    world = {"single": 1, PLANS[-1]: 4}.get(plan, 2)
    for device in equal(graph_of("gpt2:size=tiny,layers=4,batch=16"), early(plan), world).program.devices:
        updates = [i for i in device.instructions if isinstance(i, Update)]
        assert len(updates) > 1 or plan.startswith("pipeline")
        assert [i.is_early for i in updates] == [True] * (len(updates) - 1) + [False]


def test_clipping_takes_the_norm_of_all_gradients() -> None:
    graph = graph_of("gpt2:size=tiny,layers=4,batch=16")
    plans = (ss.compile(graph, plan, "local:2") for plan in (early("data_parallel"), "data_parallel"))
    (losses, weights), (expected, others) = (trained(plan, clip=0.1)[0] for plan in plans)
    assert losses == expected
    assert all(torch.equal(weights[name], others[name]) for name in others)


def in_two(graph: ss.Graph, cluster: ss.Cluster) -> None:
    for op in graph.ops:
        first = op.module == "first" or any(o.tensor.startswith("first") for o in op.inputs)
        ss.op_assign(graph, op, cluster.devices[0 if first else 1])


def updated_first(graph: ss.Graph) -> None:
    head = [op for op in graph.ops if op.kind == "optimizer" and op.inputs[0].tensor.startswith("head")]
    ss.op_order(graph, head, graph.select(module="frozen", kind="B"))


@pytest.fixture(scope="module")
def tower() -> ss.Graph:
    """A head on a frozen layer, whose device sends a gradient on after it has made those of its own weights."""

    def make() -> tuple[nn.Module, torch.Tensor]:
        layers = {name: nn.Linear(4, 4) for name in ("first", "frozen", "head")}
        layers["frozen"].requires_grad_(False)
        return Around(lambda m, x: m.head(m.frozen(m.first(x).tanh()).tanh()).square().mean(), **layers), torch.ones(
            2, 4
        )

    return captured(make)


def test_a_device_clips_after_it_has_sent_what_others_wait_for(tower: ss.Graph) -> None:
    plans = [ss.compile(tower, plan, "local:2") for plan in (on_top(in_two, updated_first), in_two)]
    code = plans[0].compiled.program.devices[1].instructions
    assert [i.is_early for i in code if isinstance(i, Update)] == [True, False]
    # So small that it clips, so that each device needs the gradients of the other.
    for (losses, weights), (expected, others) in zip(*(trained(plan, clip=1e-3) for plan in plans), strict=True):
        assert losses == expected
        assert all(torch.equal(weights[name], others[name]) for name in others)


def test_a_last_update_before_a_message_deadlocks(tower: ss.Graph) -> None:
    program = ss.compile(tower, in_two, "local:2").compiled.program
    first, second = program.devices
    update, send = (next(i for i in second.instructions if isinstance(i, kind)) for kind in (Update, Send))
    code = [j for i in second.instructions if i is not update for j in ([update, send] if i is send else [i])]
    with pytest.raises(
        ScheduleError, match=r"device 0, step 1: waits in recv .*\n.*device 1, step 1: waits in its last"
    ):
        check_rendezvous(replace(program, devices=(first, replace(second, instructions=tuple(code)))))


def accumulated(count: int) -> SProgram:
    """Return ZeRO-2: weights at rest in slices, into which the gradient of each of 4 microbatches is reduced."""

    def sprogram(graph: ss.Graph, cluster: ss.Cluster) -> None:
        world = len(cluster.devices)
        for op in graph.ops:
            own = next((i.factor for i in op.indices if i.size % world == 0), "")
            made = ss.op_trans(graph, op, ss.Microbatch(4) if op.is_forward else ss.Microbatch(count))
            factor = "batch" if op.is_forward else own
            made = ss.op_trans(graph, made, ss.Split(factor, world) if factor else ss.Replicate(world))
            ss.op_assign(graph, made, cluster.devices)
        stage = [graph.select(kind=kind, microbatch=m, ops=graph.forward_ops) for m in range(4) for kind in "FB"]
        for before, after in itertools.pairwise(stage):
            ss.op_order(graph, before, after)

    return sprogram


def test_the_gradient_of_each_microbatch_is_reduced_into_its_slice() -> None:
    graph = graph_of("gpt2:size=tiny")
    code = equal(graph, accumulated(4)).code()
    reduced = sum(len(i.works) for i in code if isinstance(i, Collective) and i.kind == "reduce_scatter")
    assert reduced == 4 * sum(not op.is_forward for op in graph.ops)
    added = [i for i in code if isinstance(i, Accumulate) and i.out.is_gradient]
    assert len(added) >= reduced / 4
    # What is whole of a gradient is sent away before the next microbatch makes it again.
    whole = {str(n) for i in code if isinstance(i, Collective) and i.kind == "reduce_scatter" for n in i.sources}
    alive = most = 0
    for i in code:
        alive += sum(str(name) in whole for name in writes(i))
        most = max(most, alive)
        alive -= sum(str(name) in whole for name in i.names) if isinstance(i, Free) else 0
    assert most <= sum(not op.is_forward for op in graph.ops)


def test_microbatches_of_an_update_are_those_of_its_gradient() -> None:
    with pytest.raises(ScheduleError, match=r"Microbatch\(2\) of the update of .*, but its gradient comes in 4 micro"):
        ss.compile(graph_of("gpt2:size=tiny"), accumulated(2), "local:2")


@pytest.mark.parametrize("plan", ["zero:stage=2,microbatches=2", "fsdp:recompute=true,microbatches=4"])
def test_a_penalty_on_weights_is_added_once_beside_the_microbatches(plan: str) -> None:
    def loss(module: Any, x: Tensor) -> Tensor:
        return module.layer(x).square().mean() + 0.1 * module.layer.weight.square().sum()

    equal(captured(lambda: (Around(loss, layer=nn.Linear(4, 6)), torch.randn(8, 4))), plan)


def test_an_update_before_what_reads_its_weight_is_refused() -> None:
    def before(graph: ss.Graph) -> None:
        ss.op_order(graph, graph.op("update.transformer.h.0.ln_1.weight"), graph.select(module="transformer.h.0"))

    with pytest.raises(ScheduleError, match=r"F of .* needs U of transformer.h.0.ln_1.weight"):
        ss.compile(graph_of("gpt2:size=tiny"), on_top("single", before), "local:1")
