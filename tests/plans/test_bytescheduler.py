"""ByteScheduler: the numbers of data parallelism, with sums of gradients in the order of the next forward, under it."""

from __future__ import annotations

from typing import Any

import pytest

import superscaler as ss
from superscaler.errors import InputError
from superscaler.ir.program import Backward, Collective, Forward, Update, Value, Wait
from superscaler.plans import resolve
from tests.helpers.graphs import graph_of
from tests.helpers.rewrites import unrolled

GPT = "gpt2:size=tiny"
# Layers of more than a piece, each with a backward of its own.
LAYERS = "mlp:layers=6,hidden=1300,inputs=1300"
PIECE = 4 * 2**20


def test_the_next_forward_runs_while_gradients_of_later_layers_are_summed() -> None:
    ahead = ":ahead=0"
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


def seconds(plan: ss.Plan, link: float) -> tuple[float, list[int]]:
    """Return the time of a step, a backward being 1, if a link carries one sum of gradients at a time, all of an
    iteration in `link`; and the bytes of each sum.
    """
    program, graph = plan.compiled.program, plan.compiled.graph
    weight = sum(t.nbytes for t in graph.model.parameters())
    flops = sum(op.flops for op in graph.forward_ops) / graph.model.iterations
    now = free = 0.0
    share, there, sent = dict[Any, float](), dict[Value | None, float](), list[int]()
    for i in program.devices[0].instructions:
        if isinstance(i, Forward):
            share[i.task] = sum(op.flops for op in program.functions[i.function].ops) / flops
            now += share[i.task] / 2
        elif isinstance(i, Backward):
            now += share[i.task]
        elif isinstance(i, Collective) and any(w and w.is_gradient for w in i.works):
            free = max(now, free) + link * i.bytes / weight
            there |= dict.fromkeys(i.works, free)
            sent.append(i.bytes)
        elif isinstance(i, Wait):
            now = max(now, there.get(i.work, 0.0))
    return now, sent


def test_large_gradients_are_summed_in_pieces_and_small_ones_together() -> None:
    graph = graph_of(LAYERS)
    plain, both = (ss.compile(graph, plan, "local:2") for plan in (unrolled("data_parallel"), "bytescheduler"))
    assert max(seconds(plain, 1.0)[1]) > 6 * 2**20
    sent = seconds(both, 1.0)[1]
    first = [size for n, size in enumerate(sent) if sum(sent[:n]) < sum(sent) / 2]
    assert sum(first) == sum(sent) / 2 == sum(seconds(plain, 1.0)[1]) / 2
    # The weight of a layer in two, its bias; weight and bias of the head.
    assert len(first) == 6 * 3 + 1
    assert max(first) <= PIECE


def test_a_slow_link_is_waited_for_less() -> None:
    """One that carries all gradients in twice the time of a backward: half of them, by default, while that runs."""
    graph, plans = graph_of(LAYERS), (unrolled("data_parallel"), "bytescheduler:ahead=0", "bytescheduler")
    plain, last, both = (seconds(ss.compile(graph, plan, "local:2"), 2.0)[0] for plan in plans)
    assert both < 0.87 * last < 0.87 * plain


@pytest.mark.slow
def test_pieces_are_verified_where_weights_have_fewer_elements() -> None:
    plan = ss.compile(graph_of("mlp"), "bytescheduler:piece=8", "local:2")
    assert max(plan.compiled.graph.policy.pieces.values()) > 512
    assert plan.verify(shapes="small")["equal"]


@pytest.mark.parametrize("options", ["ahead=-1", "ahead=nan", "piece=0"])
def test_what_is_no_share_or_piece_is_told(options: str) -> None:
    with pytest.raises(InputError, match=rf"bytescheduler:{options}.* must be .*(0|1 byte) or more"):
        ss.compile(graph_of(GPT), resolve(f"bytescheduler:{options}"), "local:2")


def test_pieces_that_there_are_not_are_told() -> None:
    graph = graph_of(GPT).copy()
    update = graph.updates["transformer.wte.weight"]
    with pytest.raises(InputError, match="has no piece 1 of 1; call send_in_pieces first"):
        graph.select(ops=[update], microbatch=1, kind="C")
    with pytest.raises(InputError, match=r"test_bytescheduler.py:\d+: update.transformer.wte.weight in 0 pieces"):
        graph.send_in_pieces(update, 0)
