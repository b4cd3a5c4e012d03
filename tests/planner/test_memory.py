"""Bytes that plans are estimated to need, beside those of whole plans."""

from functools import cache

import pytest

import superscaler as ss
from superscaler.planner.estimate import Estimator
from superscaler.planner.memory import moments
from superscaler.planner.menu import Menu
from superscaler.planner.space import Choice
from superscaler.simulate.memory import NO_OVERHEADS
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import slow

MODEL = "gpt2:layers=8,hidden=1024,heads=16,seq=512,vocab=8192,batch=32,device=meta"
CLUSTER = "a100:1x4"


# The first blocks, each without an equal one, have most tokens; the last ones most weights.
SWIN = "swin:hidden=64,heads=4,depths=2-2-4-2,image=224,window=7,batch=8,device=meta"


@cache
def estimator(model: str = MODEL) -> Estimator:
    """Return the estimator of tensors alone, without what a process has beside them."""
    graph, cluster = graph_of(model), ss.Cluster.parse(CLUSTER)
    found = Estimator(graph, cluster, Menu(graph, cluster))
    found.overheads = NO_OVERHEADS
    return found


@pytest.mark.parametrize(
    "choice",
    [
        Choice(1, 1, 4, 4, 8, schedule="interleaved", chunks=2),
        *slow(
            Choice(1, 1, 4, 2, 16, schedule="interleaved", chunks=2),
            Choice(1, 1, 4, 4, 8),
            Choice(4, 1, 1, 4, 2, zero=1),
            Choice(4, 1, 1, 8, 1),
            Choice(4, 1, 1, 4, 2, zero=3),
            Choice(4, 1, 1, 8, 1, zero=1, recompute="selective"),
            Choice(4, 1, 1, 4, 2, recompute="full"),
            Choice(4, 1, 1, 4, 2, recompute="co_shard"),
            Choice(4, 1, 1, 4, 2, swap="optimizer"),
            Choice(2, 2, 1, 4, 4, layout="sequence", zero=1),
            Choice(4, 1, 1, 4, 2, loss="chunked"),
            Choice(2, 2, 1, 4, 4, layout="ulysses"),
            Choice(2, 1, 2, 4, 4, zero=1),
            Choice(2, 1, 2, 4, 4, recompute="full"),
            Choice(2, 1, 2, 4, 4, schedule="zbv", chunks=2),
            Choice(2, 1, 2, 4, 4, schedule="chimera"),
            Choice(1, 1, 4, 4, 8, schedule="chimera"),
            Choice(1, 1, 4, 4, 8, schedule="chimera", recompute="full"),
            Choice(2, 1, 2, 4, 4, schedule="zb_h1"),
            Choice(2, 1, 2, 4, 4, schedule="zb_h1", recompute="full"),
        ),
    ],
    ids=lambda choice: choice.spec,
)
def test_the_bytes_of_an_estimate_are_those_of_the_whole_plan(choice: Choice) -> None:
    """Those of tensors on the fullest device, within 8 %: weights, gradients, activations, and what exists for a
    moment. Its bound is not above the step, within the accuracy of few rows.
    """
    estimate = estimator().of(choice)
    assert estimate is not None
    whole = ss.compile(graph_of(MODEL), estimate.choice.spec, CLUSTER).simulate()
    assert estimate.bound < 1.05 * whole.step_seconds
    row = whole.fullest
    assert estimate.peak == pytest.approx(row.peak_bytes - row.memory["overhead"], rel=0.08)


@pytest.mark.parametrize(
    "choice",
    slow(Choice(1, 1, 4, 1, 8), Choice(1, 2, 2, 1, 8)),
    ids=lambda choice: choice.spec,
)
def test_blocks_without_equal_ones_have_bytes_and_seconds_of_their_own(choice: Choice) -> None:
    estimate = estimator(SWIN).of(choice)
    assert estimate is not None
    whole = ss.compile(graph_of(SWIN), estimate.choice.spec, CLUSTER).simulate()
    row = whole.fullest
    assert estimate.peak == pytest.approx(row.peak_bytes - row.memory["overhead"], rel=0.08)
    assert estimate.seconds == pytest.approx(whole.step_seconds, rel=0.1)


@pytest.mark.parametrize(
    ("choice", "alive"),
    [
        (Choice(1, 1, 3, 1, 8), [3, 2, 1]),
        (Choice(1, 1, 3, 1, 2), [2, 2, 1]),
        (Choice(1, 1, 2, 1, 8, schedule="zbv", chunks=2), [4, 4]),
        (Choice(1, 1, 2, 1, 8, schedule="interleaved", chunks=2), [5, 3]),
        (Choice(1, 1, 2, 1, 512), [2, 1]),
        # Of either direction as many as come before the first backward of this one.
        (Choice(1, 1, 4, 1, 4, schedule="chimera"), [3, 4, 4, 3]),
        (Choice(1, 1, 4, 1, 512, schedule="chimera"), [4, 4, 4, 4]),
    ],
)
def test_a_device_keeps_as_many_microbatches_as_its_schedule_has_on_the_way(choice: Choice, alive: list[int]) -> None:
    found = [max(sum((*moment.alive, *moment.between)) for moment in device) for device in moments(choice)]
    assert found == pytest.approx(alive)
