"""Orders of pipelines: branch and bound beside brute force, the literature's idle times, and searches that use them."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import inf

import pytest

import superscaler as ss
from superscaler.compiler import compile_graph
from superscaler.planner.constraints import left, read
from superscaler.planner.estimate import Estimator
from superscaler.planner.kinds import of_batch
from superscaler.planner.menu import Menu
from superscaler.planner.orders.best import _ended, best_order
from superscaler.planner.orders.branch import bound, improved
from superscaler.planner.orders.lists import Way, listed
from superscaler.planner.orders.measured import MANY, measured, rows_of
from superscaler.planner.orders.works import Rows, Works, finish, kept_by
from superscaler.planner.own.stages import even
from superscaler.planner.reasons import reasons
from superscaler.planner.search import Answer, search
from superscaler.planner.space import Choice
from superscaler.planner.whole.improve import improve
from superscaler.planner.whole.lines import predicted
from superscaler.planner.whole.programs import Programs
from superscaler.planner.written import text_of
from superscaler.plans import resolve
from superscaler.plans.lib import schedules
from superscaler.plans.lib.order_text import print_order, table_of_order
from superscaler.plans.lib.tables import check
from superscaler.simulate.predict import simulate
from superscaler.simulate.system import PLAIN
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal
from tests.helpers.sweeps import few, slow

TINY = "gpt2:size=tiny,layers=4,batch=8"
# Kernels take the time, not their starts, and the head is as long as some blocks.
GPT = "gpt2:layers=8,hidden=1024,heads=16,seq=256,vocab=16384,batch=8,device=meta"
WHERE = "pp = 4, rows = 1, no recompute, no interlaced, zero = 0"


def works_of(seconds: Sequence[dict[str, float]], rooms: Sequence[int], count: int, send: float = 0.0) -> Works:
    """Return the works of a pipeline with one stage on each device."""
    stages = len(seconds)
    return Works(tuple(range(stages)), tuple(seconds), (send,) * (stages - 1), tuple(rooms), (0.0,) * stages, count)


# Brute force.


def _rows(count: int, kinds: str, room: int, done: tuple[int, ...] = ()) -> Iterator[str]:
    """Yield all orders of a stage whose device keeps at most `room` activations."""
    done = done or (0,) * len(kinds)
    if min(done) == count:
        yield ""
    for at, kind in enumerate(kinds):
        more = (*done[:at], done[at] + 1, *done[at + 1 :])
        if done[at] < (done[at - 1] if at else count) and more[0] - more[-1] <= room:
            yield from (kind + rest for rest in _rows(count, kinds, room, more))


def _step(works: Works, rows: Sequence[str]) -> float:
    """Return the seconds of a step by the longest path, work by work; infinity where devices wait for each other."""
    last = len(rows) - 1
    ends = dict[tuple[int, str, int], float]()

    def end(stage: int, at: int, waits: frozenset[tuple[int, int]] = frozenset()) -> float:
        if (stage, at) in waits:
            return inf
        kind = rows[stage][at]
        number = rows[stage][:at].count(kind)
        if (known := ends.get((stage, kind, number))) is not None:
            return known
        needs, waits = [0.0], waits | {(stage, at)}
        if at:
            needs.append(end(stage, at - 1, waits))
        other = stage - 1 if kind == "F" else stage + 1
        if kind != "W" and 0 <= other <= last:
            # The n-th work of this kind there, a half or not.
            there = [n for n, k in enumerate(rows[other]) if (k == "F") == (kind == "F") and k != "W"]
            needs.append(end(other, there[number], waits) + works.sends[min(stage, other)])
        found = max(needs) + works.seconds[stage][kind]
        if found < inf:
            ends[stage, kind, number] = found
        return found

    return max(end(s, len(row) - 1) + works.after[s] for s, row in enumerate(rows))


@pytest.mark.parametrize("seed", few(range(40), *range(1, 8)))
def test_branch_and_bound_equals_brute_force(seed: int) -> None:
    drawn = random.Random(seed)
    stages, count, halves = drawn.choice([(2, 3, True), (2, 5, False), (3, 3, False), (3, 4, False), (2, 4, False)])
    seconds = [{kind: float(drawn.randint(1, 6)) for kind in "FIW"} for _ in range(stages)]
    seconds = [{**own, "B": own["I"] + own["W"]} for own in seconds]
    split = frozenset(s for s in range(stages) if halves and drawn.random() < 0.7)
    rooms = [drawn.randint(1, count) for _ in range(stages)]
    works = replace(works_of(seconds, rooms, count, drawn.choice([0, 1, 3])), split=split)
    works = replace(works, after=tuple(float(drawn.choice([0, 2])) for _ in range(stages)))
    every = [list(_rows(count, "FIW" if s in split else "FB", rooms[s])) for s in range(stages)]
    best = min(_step(works, rows) for rows in itertools.product(*every))
    found, order, is_proved = improved(works, *listed(works, Way(split, works.rooms)), nodes=10**6)
    assert (found, is_proved) == (best, True)
    assert _step(works, ["".join(kind for _, kind in row) for row in order]) == best
    assert bound(works) <= best


# The literature.


@pytest.mark.parametrize(("p", "m"), few([(2, 6), (4, 8), (4, 16), (8, 16), (8, 32)], 0, 2))
def test_orders_idle_no_longer_than_those_of_zero_bubbles(p: int, m: int) -> None:
    """Qi et al., 2023: ZB-H1 idles (p - 1)(F + I - W) with p activations. With 2p - 1, ZB-H2 has no bubble between the
    first and the last work of a device: what is left are the (p - 1) F before the first work of the last one.
    """
    for own in ({"F": 1.0, "I": 1.0, "W": 1.0}, {"F": 1.0, "I": 1.25, "W": 0.75}):
        seconds, work = [{**own, "B": own["I"] + own["W"]}] * p, m * sum(own.values())
        for most, idle in ((p, (p - 1) * (own["F"] + own["I"] - own["W"])), (2 * p - 1, (p - 1) * own["F"])):
            works, kept = works_of(seconds, [most] * p, m), [p - d for d in range(p)]
            found = best_order(works, kept, range(p))
            table = table_of_order(print_order(found.rows), p, m)
            assert max(kept_by([(w.stage, w.kind) for w in row]) for row in table) <= most
            assert found.seconds - work <= idle * 1.001
            # 1F1B is the best order where no backward is split.
            assert best_order(works, kept).seconds == work + (p - 1) * sum(own.values())


@pytest.mark.parametrize("seed", few(range(60), *range(6)))
def test_orders_are_tables_that_run_in_the_room_there_is(seed: int) -> None:
    """Of one or two stages on each device, in rounds or in a V, of few microbatches or many."""
    drawn = random.Random(seed)
    devices, count, laps = drawn.choice([2, 3, 4]), drawn.choice([1, 3, 5, 8, 33]), drawn.choice([1, 2])
    ways = [*range(devices)], drawn.choice([[*range(devices)], [*reversed(range(devices))]])
    place = tuple(device for way in ways[:laps] for device in way)
    seconds = [{kind: drawn.uniform(1, 4) for kind in "FIW"} for _ in place]
    seconds = [{**own, "B": own["I"] + own["W"]} for own in seconds]
    rooms = [drawn.randint(laps, 2 * devices * laps) for _ in range(devices)]
    works = replace(works_of(seconds, rooms, count), place=place, after=(0.0,) * devices)
    can_split = [stage for stage in range(len(place)) if drawn.random() < 0.7]
    found = best_order(works, [min(room, count * laps) for room in works.rooms], can_split)
    if found.seconds == inf:
        # No part of the lists of few microbatches repeats: a search starts from a schedule, which is an order then.
        assert (laps, count, found.rows) == (2, 33, [])
        return
    assert bound(works, can_split) <= found.seconds * (1 + 1e-9)
    table = table_of_order(print_order(found.rows), devices, count)
    check(table)
    assert [[(work.stage, work.kind) for work in row] for row in table] == found.rows
    assert all(kept_by(row) <= room for row, room in zip(found.rows, works.rooms, strict=True))
    assert {stage for row in found.rows for stage, kind in row if kind == "I"} <= {*can_split}


def test_orders_of_many_microbatches_are_short_text() -> None:
    """Messages that take a third of a forward are hidden by a forward more, at any number of microbatches."""
    works = works_of([{"F": 3.0, "B": 6.0}] * 4, [8] * 4, 64, send=1.0)
    plain = replace(works, rooms=(4, 3, 2, 1))
    found, before = best_order(works, [4, 3, 2, 1]), finish(plain, _table("pipeline_1f1b", 4, 64))
    text = print_order(found.rows)
    assert found.seconds < 0.93 * before
    assert len(text) < 80
    assert finish(works.of(256), [[(w.stage, w.kind) for w in row] for row in table_of_order(text, 4, 256)]) < inf


def _table(name: str, *sizes: int) -> Rows:
    return [[(work.stage, work.kind) for work in row] for row in schedules.RULES[name](*sizes)]


# Plans.


@pytest.mark.parametrize(
    ("plan", "rows"),
    [
        ("pipeline_1f1b:4,microbatches=8", _table("pipeline_1f1b", 4, 8)),
        *slow(
            ("zbv:4,microbatches=8", _table("zbv", 4, 8)),
            ("interleaved:4,microbatches=8,chunks=2", _table("interleaved", 4, 8, 2)),
        ),
    ],
)
def test_works_take_the_seconds_of_the_simulated_step(plan: str, rows: Rows) -> None:
    """Within half a percent: in the order that was simulated, they end when the step does."""
    cluster = ss.Cluster.parse("a100:1x4")
    program = compile_graph(graph_of(GPT), resolve(plan), cluster, certified=False).program
    found = simulate(program, cluster)
    works = measured(found, rows)
    assert works is not None
    halved = works.halved
    order = [
        [(s, "B" if kind == "I" and s not in halved else kind) for s, kind in row if kind != "W" or s in halved]
        for row in rows
    ]
    step = finish(replace(works, split=halved), order)
    assert step == pytest.approx(found.prediction.step_seconds, rel=0.005)


def test_the_last_halves_of_a_device_have_the_fewest_gradients_to_send() -> None:
    """Works end as before, and the simulated step is shorter: the network sends gradients beside the other halves."""
    graph, cluster, stages = graph_of(GPT), ss.Cluster.parse("a100:4x1"), range(4)
    choice = Choice(2, 1, 2, 1, 4, schedule="zbv", chunks=2, blocks=(1, 1, 3, 3))
    rows = rows_of(choice, frozenset(stages))
    found = simulate(compile_graph(graph, resolve(choice.spec), cluster, certified=False).program, cluster)
    known = measured(found, rows)
    assert known is not None
    works = replace(known, split=frozenset(stages), rooms=(MANY, MANY))
    late = [sorted(row, key=lambda work: work[0] if work[1] == "W" else -1) for row in rows]
    ended = _ended(works, late)
    assert finish(works, ended) == finish(works, late)
    short, long = (
        ss.compile(graph, replace(choice, schedule="ordered", order=print_order(order)).spec, cluster).simulate()
        for order in (ended, late)
    )
    assert short.step_seconds < 0.99 * long.step_seconds


def test_a_stage_without_second_halves_has_whole_backwards() -> None:
    """Of the first stage of a small Mixtral, one part has all gradients of weights, and is not split."""
    cluster, plan = ss.Cluster.parse("a100:1x4"), "zb_h1:2,microbatches=1 x expert_parallel:2"
    program = compile_graph(graph_of("mixtral:size=tiny,batch=36,device=meta"), resolve(plan), cluster, False).program
    found, rows = simulate(program, cluster), [[(stage, kind) for kind in "FIW"] for stage in (0, 1)]
    works = measured(found, rows)
    assert works is not None
    assert works.halved == {1}
    whole = replace(works, split=works.halved)
    step = finish(whole, [[(0, "F"), (0, "B")], rows[1]])
    assert step == pytest.approx(found.prediction.step_seconds, rel=0.05)


@pytest.mark.parametrize(
    "plan",
    [Choice(1, 1, 2, 1, 24), *slow(Choice(1, 1, 2, 1, 24, schedule="zbv", chunks=2))],
    ids=lambda plan: plan.spec,
)
def test_works_of_a_whole_plan_are_those_of_a_step_of_few_microbatches(plan: Choice) -> None:
    """To the last bit in a step of four; of more, less belongs to the first one, which waits for the starts of kernels
    and messages, and adds no gradients.
    """
    cluster, large = ss.Cluster.parse("a100:1x2"), graph_of(GPT.replace("layers=8,", f"layers={2 * plan.chunks},"))
    own, spec = replace(plan, microbatches=4), replace(plan, microbatches=4).spec
    graph, large = of_batch(large, 4), of_batch(large, 24)
    rows = _table("pipeline_1f1b" if plan.chunks == 1 else "zbv", 2, 4)
    few = measured(simulate(compile_graph(graph, resolve(spec), cluster, certified=False).program, cluster), rows)
    assert predicted(graph, cluster, None, PLAIN, own).works == few
    whole = predicted(large, cluster, None, PLAIN, plan).works
    assert few is not None
    assert whole is not None
    assert (whole.place, whole.count) == (few.place, 24)
    assert [min(room, 24) for room in whole.rooms] == [min(room, 24) for room in few.rooms]
    assert whole.after == pytest.approx(few.after)
    assert whole.sends == pytest.approx(few.sends, abs=0.02 * few.seconds[0]["F"])
    for more, less in zip(whole.seconds, few.seconds, strict=True):
        assert more == pytest.approx(less, rel=0.025)


# How often the search of `answer` compiled a plan.
COMPILED = Counter[str]()


@cache
def answer() -> Answer:
    """Return the answer of a search among plans of one stage on each device."""

    def counted(spec: str) -> object:
        COMPILED[spec] += 1
        return resolve(spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        for name, module in [*sys.modules.items()]:
            if name.startswith("superscaler.planner.") and hasattr(module, "resolve"):
                patch.setattr(module, "resolve", counted)
        return search(graph_of(GPT), "a100:1x4", where=f"{WHERE}, chunks = 1, no chimera")


def test_a_search_compiles_no_pipeline_twice() -> None:
    """The works of the best one, whose order is improved, come from its own program."""
    origins = [found.spec for found in answer().plans if found.choice.schedule != "ordered"]
    assert origins
    assert {COMPILED[spec] for spec in origins} == {1}


def test_a_search_improves_the_order_of_its_best_pipeline() -> None:
    """It is shorter than the schedules of the space, says so, and its text alone is the plan."""
    best, *others = answer().plans
    assert best.choice.schedule == "ordered"
    assert {"1f1b", "zb_h1"} == {found.choice.schedule for found in others}
    assert best.prediction.step_seconds < 0.995 * min(found.prediction.step_seconds for found in others)
    assert answer().bound <= best.prediction.step_seconds
    assert reasons(answer())["schedule"] == "ordered: 1f1b +14%, zb_h1 +2%"
    names = dict[str, str]()
    exec(text_of(answer(), "GPT-2", {}, "search"), names)
    again = ss.compile(graph_of(GPT), names["PLAN"], "a100:1x4").simulate()
    assert again.step_seconds == best.prediction.step_seconds


@pytest.mark.parametrize(("more", "is_measured"), [(-2e-4, True), (0.0, False), (2e-4, False)])
def test_stages_of_equal_flops_are_measured_where_they_could_be_better(more: float, is_measured: bool) -> None:
    """Not where they are the plan's own, or where its works say that they are slower."""
    graph, cluster, asked = graph_of(GPT), ss.Cluster.parse("a100:1x4"), list[Choice]()
    (origin,) = (found for found in answer().plans if found.choice.schedule == "zb_h1")
    programs = Programs(graph, cluster, None, PLAIN, found=[origin])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "works", lambda _, choice, ahead: asked.append(choice))
        assert improve(programs, lambda choice: [more] * 4, lambda choice: False) is None
        assert asked == [replace(origin.choice, blocks=())] * is_measured
        programs.found[:] = [replace(origin, choice=replace(origin.choice, blocks=()))]
        assert improve(programs, lambda choice: pytest.fail("it has such stages"), lambda choice: False) is None
    assert len(asked) == is_measured


