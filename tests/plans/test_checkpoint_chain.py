"""Chains: as fast as the best of all choices, never over the limit, in the model of bytes and as a step runs."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import superscaler as ss
from superscaler.errors import InputError
from superscaler.ir.parts import block_of
from superscaler.plan import Plan
from superscaler.plans import resolve
from superscaler.plans.lib.checkpoint_chain import SLOTS, Run, Unit, cheapest, choose, least
from superscaler.plans.lib.shared import stretches
from superscaler.runtime.step import Step
from tests.helpers.graphs import graph_of
from tests.helpers.live import Live
from tests.helpers.ran import equal, on_ranks

DROPPED = "gpt2:size=tiny,layers=4,dropout=0.1"


def cost(units: list[Unit], runs: list[Run]) -> tuple[float, int]:
    """Return the time that runs add and the most bytes at once, by walking the backward."""
    run_of = {n: (first, end) for first, end in runs for n in range(first, end)}
    kept = most = 0
    seconds = 0.0
    for n, unit in enumerate(units):
        first, end = run_of.get(n, (n, n + 1))
        if n not in run_of:
            kept += unit.tape
            most = max(most, kept + unit.most)
        elif n == first:
            own = units[first:end]
            kept += unit.read
            seconds += sum(u.seconds for u in own)
            most = max(most, kept + sum(u.tape for u in own) + max(u.most for u in own))
    return seconds, most


def all_runs(units: list[Unit], first: int = 0) -> Iterator[list[Run]]:
    if first == len(units):
        yield []
        return
    yield from all_runs(units, first + 1)
    for end in range(first + 1, len(units) + 1):
        if units[end - 1].is_fixed:
            return
        yield from ([(first, end), *rest] for rest in all_runs(units, end))


def drawn(count: int, seed: int) -> list[Unit]:
    random = np.random.default_rng(seed)
    numbers = random.integers(1, 30, (count, 4)).tolist()
    return [Unit(float(s), 5 * tape, read, most, random.random() < 0.15) for s, tape, read, most in numbers]


@pytest.mark.parametrize(("count", "seed"), [*itertools.product((1, 2, 5, 8), range(3)), (10, 0)])
def test_as_fast_as_the_best_of_all_choices(count: int, seed: int) -> None:
    units = drawn(count, seed)
    found = [cost(units, runs) for runs in all_runs(units)]
    low = min(most for _, most in found)
    assert least(units) == low
    assert choose(units, low - 1) is None
    for limit in {low, low + 7, (low + max(most for _, most in found)) // 2, max(most for _, most in found)}:
        runs = choose(units, limit)
        assert runs is not None
        seconds, most = cost(units, runs)
        assert most <= limit
        assert seconds == min(s for s, most in found if most <= limit)


def test_long_chains_of_many_sizes_stay_under_their_limit() -> None:
    random = np.random.default_rng(0)
    numbers = random.integers(1, 10**9, (60, 3)).tolist()
    units = [Unit(float(s), 5 * tape, read) for s, tape, read in numbers]
    limit = sum(u.tape for u in units) // 4
    runs = choose(units, limit)
    assert runs is not None
    seconds, most = cost(units, runs)
    assert most <= limit
    # What is lost by rounding is a part of the limit.
    tighter = choose(units, limit - limit * len(units) // SLOTS)
    assert tighter is None or seconds <= cost(units, tighter)[0]


def peak(plan: Plan) -> int:
    """Return the most bytes on the first device in a second step: weights, optimizer state, and all that it makes."""
    batch = plan.compiled.graph.captured.batch

    def run(step: Step) -> int:
        step(batch)
        state = step.state.updates.optimizer.state.values() if step.state.updates.optimizer else ()
        kept = [*step.state.weights.values(), *(x for some in state for x in some.values() if x.ndim)]
        with Live() as live:
            step(batch)
        return sum(x.nbytes for x in kept) + live.peak

    return on_ranks(plan, run)[0]


@pytest.mark.parametrize(
    "spec",
    [
        DROPPED,
        pytest.param("llama:size=tiny,layers=6", marks=pytest.mark.slow),
        pytest.param("swin:size=tiny", marks=pytest.mark.slow),
    ],
)
def test_a_step_is_never_over_its_limit(spec: str) -> None:
    graph, found = graph_of(spec, "SGD"), list[int]()
    with pytest.raises(InputError, match="cannot be met") as error:
        ss.compile(graph, resolve("chain_recompute:limit=1"), "local:1")
    low = int(re.findall(r"needs up to (\d+) bytes", str(error.value))[0])
    for limit in (low, 2 * low):
        plan = ss.compile(graph, resolve(f"chain_recompute:limit={limit}"), "local:1")
        assert peak(plan) <= limit
        found.append(sum(bool(op.origin) for op in plan.compiled.graph.model.ops))
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_the_largest_microbatch_counts() -> None:
    """Of a batch of 8 in 5 microbatches, with 2 rows, as in 4."""
    graph, found = graph_of(DROPPED, "SGD"), set[str]()
    for count in (4, 5):
        with pytest.raises(InputError, match="cannot be met") as error:
            ss.compile(graph, f"chain_recompute:microbatches={count},limit=1", "local:1")
        found.add(str(error.value))
    assert len(found) == 1


def recomputed(graph: ss.Graph) -> list[list[str]]:
    """Return the blocks of each region, in order."""
    found: dict[str, dict[str, None]] = {}
    for op in graph.forward_ops:
        if op.region:
            found.setdefault(op.region, {})[block_of(op.module).rpartition(".")[2]] = None
    return [list(blocks) for blocks in found.values()]


def test_runs_of_the_square_root_or_a_number_of_blocks() -> None:
    graph = graph_of("gpt2:size=tiny,layers=4,batch=16", "SGD")
    for every, runs in (("sqrt", ["01", "23"]), ("3", ["012", "3"]), ("9", ["0123"])):
        plan = f"chain_recompute:every={every}"
        made = (equal(graph, plan, 1) if every == "sqrt" else ss.compile(graph, plan, "local:1").compiled).graph
        assert ["".join(blocks) for blocks in recomputed(made)] == runs


def test_measured_times_say_which_blocks_are_cheap(tmp_path: Path) -> None:
    graph, file = graph_of("gpt2:size=tiny,layers=4,batch=16", "SGD"), tmp_path / "times.json"
    seconds: dict[str, Any] = {block.path: 1.0 for block in graph.blocks}
    file.write_text(json.dumps(seconds | {graph.blocks[1].path: 0.1}))
    # The first block to be computed again, as the limit falls.
    found = (cheapest(graph, limit, str(file), 1) for limit in range(10**8, 10**6, -(4 * 10**5)))
    ((first, end),) = next(runs for runs in found if runs)
    assert [path for path, _ in stretches(graph)[first:end]] == [graph.blocks[1].path]


REFUSED = [
    ("chain_recompute", "needs limit=BYTES"),
    ("chain_recompute:limit=1e9,every=sqrt", "one of the two"),
    ("chain_recompute:every=sqrt,times=x", "one of the two"),
    ("chain_recompute:every=0", "chain_recompute:every=0: give sqrt"),
    ("chain_recompute:every=root", "chain_recompute:every=root: give sqrt"),
    ("chain_recompute:limit=-5", "limit=-5 cannot be met"),
    ("chain_recompute:limit=nan", "limit=nan"),
    ("chain_recompute:limit=1e9,times=/nowhere", "times=/nowhere cannot be read: No such file"),
]


@pytest.mark.parametrize(("plan", "told"), REFUSED)
def test_careless_options_are_told_in_one_line(plan: str, told: str) -> None:
    with pytest.raises(InputError, match=told) as error:
        ss.compile(graph_of("gpt2:size=tiny", "SGD"), resolve(plan), "local:1")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"transformer.h.0": "x"}', '{"transformer.h.0": 1}', '{"transformer.h.0": -1}']
)
def test_times_that_do_not_hold_are_told(tmp_path: Path, text: str) -> None:
    file = tmp_path / "times.json"
    file.write_text(text)
    with pytest.raises(InputError, match=f"times={file} (is no|has no seconds for transformer.h)") as error:
        ss.compile(graph_of("gpt2:size=tiny", "SGD"), resolve(f"chain_recompute:limit=1e9,times={file}"), "local:1")
    assert "\n" not in str(error.value)
