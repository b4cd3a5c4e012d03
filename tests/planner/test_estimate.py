"""Estimates: their communication beside that of whole programs."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import superscaler as ss
from superscaler.cluster import LOCAL, DeviceKind
from superscaler.cluster.devices import Speeds
from superscaler.compiler import compile_graph
from superscaler.ir.program import Collective, Program
from superscaler.planner.costs import outside
from superscaler.planner.estimate import Estimator
from superscaler.planner.kinds import reduced, runs
from superscaler.planner.menu import Menu
from superscaler.planner.small import pieces
from superscaler.planner.space import Choice, Use
from superscaler.plans import resolve
from superscaler.simulate.predict import simulate
from superscaler.simulate.transfers.ports import Ports
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import slow

# Gradients that are far larger than a bucket, and some that are far smaller; tests/planner/test_whole.py has it, too.
MODEL = "gpt2:layers=2,hidden=1024,heads=16,seq=512,vocab=8192,batch=48,device=meta"
LOSS_BYTES = 4
# A weight that the embedding and the head read takes most bytes.
HEAVY = "gpt2:layers=2,hidden=256,heads=4,seq=1024,vocab=50304,batch=8,device=meta"
# Four equal stages, whose blocks take most of the time; tests/planner/test_menu.py has it, too.
LARGE = "gpt2:layers=8,hidden=1024,heads=16,seq=512,vocab=256,batch=16,device=meta"
# A machine of two cores, for four processes.
SPEEDS = Speeds(0, {"float32": (5e10, 5e10)}, (1e10, 1e10), cores=2)
CORES = ss.Cluster.of("machine", LOCAL, 1, 4, device_kind=DeviceKind(LOCAL, 8 * 10**9, {"float32": 5e10}, SPEEDS))
OWN = replace(CORES, device_kind=replace(CORES.device_kind, speeds=replace(SPEEDS, cores=0)))
SMALL = "gpt2:layers=4,hidden=256,heads=8,seq=128,vocab=2048,batch=16,device=meta"
# A pair of blocks between a small embedding and a head.
PAIR = "gpt2:layers=2,hidden=512,heads=8,seq=512,vocab=8192,batch=4,device=meta"


@pytest.mark.parametrize(
    ("cluster", "choice"), [("a100:2x8", Choice(16, 1, 1, 1, 1)), ("a100:4x4", Choice(8, 2, 1, 1, 1))]
)
def test_gradients_take_the_seconds_of_their_collectives(cluster: str, choice: Choice) -> None:
    """Those that the program of a plan has, each as the simulator prices it; the estimate is not above them."""
    graph, devices = graph_of(MODEL), ss.Cluster.parse(cluster)
    program = compile_graph(graph, resolve(choice.spec), devices, certified=False).program
    every = (i for i in program.devices[0].instructions if isinstance(i, Collective))
    sizes = [i.bytes for i in every if len(i.group) == choice.dp and i.bytes > LOSS_BYTES]
    ports, groups = Ports(devices), np.arange(16).reshape(choice.dp, choice.tp).T
    seconds = sum(float(np.max(ports.route("all_reduce", groups, size).seconds)) for size in sizes)
    estimator = Estimator(graph, devices, Menu(graph, devices))
    found = estimator.traffic.collective(choice, "all_reduce", sum(sizes), pieces(program))
    assert 0.94 * seconds < found <= seconds


@pytest.mark.parametrize("model", ["gpt2:size=tiny,layers=4,batch=8", *slow(HEAVY)])
@pytest.mark.parametrize(
    "choice",
    [
        Choice(1, 2, 1, 1, 8, "ulysses"),
        *slow(Choice(1, 2, 1, 1, 8, "ulysses", "full"), Choice(1, 2, 1, 1, 8, "sequence")),
    ],
)
def test_a_step_of_many_microbatches_is_estimated_by_one_or_two(model: str, choice: Choice) -> None:
    """Where devices wait for the host, and where gradients of a large weight, which is read twice, are summed."""
    graph, cluster = graph_of(model), ss.Cluster.parse("a100:1x2")
    found = Estimator(graph, cluster, Menu(graph, cluster)).of(choice)
    assert found is not None
    step = ss.compile(graph, choice.spec, cluster).simulate().step_seconds
    assert 0.96 * step < found.bound <= found.seconds <= step


def test_the_embedding_works_on_the_first_stage() -> None:
    """Beside a pipeline of two stages with a block each, compiled whole: the last one has the head alone."""
    cluster, graph = ss.Cluster.parse("a100:1x4"), graph_of(PAIR)
    costs = Menu(graph, cluster)._own(Use(2, "sequence", "none", "whole", 4))
    assert costs is not None
    whole = ss.compile(graph, "pipeline_1f1b:2,microbatches=1,blocks=1+1 x sequence_parallel:2", cluster).simulate()
    works = [device.compute + device.launch + device.host + device.communication for device in whole.devices]
    first, last = (costs.runs[0].seconds + outside(costs.rest, 1.0, is_last).seconds for is_last in (False, True))
    assert last < 1.04 * works[1]
    assert 1.1 * costs.runs[0].seconds < first <= works[0]


@cache
def _program(spec: str) -> Program:
    return compile_graph(graph_of(SMALL), resolve(spec), OWN, certified=False).program


def _step(choice: Choice, cluster: ss.Cluster) -> float:
    return simulate(_program(choice.spec), cluster).prediction.step_seconds


def test_processes_that_share_cores_lose_nothing_by_waiting() -> None:
    """Four that work at a time take twice as long on two cores, and those of a pipeline, one after another, as long."""
    both, turns = Choice(4, 1, 1, 4, 1), Choice(1, 1, 4, 16, 1, blocks=(1, 1, 1, 1))
    assert _step(both, CORES) == pytest.approx(2 * _step(both, OWN), rel=0.1)
    assert _step(turns, CORES) == pytest.approx(_step(turns, OWN), rel=0.02)


@pytest.mark.parametrize(
    "choice",
    [
        Choice(4, 1, 1, 4, 1), Choice(1, 1, 4, 4, 4),
        *slow(
            Choice(4, 1, 1, 1, 4, zero=1), Choice(2, 2, 1, 4, 2, layout="sequence"),
            Choice(2, 1, 2, 4, 2, schedule="zb_h1"), Choice(1, 1, 4, 4, 4, schedule="interlaced"),
        ),
    ],
)  # fmt: skip
def test_bounds_know_that_cores_are_shared(choice: Choice) -> None:
    """They are below the steps of whole plans; close to these, where all devices work at a time."""
    found, own = (Estimator(graph_of(SMALL), c, Menu(graph_of(SMALL), c)).of(choice) for c in (CORES, OWN))
    assert found is not None
    assert own is not None
    step = _step(found.choice, CORES)
    assert own.bound <= found.bound <= step
    assert choice.pp > 1 or found.bound > 0.8 * step
    assert found.bound <= found.seconds < 1.25 * step


@pytest.mark.parametrize(
    ("layers", "choice"),
    [
        (4, Choice(1, 1, 2, 4, 4, schedule="chimera")),
        *slow(
            (4, Choice(1, 1, 4, 2, 8, schedule="chimera")),
            (8, Choice(2, 1, 4, 2, 4, schedule="chimera")),
            (8, Choice(2, 1, 4, 4, 2, schedule="chimera")),
            (8, Choice(4, 1, 2, 1, 4, schedule="chimera")),
        ),
    ],
    ids=str,
)
def test_pipelines_in_two_directions_take_what_is_estimated(layers: int, choice: Choice) -> None:
    """Their bound is not above the whole plan, and their seconds are near; no block is measured for them alone."""
    graph, cluster = graph_of(LARGE), ss.Cluster.parse(f"a100:1x{choice.dp * choice.tp * choice.pp}")
    graph = reduced(graph, runs(graph), [layers], 16)
    found = Estimator(graph, cluster, Menu(graph, cluster)).of(choice)
    assert found is not None
    step = ss.compile(graph, choice.spec, cluster).simulate().step_seconds
    assert 0.93 * step < found.bound <= 1.005 * step
    assert found.seconds == pytest.approx(step, rel=0.05)
    assert choice.use == replace(choice, schedule="interlaced").use


def test_devices_of_a_v_wait_for_the_forwards_before_their_first() -> None:
    """Without these, the estimate of a model with a small head is 5 % below the whole plan."""
    cluster, choice = ss.Cluster.parse("a100:1x4"), Choice(1, 1, 4, 2, 8, schedule="zbv", chunks=2)
    graph = graph_of(LARGE)
    found = Estimator(graph, cluster, Menu(graph, cluster)).of(choice)
    assert found is not None
    step = ss.compile(graph, found.choice.spec, cluster).simulate().step_seconds
    assert 0.96 * step < found.seconds < 1.01 * step
    assert found.bound <= step
