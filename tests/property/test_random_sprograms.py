"""Random sPrograms on captured models are equal to one device, or refused as a cycle that their own orders made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product

import pytest

import superscaler as ss
from superscaler.errors import ScheduleError
from superscaler.ir.text.program import parse_program, print_program
from superscaler.verbs import Graph
from tests.helpers.graphs import graph_of
from tests.helpers.ran import SProgram, equal
from tests.helpers.random_sprograms import MODELS, captured, random_sprogram
from tests.helpers.sweeps import few

REWRITES = ("split", "blocks", "copies", "tapes", "stale", "early")
REGATHERED = ("regather", *REWRITES[1:])
UNROLLED = ("unroll", "blocks", "copies", "tapes", "early")
# Seeds, how much is computed again on the parts of its ops, and rewrites.
SORTS: list[tuple[range, float | None, tuple[str, ...]]] = [
    (range(1), None, ()),
    (range(1, 2), 0.4, ()),
    (range(10, 11), None, ("split",)),
    (range(20, 21), 0.4, REWRITES),
    (range(21, 22), None, REGATHERED),
    (range(2, 3), 0.4, ("nearby", "kept", "copies")),
    (range(3, 4), None, ("nearby", "regather", "early")),
    (range(33, 34), 0.4, UNROLLED),
]
# Each of the first two sorts shows when kernels read rows that are not dense, and when chunks of few queries see keys
# as if these were as many; the first, when the dim of the values is cut.
RING: list[tuple[range, float | None, tuple[str, ...]]] = [
    (range(1), None, ("blocks",)),
    (range(6, 7), 0.4, ("blocks",)),
]


KINDS = ("free", "layered")


def check(
    graph: Graph,
    seeds: range,
    apart: float | None = None,
    more: Sequence[str] = (),
    is_trained: bool = False,
    kinds: Sequence[str] = KINDS,
) -> Counter[str]:
    """Compare random plans, in the trained dtype too if `is_trained`, and read their programs back; count verdicts."""
    found: Counter[str] = Counter()
    for seed, kind in product(seeds, kinds):
        sprogram = random_sprogram(seed, kind, apart, more)
        try:
            verdict = ask(graph, sprogram, 1 + seed % 4, is_trained)
        except ScheduleError as error:
            known = ("op_order" in str(error) and "cycle" in str(error)) or "Use 1 microbatch" in str(error)
            known |= "so it changes nothing" in str(error)
            verdict = "refused" if known else f"seed {seed}, {kind}: {error}"
        found[verdict] += 1
    assert set(found) <= {"equal", "refused"}
    return found


def ask(graph: Graph, sprogram: SProgram, world: int, is_trained: bool) -> str:
    if is_trained:
        result = ss.compile(graph, sprogram, f"local:{world}").verify()
        assert result["equal"], result
        return "equal"
    program = equal(graph, sprogram, world).program
    again = parse_program(print_program(program), program.model)
    assert [*again.devices] == [*program.devices]
    return "equal"


@pytest.mark.parametrize(("number", "model"), few(enumerate(MODELS), 0, 1, 6))
def test_random_sprograms_are_equal_or_refused(number: int, model: str) -> None:
    """Every model takes every third sort of plan, of one kind in turns; that of rings takes its own, of both."""
    graph = captured(model)
    # Plans of five layers cost most.
    sorts, kinds = (SORTS[-1:], KINDS[1:]) if model == "layers" else (SORTS[number % 3 :: 3], KINDS)
    sorts = RING if model == "ring" else sorts
    turns = [kinds if model == "ring" else [kinds[(number // 2 + n) % len(kinds)]] for n in range(len(sorts))]
    found = sum((check(graph, *sort, kinds=own) for sort, own in zip(sorts, turns, strict=True)), Counter[str]())
    assert found["equal"] > found["refused"]
    if number % 2 == 0 and model != "ring":
        check_again(graph, range(1))


@pytest.mark.parametrize(
    ("model", "drawn"),
    [
        pytest.param(
            "tied", (7001, "free", 0.4, REWRITES), id="messages that start together are in one body of a loop"
        ),
        pytest.param(
            "tied", (1090, "layered", 0.4, ("split",)), id="one of four microbatches has a gradient of its input"
        ),
        pytest.param("attention", (7006, "layered", 0.4, REWRITES), id="a tape is on the host twice"),
    ],
)
def test_code_that_was_wrong(model: str, drawn: tuple[int, str, float, tuple[str, ...]]) -> None:
    assert ask(captured(model), random_sprogram(*drawn), 3, is_trained=False) == "equal"


def check_again(graph: Graph, seeds: range) -> None:
    """What can run can run with parts of it computed again, on the parts of their ops."""
    for seed, kind in product(seeds, KINDS):
        try:
            ss.compile(graph, random_sprogram(seed, kind), f"local:{1 + seed % 4}")
        except ScheduleError:
            continue
        equal(graph, random_sprogram(seed, kind, 0.0), 1 + seed % 4)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("model", list(MODELS))
def test_many_more_random_sprograms(model: str, block: int) -> None:
    graph, seeds = captured(model), range(1000 + 20 * block, 1020 + 20 * block)
    for apart, more in ((None, ("blocks",)), (0.4, ("blocks",)), (None, ("split",)), (0.4, ("split", "blocks"))):
        check(graph, seeds, apart, more, is_trained=True)
    unrolled = (0.4, UNROLLED), (None, ("unroll", "split", "blocks", "nearby", "kept"))
    for apart, more in ((0.4, REWRITES), (None, REGATHERED), *unrolled):
        check(graph, range(3000 + 15 * block, 3015 + 15 * block), apart, more, is_trained=True)
    check_again(graph, seeds)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["gpt2:size=tiny", "llama:size=tiny"])
def test_random_sprograms_on_transformers(spec: str) -> None:
    check(graph_of(spec, "SGD"), range(20), is_trained=True)