def test_stages_of_equal_flops_take_the_seconds_that_other_stages_say() -> None:
    """Within a tenth of a block, of stages that have a block more or less."""
    graph, cluster = graph_of(GPT), ss.Cluster.parse("a100:1x4")
    programs, estimator = Programs(graph, cluster, None, PLAIN), Estimator(graph, cluster, Menu(graph, cluster))
    (origin,) = (found.choice for found in answer().plans if found.choice.schedule == "zb_h1")
    uneven = replace(origin, blocks=(3, 2, 2, 1))
    given, equal, more = programs.works(uneven), programs.works(replace(origin, blocks=())), even(estimator, uneven)
    assert given is not None
    assert equal is not None
    assert {*more} != {0.0}
    for own, other, seconds in zip(given.seconds, equal.seconds, more, strict=True):
        assert other["F"] + other["B"] == pytest.approx(own["F"] + own["B"] + seconds, abs=0.1 * max(more))


def test_an_improved_order_equals_the_model_in_float64() -> None:
    plan = answer().best.choice
    spec = f"pipeline:4,microbatches=8,schedule={plan.order}"
    equal(graph_of(TINY, "SGD"), spec, 4)


@pytest.mark.slow
def test_an_improved_order_is_shorter_than_all_schedules_of_the_library() -> None:
    """A heavy head on 4 stages: with the best blocks of the space, and with those of equal FLOPs."""
    model = "gpt2:layers=16,hidden=1024,heads=16,seq=512,vocab=50304,batch=16,device=meta"
    found = search(graph_of(model), "a100:1x4", where="pp = 4, no recompute, no interlaced, zero = 0")
    best, *others = found.plans
    assert best.choice.schedule == "ordered"
    steps = [plan.prediction.step_seconds for plan in others if plan.prediction.fits]
    names = ("pipeline_1f1b", "zb_h1", "zb_h2", "interleaved", "zbv", "dualpipe_v", "chimera", "interlaced")
    for name, count in itertools.product(names, (8, 16)):
        steps.append(ss.compile(graph_of(model), f"{name}:4,microbatches={count}", "a100:1x4").simulate().step_seconds)
    assert best.prediction.step_seconds < 0.98 * min(steps)


