"""Stages without blocks, of the embedding or the head alone: beside all cuts, by costs and by whole plans."""

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest

import superscaler as ss
from superscaler.planner.constraints import left, read
from superscaler.planner.costs import NOTHING, Cost, Costs
from superscaler.planner.estimate import Estimator
from superscaler.planner.memory import NONE
from superscaler.planner.menu import Menu
from superscaler.planner.search import search
from superscaler.planner.space import Choice, choices
from superscaler.planner.stages.balance import balanced
from superscaler.planner.stages.folded import Folded
from superscaler.planner.stages.moves import Moves
from tests.helpers.graphs import graph_of

# The head takes as long as the blocks.
HEAVY = "gpt2:layers=4,hidden=1024,heads=16,seq=512,vocab=32768,batch=8,device=meta"
GPT = "gpt2:size=tiny,layers=4,batch=8"


def cuts(blocks: int, stages: int) -> Iterator[list[int]]:
    """Yield all bounds of stages, of which the first and the last may be without blocks."""
    for some in combinations_with_replacement(range(blocks + 1), stages - 1):
        if all(a < b for a, b in pairwise(some)):
            yield [0, *some, blocks]


def allowed(blocks: int, stage: int, stages: int) -> np.ndarray:
    found = np.triu(np.ones((blocks + 1, blocks + 1), dtype=bool), 1)
    found[0, 0], found[-1, -1] = stage == 0, stage == stages - 1
    return found


def drawn(seed: int) -> tuple[Costs, np.ndarray]:
    """Return costs of up to 7 blocks of two kinds, and of a head, and the kind of each block."""
    draw = random.Random(seed)

    def cost(most: float) -> Cost:
        return NOTHING._replace(seconds=draw.uniform(0.1, most))

    kinds = np.array(sorted(draw.choices([0, 1], k=draw.randint(4, 7))))
    return Costs((cost(1), cost(1)), cost(draw.choice([0.5, 3.0])), NONE), kinds


def seconds(costs: Costs, kinds: np.ndarray, bounds: list[int]) -> list[float]:
    """Return those of each stage, added one by one."""
    found = [sum(costs.runs[kind].seconds for kind in kinds[a:b]) for a, b in pairwise(bounds)]
    return [*found[:-1], found[-1] + costs.rest.seconds]


@pytest.mark.parametrize("seed", range(30))
def test_the_slowest_stage_is_the_fastest_of_all_cuts(seed: int) -> None:
    """Stage by stage, and of a V device by device: no block can be elsewhere so that it is faster."""
    costs, kinds = drawn(seed)
    count, devices = len(kinds), 2 if seed % 2 else 3
    for stages in (devices, 2 * devices):
        found = balanced(costs, kinds, stages, True, lambda k, n: allowed(count, k, n))
        every = [max(seconds(costs, kinds, bounds)) for bounds in cuts(count, stages)]
        assert found is None if not every else max(seconds(costs, kinds, found or [])) == pytest.approx(min(every))
    if found is None:
        return
    folded = Folded(costs, kinds, devices, lambda k, n: allowed(count, k, n), found)

    def slowest(bounds: list[int]) -> float:
        own = seconds(costs, kinds, bounds)
        return max(own[k] + own[-1 - k] for k in range(devices))

    own = folded.least
    assert own in [*cuts(count, 2 * devices)]
    # Found by halvings.
    assert slowest(own) == pytest.approx(min(map(slowest, cuts(count, 2 * devices))), rel=1e-3)
    best = folded.best(2 * devices, [own, found])
    assert best in [*cuts(count, 2 * devices)]
    assert folded.step(best, 2 * devices) <= min(folded.step(some, 2 * devices) for some in (own, found))


@pytest.mark.parametrize(("schedule", "waits"), [("1f1b", 2.0), ("zb_h1", 2 / 3)])
def test_moves_find_the_shortest_step_of_all_cuts(schedule: str, waits: float) -> None:
    """Of drawn blocks on three devices, within 1 %; the stages whose slowest is fastest may be slower. Of equal stages,
    a step is as long as its schedule says.
    """
    costs, kinds = Costs((NOTHING._replace(seconds=1.0),), NOTHING, NONE), np.zeros(3, dtype=int)
    equal = Moves(costs, kinds, schedule, 3, lambda k, n: allowed(3, k, n))
    assert equal.step([0, 1, 2, 3], 6) == pytest.approx(6 + waits + 0.1)
    gains = list[float]()
    for seed in range(8):
        costs, kinds = drawn(seed)
        count = len(kinds)
        first = balanced(costs, kinds, 3, True, lambda k, n, count=count: allowed(count, k, n))
        assert first is not None
        moves = Moves(costs, kinds, schedule, 3, lambda k, n, count=count: allowed(count, k, n))
        found = moves.step(moves.best(6, [first]), 6)
        assert found <= 1.01 * min(moves.step(bounds, 6) for bounds in cuts(count, 3))
        gains.append(moves.step(first, 6) / found)
    assert min(gains) == 1 < max(gains)


