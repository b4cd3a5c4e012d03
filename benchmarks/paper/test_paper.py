"""The plans of the paper's evaluation, as its scripts write them, are equal to the model at a small shape."""

from __future__ import annotations

import re
import sys
from functools import partial
from math import prod
from pathlib import Path

import pytest

import superscaler as ss
from superscaler.cluster import Cluster
from superscaler.ir.graph import Graph
from superscaler.simulate.predict import fullest
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal
from tests.helpers.sweeps import few, slow

PAPER = Path(__file__).parent
sys.path[:0] = [str(PAPER), str(PAPER.parent)]

import e6  # noqa: E402
import e12  # noqa: E402
from families import bandwidth  # noqa: E402
from points import NIC, SLOW_NIC, Point, Rows, captured, least, of_batch, predicted  # noqa: E402
from systems import BEYOND, MAKERS, SPACES  # noqa: E402

ROWS = [
    ("gpt3", "co-shard", "2x1x1/2"),
    ("mbart", "interlaced", "2x1"),
    ("gpt3", "co-shard", "2x2x1/2"),
    ("gpt3", "Megatron-LM, Alpa", "2x2x1+"),
    ("gpt3", "Megatron-LM, Alpa", "1x2x2"),
    ("gpt3", "DeepSpeed", "2x2"),
    ("gpt3", "DeepSpeed", "2x1 offload"),
    ("mbart", "Megatron-LM", "2x2x1+"),
    ("mbart", "DeepSpeed", "2x2 offload"),
    ("mbart", "interlaced", "2x2"),
    ("mbart", "interlaced, recompute late", "2x2"),
    ("swin", "Megatron-LM", "2x2x1+"),
    ("swin", "DeepSpeed", "2x2"),
    ("swin", "co-shard, first 4", "2x2x1/2"),
    ("alphafold2", "DAP + DP", "2x2+"),
    ("alphafold2", "DeepSpeed", "2x1"),
    ("alphafold2", "3F1B", "2x1+"),
    ("alphafold2", "3F1B", "2x2+"),
]


SMALL_GPT3 = f"{PAPER / 'gpt3.py'}:gpt3:size=tiny,vocab=320,dropout=0"
TINY_GPT3 = f"{SMALL_GPT3},seq=24"


@pytest.mark.slow
def test_resized_graph_is_predicted_as_the_captured_one() -> None:
    plan = "zero:2,stage=3,microbatches=3 x tensor_parallel:2"
    point = Point(TINY_GPT3, plan, "v100:1x4", 12, dp=2, size=2)
    graphs = Graph(of_batch(graph_of(TINY_GPT3).model, 12)), graph_of(f"{TINY_GPT3},batch=12")
    resized, whole = (predicted(ss.compile(graph, plan, point.cluster), point.cluster, point) for graph in graphs)
    assert resized == whole


@pytest.mark.parametrize(("family", "system", "config"), few(ROWS, 0))
def test_plan_is_equal_to_the_model(family: str, system: str, config: str) -> None:
    devices = prod(map(int, config.rstrip("+").partition(" ")[0].partition("/")[0].split("x")))

    model = TINY_GPT3 if family == "gpt3" else f"{family}:size=tiny"
    point = MAKERS[system](partial(Point, model, cluster="", batch=512), config)
    rows = point.few * point.dp
    # The batch of other tests, where it can be cut so.
    equal(graph_of(point.model if 8 % rows == 0 else f"{point.model},batch={rows}"), point.spec, devices)


@pytest.mark.parametrize(("system", "config"), [*slow(("Megatron-LM, Alpa", "2x2x1+")), ("DeepSpeed", "2x2")])
def test_bound_on_memory_is_below_the_peak(system: str, config: str) -> None:
    cluster = "v100:1x4"
    point = MAKERS[system](partial(Point, TINY_GPT3, cluster=cluster, batch=512), config)
    model = of_batch(captured(f"{SMALL_GPT3},seq=256,batch=8,device=meta"), point.few * point.dp)
    states, scores = least(model, point)
    program = ss.compile(Graph(model), point.spec, cluster).compiled.program
    peak = fullest(program, Cluster.parse(cluster)).peak
    assert 0.3 * peak < states + scores < peak


def test_each_system_of_the_evaluation_is_compared_with_the_model() -> None:
    assert {(family, system) for family, system, _ in ROWS} >= {
        (f, s) for (f, _), systems in SPACES.items() for s in systems
    }


@pytest.mark.parametrize(("family", "plan"), slow(*((family, plan) for family, _, plan in BEYOND)))
def test_later_plan_is_equal_to_the_model(family: str, plan: str) -> None:
    model = {"gpt3": TINY_GPT3, "gpt3, no scores": "gpt3:size=tiny"}.get(family, f"{family}:size=tiny")
    small = re.sub(r"(?<=[:=])[48](?=[ ,]|$)", "2", plan).replace("{m}", "4")
    equal(graph_of(model), small, 8 if "ring" in plan else 4)


def test_bandwidth_that_would_make_the_papers_number_is_found_from_two_bandwidths() -> None:
    def found(network: float) -> dict[int, dict[str, dict[str, object]]]:
        seconds = {"ours": 100.0, "other": 100.0 + 1200 / network}
        return {32: {name: {"seconds": s, "plan": name, "peak": 1.0} for name, s in seconds.items()}}

    full, half = found(NIC), found(SLOW_NIC)
    assert bandwidth(full, half, "ours", "other", 3.0) == "6 GB/s between servers would make 3"
    assert bandwidth(full, half, "other", "ours", 3.0) == "no bandwidth between servers makes it"


def test_minutes_count_the_compiling_of_a_program_once_and_its_simulation_on_each_cluster() -> None:
    rows = Rows(file=None)
    for key, cluster in (("a", "v100:4x8"), ("b", "h100:4x8"), ("c", "v100:1x4")):
        cpu = {"capture": 60.0, "compile": 120.0, "certificate": 0.0, "simulate": 30.0}
        rows.known[key] = {"model": "m", "plan": "p", "cluster": cluster, "cpu": cpu}
        rows.asked[key] = "e2" if key != "c" else "e3"
    assert e12.spent(rows) == [
        ["E2", "1.0", "2.0", "0.0", "1.0", "4.0"],
        ["E3", "1.0", "2.0", "0.0", "0.5", "3.5"],
        ["all", "2.0", "4.0", "0.0", "1.5", "7.5"],
    ]
    assert e12.halves(rows) == (4.0, 3.5)


def test_largest_size_is_unknown_while_that_of_a_larger_one_is() -> None:
    def largest(*fits: bool | None) -> int | None:
        return e6.largest({n: {"it": None if f is None else {"fits": f}} for n, f in enumerate(fits, 1)}, "it", dict)

    assert [largest(True, False), largest(False, False), largest(True, None), largest(None, True)] == [1, 0, None, 2]


def test_system_whose_plans_are_all_too_large_shows_the_one_that_is_cut_furthest() -> None:
    rows, points = Rows(file=None), [Point("m", f"plan:{n}", "v100:1x4", 8) for n in (1, 2)]
    rows.known = {point.key: {"plan": point.plan, "error": "at least 40 GB", "fits": False} for point in points}
    assert (rows.best([points]) or {})["plan"] == "plan:2"