@pytest.mark.slow
def test_an_improved_order_is_shorter_where_memory_is_short() -> None:
    """ZBV alone fits, whose order is for stages that are alike."""
    model, memory = "gpt2:layers=16,hidden=1024,heads=16,seq=512,vocab=50304,batch=16,device=meta", 5_900_000_000
    where = "pp = 4, rows = 2, no recompute, no interlaced, zero = 0, no co_shard, no chunked, no swap"
    best = search(graph_of(model), "a100:1x4", memory, where=where).best
    assert (best.choice.schedule, best.prediction.fits) == ("ordered", True)
    for name in ("pipeline_1f1b", "zb_h1", "zb_h2", "interleaved", "zbv", "dualpipe_v", "chimera", "interlaced"):
        p = ss.compile(graph_of(model), f"{name}:4,microbatches=8", "a100:1x4").simulate(memory)
        assert not p.fits or best.prediction.step_seconds < 0.99 * p.step_seconds, name


@pytest.mark.slow
@pytest.mark.parametrize("clause", ["schedule = zb_h1", "no ordered"])
def test_an_order_of_its_own_satisfies_the_constraints(clause: str) -> None:
    where = f"{WHERE}, {clause}"
    choices = [plan.choice for plan in search(graph_of(GPT), "a100:1x4", where=where).plans]
    assert left(choices, read(where)) == choices
    assert "ordered" not in {choice.schedule for choice in choices}
