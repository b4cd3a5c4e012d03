"""Random sPrograms on captured models are equal to one device, or refused as a cycle that their own orders made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from random_sprograms import MODELS, captured, random_sprogram

import superscaler as ss
from superscaler.errors import ScheduleError
from superscaler.verbs import Graph
from tests.graphs import graph_of


def check(graph: Graph, seeds: range, apart: float | None = None, more: Sequence[str] = ()) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        for kind in ("free", "layered"):
            cluster = ss.Cluster.local(1 + seed % 4)
            try:
                plan = ss.compile(graph, random_sprogram(seed, kind, apart, more), cluster)
            except ScheduleError as error:
                known = ("op_order" in str(error) and "cycle" in str(error)) or "Use 1 microbatch" in str(error)
                known |= "so it changes nothing" in str(error)
                found["refused" if known else str(error)] += 1
                continue
            result = plan.verify()
            assert result["equal"], (seed, kind, result)
            found["equal"] += 1
    assert set(found) <= {"equal", "refused"}
    return found


REWRITES = ("split", "copies", "stale", "early")
# Seeds, how much is computed again on the parts of its ops, and rewrites.
SORTS: list[tuple[range, float | None, tuple[str, ...]]] = [
    (range(3), None, ()),
    (range(2), 0.4, ()),
    (range(10, 11), None, ("split",)),
    (range(11, 12), 0.4, ("split",)),
    (range(20, 21), 0.4, REWRITES),
    (range(21, 22), None, ("regather", *REWRITES[1:])),
]


@pytest.mark.parametrize("model", list(MODELS))
def test_random_sprograms_are_equal_or_refused(model: str) -> None:
    found = sum((check(captured(model), *sort) for sort in SORTS), Counter[str]())
    assert found["equal"] > found["refused"]
    check_again(captured(model), range(1))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("model", list(MODELS))
def test_many_more_random_sprograms(model: str, block: int) -> None:
    check(captured(model), range(1000 + 20 * block, 1020 + 20 * block))


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gpt2:size=tiny", "llama:size=tiny"])
def test_random_sprograms_on_transformers(spec: str) -> None:
    check(graph_of(spec, "SGD"), range(20))


def check_again(graph: Graph, seeds: range) -> None:
    """What can run can run with parts of it computed again, on the parts of their ops."""
    for seed in seeds:
        for kind in ("free", "layered"):
            cluster = ss.Cluster.local(1 + seed % 4)
            try:
                ss.compile(graph, random_sprogram(seed, kind), cluster)
            except ScheduleError:
                continue
            result = ss.compile(graph, random_sprogram(seed, kind, 0.0), cluster).verify()
            assert result["equal"], (seed, kind, result)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
@pytest.mark.parametrize("model", list(MODELS))
def test_many_more_split_backwards(model: str, block: int) -> None:
    check(captured(model), range(1000 + 20 * block, 1020 + 20 * block), more=("split",))
    check(captured(model), range(1000 + 20 * block, 1020 + 20 * block), apart=0.4, more=("split",))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(15))
@pytest.mark.parametrize("model", list(MODELS))
def test_many_more_rewrites_are_equal(model: str, block: int) -> None:
    check(captured(model), range(3000 + 10 * block, 3010 + 10 * block), apart=0.4, more=REWRITES)
    check(captured(model), range(3000 + 10 * block, 3010 + 10 * block), more=("regather", *REWRITES[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
@pytest.mark.parametrize("model", list(MODELS))
def test_much_more_is_computed_again(model: str, block: int) -> None:
    check_again(captured(model), range(1000 + 20 * block, 1020 + 20 * block))
    check(captured(model), range(1000 + 20 * block, 1020 + 20 * block), apart=0.4)
