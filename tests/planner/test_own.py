"""Searches for pipelines whose stages differ: beside all chains of stages, and beside all plans, compiled whole."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise, product
from math import inf
from types import SimpleNamespace
from typing import cast

import pytest

import superscaler as ss
from superscaler.errors import InputError
from superscaler.ir.program import Send
from superscaler.planner.constraints import Constraint, Limit, left, read
from superscaler.planner.costs import Cost, Costs
from superscaler.planner.estimate import Estimator
from superscaler.planner.memory import Beyond
from superscaler.planner.menu import Menu
from superscaler.planner.own.chains import Chain, Ways
from superscaler.planner.own.stages import OwnStages
from superscaler.planner.search import search
from superscaler.planner.space import Choice, Own, Use, choices
from superscaler.planner.traffic import meetings
from superscaler.planner.whole.bounds import least_beside
from superscaler.plans import resolve
from superscaler.simulate.memory import NO_OVERHEADS
from superscaler.simulate.prediction import Prediction
from tests.helpers.graphs import graph_of
from tests.helpers.sweeps import few, slow

GPT = "gpt2:size=tiny,layers=5,batch=8"
# A model whose head is as long as some blocks, so that stages are uneven.
HEAVY = "gpt2:layers=5,hidden=1024,heads=16,seq=256,vocab=16384,batch=8,device=meta"


class Drawn(Menu):
    """A menu of drawn costs: recomputing keeps less, and takes longer."""

    def __init__(self, graph: ss.Graph, cluster: ss.Cluster, seed: int) -> None:
        super().__init__(graph, cluster)
        self.seed = seed

    def known(self, use: Use) -> Costs | None:
        if use not in self._known:
            self._known[use] = self._drawn(use, random.Random(f"{self.seed} {use.tp}"))
        return self._known[use]

    def _drawn(self, use: Use, draw: random.Random) -> Costs:
        times, kept = {"none": (1.0, 1.0), "selective": (1.1, 0.6), "full": (1.3, 0.2)}[use.recompute]

        def cost(size: float) -> Cost:
            work, weights = size * draw.uniform(0.5, 1.5) * use.rows / use.tp, draw.uniform(1e6, 1e8) * size / use.tp
            ends = [draw.uniform(0, 0.1) * size for _ in range(4)] + [0.0, 0.0]
            own = draw.uniform(1e7, 1e8) * use.rows / use.tp * kept
            return Cost(work * times, work * times, *ends, weights, weights, 2 * weights, own)

        return Costs(tuple(cost(0.01) for _ in self.runs), cost(draw.choice([0.005, 0.05])), Beyond(1e7, 1e7, 0.0, 0.0))


CLUSTER = "a100:1x4"
# What stages of their own never do.
ELSE = "no swap, no chunked, no co_shard, no ulysses, no ring"


def estimator(graph: ss.Graph, cluster: ss.Cluster, menu: Menu, limits: Sequence[Limit] = ()) -> Estimator:
    """Return the estimator of tensors alone, without what a process has beside them."""
    found = Estimator(graph, cluster, menu, limits)
    found.overheads = NO_OVERHEADS
    return found


def drawn(seed: int, is_bound: bool = False) -> Ways:
    """Return the ways of the stages of drawn costs, with a memory that is sometimes little."""
    graph, cluster, draw = graph_of(GPT), ss.Cluster.parse(CLUSTER), random.Random(seed)
    pp, schedule, count = draw.choice([2, 4]), draw.choice(["1f1b", "zb_h1"]), draw.choice([2, 4])
    words = f"pp = {pp}, microbatches = {count}, zero = {draw.choice([0, pp == 2]):d}, schedule = {schedule}, {ELSE}"
    group = left([*choices(cluster, 8, 5, ["sequence"])], read(words))
    return Ways(estimator(graph, cluster, Drawn(graph, cluster, seed)), group, draw.choice([inf, 1e9, 6e8]), is_bound)


def every_chain(ways: Ways) -> list[Chain]:
    own = [way for some in ways.by_cut for way in some]
    count = len(ways.estimator.run_of)
    bounds = [[0, *some, count] for some in combinations_with_replacement(range(count + 1), ways.pp - 1)]
    # The first and the last may be without blocks.
    bounds = [b for b in bounds if all(x < y for x, y in pairwise(b[1:-1]))]
    return [Chain(b, list(some)) for b in bounds for some in product(own, repeat=ways.pp)]


@pytest.mark.parametrize("seed", few(range(16), *range(4), 12))
def test_a_chain_of_stages_is_the_best_of_all(seed: int) -> None:
    """Of all chains that fit; it may have a slowest stage between two of the limits that are tried. The bound is below
    the bounds of all.
    """
    ways = drawn(seed)
    every = [e for e in map(ways.estimate, every_chain(ways)) if e.peak <= ways.room]
    chain = ways.chain()
    assert (chain is None) == (not every)
    if chain is not None:
        found = ways.estimate(chain)
        assert found.peak <= ways.room
        assert found.seconds <= 1.02 * min(e.seconds for e in every)
    # Both are sums, in another order.
    assert drawn(seed, is_bound=True).bound() <= min((e.bound for e in every), default=inf) * (1 + 1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_plan_that_does_not_fit_is_bound_by_those_of_other_blocks(schedule: str) -> None:
    """Beside all numbers of blocks, some of which fit where the fastest ones, compiled whole, have 5 % too much."""
    graph, cluster = graph_of(GPT), ss.Cluster.parse(CLUSTER)
    found, choice = estimator(graph, cluster, Drawn(graph, cluster, 4)), Choice(2, 1, 2, 1, 4, schedule=schedule)
    costs = found.menu.known(choice.use)
    assert costs is not None
    every = [found.with_stages(choice, [costs] * 2, (0, n, 5)) for n in range(6)]
    best = min(every, key=lambda e: e.bound)
    room = 1e9
    stages = found.stage_costs(choice, [costs] * 2, found.cuts.of(best.choice))
    times = [
        SimpleNamespace(
            devices=(2 * d, 2 * d + 1), compute=4 * s.work + found.sums(choice, s), launch=0, host=0, copies=0
        )
        for d, s in enumerate(stages)
    ]
    whole = cast(Prediction, SimpleNamespace(fullest=SimpleNamespace(peak_bytes=1.05 * room), devices=times))
    least = least_beside(found, best, whole, room)
    others = [e.bound for e in every if e.peak * 1.05 * room / best.peak <= room]
    assert others
    assert best.bound < 0.97 * least
    assert least <= min(others) * (1 + 1e-12)


def test_a_plan_whose_fastest_stages_do_not_fit_has_the_best_that_do() -> None:
    """Beside those of other numbers of blocks, compiled whole."""
    graph, where = graph_of(HEAVY), "pp = 2, rows = 1, schedule = 1f1b, no recompute, no swap, no chunked, no co_shard"
    every = [ss.compile(graph, f"hybrid:pp=2,microbatches=8,blocks={n}+{5 - n}", "a100:1x2") for n in (1, 2, 3)]
    memory = 2_290_000_000
    steps = {fits: [p.step_seconds for p in found if p.fits is fits] for fits in (False, True)
             for found in [[plan.simulate(memory) for plan in every]]}  # fmt: skip
    assert min(steps[False]) < 0.9 * min(steps[True])
    answer = search(graph, "a100:1x2", memory, where=where)
    assert answer.best.prediction.fits
    assert answer.best.prediction.step_seconds == min(steps[True])
    assert 0.95 * min(steps[True]) <= answer.bound <= min(steps[True])


def test_a_v_of_other_blocks_has_works_that_take_as_long_as_those_of_a_whole_plan() -> None:
    """Its bound is below the steps of all, and grows with the works that take longest beside their estimate."""
    graph, cluster, choice = (
        graph_of(HEAVY),
        ss.Cluster.parse("a100:1x2"),
        Choice(1, 1, 2, 1, 8, schedule="zbv", chunks=2),
    )
    found = Estimator(graph, cluster, Menu(graph, cluster))
    e = found.of(choice)
    assert e is not None
    some = {e.choice.blocks, (2, 1, 1, 1), (1, 1, 3, 0)}
    wholes = {n: ss.compile(graph, replace(choice, blocks=n).spec, cluster).simulate() for n in some}
    whole = wholes[e.choice.blocks]
    least = least_beside(found, e, whole, inf)
    assert 0.9 * whole.step_seconds < least <= min(p.step_seconds for p in wholes.values())
    slow = [replace(times, compute=more * times.compute) for more, times in zip((2, 1.1), whole.devices, strict=True)]
    assert 1.05 * least < least_beside(found, e, replace(whole, devices=slow), inf) < 1.15 * least


def test_the_least_seconds_of_a_plan_are_below_its_bound() -> None:
    """Of all schedules, if its costs are known: they are close to it where a device has all of the model."""
    graph, cluster = graph_of(GPT), ss.Cluster.parse(CLUSTER)
    menu = Counted(graph, cluster, 7)
    found, seen = estimator(graph, cluster, menu), set[str]()
    for c in (c for c in choices(cluster, 32, 5, ["sequence"]) if c.recompute != "co_shard"):
        menu.measured.add(c.use)
        least, e = found.least(c), found.of(c)
        assert least > 0
        if e:
            seen.add(c.schedule)
            assert least <= e.bound * (1 + 1e-12), c
            assert c.pp > 1 or c.copies > 1 or least > 0.95 * e.bound, c
    assert seen == {"1f1b", "interleaved", "zb_h1", "zbv", "interlaced", "3f1b", "chimera"}


class Counted(Drawn):
    """A menu that counts what it measures: no selective recomputation is known before."""

    def __init__(self, graph: ss.Graph, cluster: ss.Cluster, seed: int) -> None:
        super().__init__(graph, cluster, seed)
        self.measured = set[Use]()

    def known(self, use: Use) -> Costs | None:
        return super().known(use) if use.recompute != "selective" or use in self.measured else None

    def costs(self, use: Use) -> Costs | None:
        self.measured.add(use)
        self._least.clear()
        return super().known(use)


@pytest.mark.parametrize(("share", "is_measured"), [(1.0, False), (1.2, True)])
def test_stages_are_measured_where_their_bound_is_low(share: float, is_measured: bool) -> None:
    """What is not known keeps nothing, and is no slower: with little memory, such plans could be far better than one of
    so many times the bound.
    """
    graph, cluster = graph_of(GPT), ss.Cluster.parse(CLUSTER)
    menu = Counted(graph, cluster, 4)
    group = left(
        [*choices(cluster, 8, 5, ["sequence"])], read(f"pp = 2, rows = 1, tp = 1, zero = 0, schedule = 1f1b, {ELSE}")
    )
    own = OwnStages(estimator(graph, cluster, menu), group, "sequence", 4, 2e8)
    limit = share * own.least(inf)
    list(own.better(limit, lambda e: True))
    assert bool(menu.measured) == is_measured
    assert not is_measured or own.least(inf) > 1.05 * limit / share


@pytest.mark.parametrize("pairs", [25, *slow(80)])
def test_stages_of_their_own_satisfy_random_constraints(pairs: int) -> None:
    """Each of drawn pairs, as a plan's stages do: those of one number, name or server, and those of single stages."""
    graph, cluster, draw = graph_of(GPT), ss.Cluster.parse(CLUSTER), random.Random(5)
    clauses = [
        "tp <= 1", "tp < 2", "tp = 2", "dp >= 2", "dp != 1", "rows = 2", "rows <= 2", "no recompute", "pp = 2",
        "recompute != full", "recompute in (none, full)", "tp within a server", "stage 0 has tp >= 2", "zero = 1",
        "last stage has dp = 2", "stage 0 has <= 1 blocks", "last stage has recompute = none", "no zb_h1",
        "layout = sequence",
    ]  # fmt: skip
    space, differ, menu = [*choices(cluster, 8, 5, ["sequence"])], 0, Drawn(graph, cluster, 5)
    for _ in range(pairs):
        constraints = read(", ".join(draw.sample(clauses, 2)), cluster.devices_per_server)
        limits = [one.limit for one in constraints if one.limit]
        own = OwnStages(
            estimator(graph, cluster, menu, limits), _left(space, constraints), "sequence", 4, draw.choice([inf, 8e8])
        )
        for e in own.better(inf, lambda e: True):
            assert all(one.allows(e.choice, None) for one in constraints), (constraints, e.choice)
            assert all(
                limit.holds(k, len(e.choice.blocks), n) for limit in limits for k, n in enumerate(e.choice.blocks)
            )
            resolve(e.choice.spec)
            differ += bool(e.choice.own)
    assert differ > pairs / 4


