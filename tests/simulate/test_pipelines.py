"""The idle time of each schedule on the clock is the one that its authors give, where messages take no time."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import superscaler as ss
from superscaler.cluster.links import Link, Links
from superscaler.ir.cohorts import Cohort
from superscaler.ir.program import Backward, Forward, Program
from superscaler.plans import resolve
from superscaler.plans.lib import schedules
from superscaler.plans.lib.place_table import place_table
from superscaler.simulate.clock import Behavior, Work, clock
from superscaler.simulate.timetable import Timetable
from tests.helpers.ran import Around, captured
from tests.helpers.sweeps import slow
from tests.simulate.by_hand import chain, in_turn, linear

_NONE = Link(0.0, math.inf)


def free(devices: int) -> ss.Cluster:
    """Return a cluster on which bytes move in no time."""
    return ss.Cluster.of("free", "a100", 1, devices, Links(_NONE, _NONE, _NONE, _NONE, None, _NONE))


def work_of(program: Program, **seconds: float) -> Work:
    """Return the seconds of stages: a forward takes those of F, a backward those of B, or its halves of I and W."""
    halves = {"": "B", "input": "I", "weight": "W"}
    is_layer = [any("linear" in op.target for op in function.ops) for function in program.functions]

    def work(cohort: Cohort, at: int) -> float:
        i = cohort.code[at]
        if isinstance(i, Forward):
            return seconds["F"] * is_layer[i.function]
        return seconds[halves[i.half]] if isinstance(i, Backward) else 0.0

    return work


def timed(graph: ss.Graph, plan: Callable[..., None] | str, devices: int, **seconds: float) -> Timetable:
    given = resolve(plan) if isinstance(plan, str) else plan
    program = ss.compile(graph, given, ss.Cluster.local(devices)).compiled.program
    return clock(program, free(devices), work_of(program, **{"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0, **seconds}))


def idle_of(found: Timetable, busy: float) -> float:
    """Return the idle time of all devices, each of which is as busy."""
    assert found.compute.tolist() == [busy] * len(found.compute)
    assert (found.exposed == 0).all()
    idle = found.seconds - busy
    assert found.bubble.tolist() == [idle] * len(found.bubble)
    assert sum(link.seconds for link in found.path) == found.seconds
    return idle


# Stages on each device, and its idle time for p devices and m microbatches: facts of the papers, with B = 2 F, and
# I = W = F. A stage of a device with two takes half the time.
IDLE = {
    "gpipe": (1, lambda p, m: 3 * (p - 1)),
    "pipeline_1f1b": (1, lambda p, m: 3 * (p - 1)),
    "interleaved": (2, lambda p, m: 3 * (p - 1) / 2),
    "breadth_first": (2, lambda p, m: 3 * (p - 1) / 2),
    "zb_h1": (1, lambda p, m: p - 1),
    "zb_h2": (1, lambda p, m: p - 1),
    "zbv": (2, lambda p, m: (p - 1) / 2),
    "dualpipe_v": (2, lambda p, m: (p - 1) / 2),
    "chimera": (1, lambda p, m: (3 * m + 2 * (p - 2)) * (p - 2) / (1.5 * m + p - 2)),
}


@pytest.mark.parametrize("name", IDLE)
@pytest.mark.parametrize(("p", "m"), [(4, 8), *slow((4, 16), (8, 16))])
def test_devices_idle_as_long_as_the_schedule_says(name: str, p: int, m: int) -> None:
    stages, idle = IDLE[name]
    seconds = {kind: (2 if kind == "B" else 1) / stages for kind in "FBIW"}
    found = timed(chain(stages * p, m), f"{name}:microbatches={m}", p, **seconds)
    assert idle_of(found, 3 * m) == idle(p, m)


@pytest.mark.parametrize(("p", "m"), [(4, 8), *slow((8, 16))])
def test_halves_of_other_lengths(p: int, m: int) -> None:
    """Qi et al., 2023: (p - 1)(F + I - W); GPipe and 1F1B: (p - 1)(F + B)."""
    seconds = {"F": 3.0, "B": 6.0, "I": 4.0, "W": 2.0}
    assert idle_of(timed(chain(p, m), f"zb_h1:microbatches={m}", p, **seconds), 9 * m) == (p - 1) * (3 + 4 - 2)
    assert idle_of(timed(chain(p, m), f"gpipe:microbatches={m}", p, **seconds), 9 * m) == (p - 1) * 9
    assert idle_of(timed(chain(p, m), f"pipeline_1f1b:microbatches={m}", p, **seconds), 9 * m) == (p - 1) * 9


def causal(m: Around, x: Tensor) -> Tensor:
    for number, layer in enumerate(m.layers):
        x = layer(F.scaled_dot_product_attention(x, x, x, is_causal=True) if number else x)
    return x.sum()


def test_slices_divide_the_bubble() -> None:
    """Li et al., 2021; Sun et al., 2024. Times are those of a slice."""
    rule, p, m, k = schedules.terapipe, 4, 2, 4
    graph = captured(lambda: (Around(causal, layers=linear(p)), torch.randn(m, k, 2)))

    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        firsts = [n for n, op in enumerate(graph.forward_ops) if "attention" in op.target]
        parts = [list(graph.forward_ops[a:b]) for a, b in pairwise([0, *firsts, len(graph.forward_ops)])]
        place_table(graph, "pp", rule(p, m, k), parts, k)
        ss.op_assign(graph, graph.forward_ops, cluster.mesh(pp=p))

    assert idle_of(timed(graph, plan, p), 3 * m * k) == 3 * (p - 1)


def three_times(m: Around, x: Tensor) -> Tensor:
    with torch.no_grad():
        for _ in range(2):
            for layer in m.layers:
                x = layer(x)
    return in_turn(m, x)


def test_three_forwards_and_one_backward() -> None:
    """No order idles less than (p - 1)(F + B)."""
    p, m = 4, 8
    graph = captured(lambda: (Around(three_times, layers=linear(p)), torch.randn(m, 2)))
    assert idle_of(timed(graph, f"three_f_one_b:microbatches={m}", p), 5 * m) == 3 * (p - 1)


def test_one_stream_for_all_messages_holds_back_those_behind_an_early_receive() -> None:
    """As `batch_isend_irecv` of NCCL does (pytorch/pytorch issue 175225). With a stream for each peer and direction,
    the same program is as fast as its schedule.
    """
    p, m = 4, 8
    program = ss.compile(chain(p, m), resolve(f"pipeline_1f1b:microbatches={m}"), ss.Cluster.local(p)).compiled.program
    work = work_of(program, F=1.0, B=2.0)
    apart, together = (clock(program, free(p), work, Behavior(one_stream=one)) for one in (False, True))
    assert apart.seconds == 3 * (m + p - 1)
    assert together.seconds - 3 * m == 16
    assert (together.compute == apart.compute).all()
