"""ByteScheduler: the numbers of data parallelism, with sums of gradients in the order of the next forward, under it."""

from __future__ import annotations

import pytest
import torch

import superscaler as ss
from superscaler.errors import InputError
from superscaler.ir.program import Collective, Forward, Update, Wait
from superscaler.models import build
from superscaler.plans import resolve
from tests.graphs import graph_of
from tests.integration.test_unroll import losses_of, shuffled

GPT = "gpt2:size=tiny,batch=4"


@pytest.mark.parametrize("ahead", ["", ":ahead=0"])
def test_the_next_forward_runs_while_gradients_of_later_layers_are_summed(ahead: str) -> None:
    plan = ss.compile(graph_of(GPT), resolve(f"bytescheduler{ahead}"), "local:2")
    program = plan.compiled.program
    code, second = program.devices[0].instructions, len(program.devices[0].instructions)
    ops = [program.functions[i.function].ops if isinstance(i, Forward) else () for i in code]
    second = next(at for at, own in enumerate(ops) if any(op.iteration and not op.from_data for op in own))
    updates = [at for at, i in enumerate(code) if isinstance(i, Update)]
    backward = next(at for at, own in enumerate(ops) if any("head" in op.module and op.iteration for op in own))
    waits = [at for at, i in enumerate(code) if isinstance(i, Wait) and i.work.is_gradient and at < backward]
    assert updates[0] < second < max(waits) < updates[-1]
    starts = [i for i in code[:second] if isinstance(i, Collective) and any(w and w.is_gradient for w in i.works)]
    assert len(starts) > 2
    first = [str(i.works[0]) for i in starts]
    wte, last = (next(n for n, name in enumerate(first) if word in name) for word in ("wte", "ln_f"))
    assert (wte < last) == (ahead != "")


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_losses_are_those_of_data_parallelism(optimizer: str) -> None:
    graph = graph_of(GPT, optimizer)
    batches = shuffled(graph.captured.batch, 4)
    plain, both = (ss.compile(graph, resolve(plan), "local:2") for plan in ("data_parallel", "bytescheduler"))
    assert losses_of(both, batches) == pytest.approx(losses_of(plain, batches), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model", [GPT, "llama:size=tiny,batch=4"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("momentum", [False, True])
def test_each_update_is_that_of_the_model(model: str, world: int, momentum: bool) -> None:
    built = build(model)
    weights = list(built.module.parameters())
    adam, sgd = torch.optim.AdamW(weights, lr=1e-3), torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    graph = ss.capture(built.module, built.args, built.kwargs, sgd if momentum else adam)
    found = ss.compile(graph, resolve("bytescheduler"), f"local:{world}").verify()
    assert found["equal"], found["first_difference"]


def test_more_layers_than_there_are_cannot_go_ahead() -> None:
    with pytest.raises(InputError, match="bytescheduler:ahead=9 of 5 layers; choose 0 to 5"):
        ss.compile(graph_of(GPT), resolve("bytescheduler:ahead=9"), "local:2")