def _left(space: list[Choice], constraints: list[Constraint]) -> list[Choice]:
    try:
        return left(space, constraints, [1] * 5)
    except InputError:
        return []


def test_messages_are_priced_between_the_devices_that_send_them() -> None:
    """As in the program: each device of the second stage reads rows of both of the first."""
    program = ss.compile(graph_of(GPT), "hybrid:pp=2,dp=2+1,tp=1+2,microbatches=2", CLUSTER).compiled.program
    sent = {
        (device.rank, send.peer)
        for device in program.devices[:2]
        for send in device.instructions[:]
        if isinstance(send, Send) and not send.source.is_gradient and send.source.microbatch == 0
    }
    assert sorted(sent) == meetings((2, 1, 1), (1, 1, 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "devices", "words", "recompute", "memory"),
    [
        # Data-parallel devices of the first stage would add the gradients of a large embedding after all work.
        (
            "llama:layers=4,hidden=512,heads=8,kv_heads=8,mlp=1024,seq=256,vocab=128000,batch=8,device=meta",
            4,
            f"pp = 2, microbatches = 2, zero = 0, schedule = 1f1b, no recompute, {ELSE}",
            ["none"],
            80 * 10**9,
        ),
        # The first stage keeps two microbatches, the last one keeps one.
        (
            "gpt2:layers=4,hidden=512,heads=8,seq=512,vocab=1024,batch=8,device=meta",
            2,
            f"pp = 2, microbatches = 8, zero = 0, schedule = 1f1b, {ELSE}",
            ["none", "selective", "full"],
            1_330_000_000,
        ),
    ],
)
def test_a_search_finds_the_unequal_stages_that_are_the_best(
    model: str, devices: int, words: str, recompute: list[str], memory: int
) -> None:
    """Beside all plans with any (dp, tp), recomputation and blocks of two stages, compiled whole."""
    graph, cluster, count = graph_of(model), f"a100:1x{devices}", int(words.split("microbatches = ")[1][0])
    cuts = [(dp, devices // 2 // dp) for dp in (1, 2) if dp <= devices // 2]
    own = [Own(*cut, again) for cut, again in product(cuts, recompute)]
    plans = dict[str, float]()
    for stages, first in product(product(own, repeat=2), (1, 2, 3)):
        rows = 8 // count // stages[0].dp
        c = Choice(
            *stages[0][:2], 2, rows, count, "sequence", stages[0].recompute, blocks=(first, 4 - first), own=stages
        )
        p = ss.compile(graph, c.spec, cluster).simulate(memory)
        plans |= {c.spec: p.step_seconds} if p.fits else {}
    best = search(graph, cluster, memory, where=words).best
    fastest = min(plans, key=lambda spec: plans[spec])
    assert best.choice.own
    assert best.prediction.step_seconds <= plans[fastest]
    assert len({*best.choice.own}) == 2
    assert ss.compile(graph, best.spec, cluster).simulate(memory).fits