def test_a_stage_with_a_long_update_has_no_more_blocks_than_others() -> None:
    """Of ZB-H1 the first stage is done last; a second block there would make the step longer by its update."""
    costs, kinds = Costs((NOTHING._replace(seconds=1.0),), NOTHING._replace(seconds=1.9), NONE), np.zeros(4, dtype=int)
    tails = [np.add.outer(-np.arange(5.0), np.arange(5.0)) * (0.6 if stage == 0 else 0.0) for stage in range(4)]
    found = [
        Moves(costs, kinds, "zb_h1", 4, lambda k, n: allowed(4, k, n), own).best(8, [[0, 1, 2, 4, 4]])
        for own in ((), tails)
    ]
    assert found == [[0, 2, 3, 4, 4], [0, 1, 3, 4, 4]]


def test_equal_blocks_are_spread_evenly_beside_a_heavy_head() -> None:
    """The head is alone, and no other stage is as long as it."""
    costs = Costs((NOTHING._replace(seconds=0.1),), NOTHING._replace(seconds=0.3), NONE)
    found = balanced(costs, np.zeros(5, dtype=int), 4, True, lambda k, n: allowed(5, k, n))
    assert found == [0, 1, 3, 5, 5]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["zbv", "1f1b", "zb_h1"])
def test_a_search_finds_the_best_of_all_cuts(schedule: str) -> None:
    """Of a model with a heavy head on 2 devices, and on 4: no cut, compiled whole, is faster, and the bound is below
    all.
    """
    graph = graph_of(HEAVY)
    for pp in (2, 4)[: 1 if schedule == "zbv" else 2]:
        where = f"pp = {pp}, rows = 1, no recompute, schedule = {schedule}, zero = 0, no ordered"
        cluster = f"a100:1x{pp}"
        answer = search(graph, cluster, where=f"{where}, no chunked, no swap, no co_shard")
        choice = replace(answer.best.choice, blocks=())
        every = [
            ss.compile(graph, replace(choice, blocks=tuple(b - a for a, b in pairwise(bounds))).spec, cluster)
            .simulate().step_seconds
            for bounds in cuts(4, choice.stages)
        ]  # fmt: skip
        assert answer.best.prediction.step_seconds <= 1.001 * min(every)
        assert answer.bound <= min(every)
        assert schedule != "zbv" or answer.best.choice.blocks[-1] == 0


def test_one_microbatch_goes_through_all_stages_before_a_zero_bubble_is_filled() -> None:
    """The estimate of ZB-H1 and its bound are near the plan that is compiled whole."""
    # The model of tests/planner/test_estimate.py.
    model = HEAVY.replace("vocab=32768,batch=8", "vocab=1024,batch=16")
    graph, cluster = graph_of(model), ss.Cluster.parse("a100:1x2")
    choice = Choice(1, 1, 2, 16, 1, schedule="zb_h1")
    e = Estimator(graph, cluster, Menu(graph, cluster)).of(choice)
    assert e is not None
    step = ss.compile(graph, e.choice.spec, cluster).simulate().step_seconds
    assert e.bound <= step * (1 + 1e-9)
    assert e.bound > 0.94 * step


@pytest.mark.slow
def test_a_v_with_a_heavy_head_is_as_fast_as_stages_of_equal_flops() -> None:
    """And without an order of its own."""
    graph = graph_of("gpt2:layers=16,hidden=1024,heads=16,seq=512,vocab=50304,batch=16,device=meta")
    equal = ss.compile(graph, "zbv:4,microbatches=8", "a100:1x4").simulate().step_seconds
    answer = search(graph, "a100:1x4", where="pp = 4, microbatches = 8, zero = 0, no recompute, no ordered")
    assert answer.best.prediction.step_seconds <= equal * (1 + 1e-9)
    assert answer.best.choice.blocks[-1] == 0


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("last stage has 0 blocks", (2, 2, 0)),
        ("first stage has 0 blocks, stage 1 has 3 blocks", (0, 3, 1)),
        ("first stage has 0 blocks, last stage has 0 blocks", (0, 4, 0)),
    ],
)
def test_constraints_name_stages_without_blocks(text: str, blocks: tuple[int, ...]) -> None:
    cluster, graph = ss.Cluster.parse("a100:1x3"), graph_of(GPT)
    constraints = read(text)
    menu = Menu(graph, cluster)
    e = Estimator(graph, cluster, menu, [one.limit for one in constraints if one.limit])
    space = [*choices(cluster, 8, 4)]
    found = left(space, constraints, e.cuts.sizes, e.cuts.ends)
    choice = Choice(1, 1, 3, 1, 8)
    assert choice in found
    assert {c.pp for c in found} == {3}
    estimate = e.of(choice)
    assert estimate is not None
    assert estimate.choice.blocks == blocks


def test_only_ends_with_something_to_train_are_without_blocks() -> None:
    """By the words of the error: of no end, and of both."""
    space = [*choices(ss.Cluster.parse("a100:1x4"), 8, 4)]
    for ends, told in {
        (False, False): "of one or more.",
        (False, True): r"one or more \(the last of several: of 0, too\)",
    }.items():
        with pytest.raises(ss.InputError, match=told):
            left(space, read("stage 0 has 0 blocks"), [1] * 4, ends)
    assert left(space, read("stage 0 has 0 blocks"), [1] * 4, (True, False))
    assert {c.stages > 1 for c in left(space, read("last stage has 0 blocks"), [1] * 4, (False, True))} == {True}
