"""Constraints on stages, lists and servers: what they leave of a space, and what is where in the found plan."""

import random
import re
from collections.abc import Iterable
from itertools import combinations, pairwise

import pytest

import superscaler as ss
from superscaler.errors import InputError
from superscaler.planner.constraints import left, read, satisfies
from superscaler.planner.search import search
from superscaler.planner.space import Choice, Own, choices
from tests.helpers.graphs import graph_of

GPT = "gpt2:size=tiny,layers=4,batch=8"
# Two servers of four devices; twelve blocks.
SPACE = list(choices(ss.Cluster.parse("a100:2x4"), 64, 12, layouts=["sequence"]))
OWN_BLOCKS = ("1f1b", "zb_h1", "zbv")


def kept(text: str) -> list[Choice]:
    return left(SPACE, read(text, per_server=4), [1] * 12)


def cuts(stages: int) -> list[list[int]]:
    """Return all numbers of blocks that so many stages of 12 blocks can have."""
    return [[b - a for a, b in pairwise((0, *ends, 12))] for ends in combinations(range(1, 12), stages - 1)]


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("tp in (2, 4)", "c.tp in (2, 4)"),
        ("Schedule IN (1F1B, zb_h1)", "c.schedule in ('1f1b', 'zb_h1')"),
        ("tp within a server", "c.tp in (1, 2, 4)"),
        ("dp within a server", "c.dp * c.tp in (1, 2, 4)"),
        ("batch = 64", "True"),
        ("stage 0 has the embedding", "c.schedule != 'interlaced'"),
        ("last stage has the head", "c.schedule != 'interlaced'"),
        ("first stage has the head", "c.pp == 1"),
        ("stage 1 has tp >= 2", "c.pp * c.chunks > 1 and c.tp >= 2"),
        ("stage -1 has no recompute", "c.recompute == 'none'"),
    ],
)
def test_what_is_left_is_what_satisfies_it(text: str, python: str) -> None:
    found = kept(text)
    assert found == [c for c in SPACE if eval(python, {"c": c})]


@pytest.mark.parametrize(
    ("text", "python"),
    [
        ("stage 0 has 5 blocks", "n[0] == 5"),
        ("last stage has <= 2 blocks", "n[-1] <= 2"),
        ("each stage has 3 blocks", "set(n) == {3}"),
        ("stage 1 has > 6 blocks, stage -1 has 1 block", "len(n) > 1 and n[1] > 6 and n[-1] == 1"),
    ],
)
def test_plans_whose_blocks_can_be_cut_so_are_left(text: str, python: str) -> None:
    """Beside all cuts; of schedules that cut the model themselves none is."""
    found = kept(text)
    able = {pp for pp in range(1, 9) if any(eval(python, {"n": n, "set": set, "len": len}) for n in cuts(pp))}
    assert found == [c for c in SPACE if c.schedule in OWN_BLOCKS and c.pp * c.chunks in able]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("stage 1 has the embedding", "the embedding is in stage 0"),
        ("stage 9 has 1 block", "the model has 12 blocks, and a plan 1 to 8 stages"),
        ("stage 0 has 13 blocks", "the model has 12 blocks"),
        ("each stage has 5 blocks", "no plan of the space satisfies 'each stage has 5 blocks'"),
        ("stage 0 has 8 blocks, stage 1 has 8 blocks", "together"),
        ("stage 8 has tp = 2", "tp is one of 1, 2, 4, 8, of 1 to 8 stages"),
        ("batch = 512", "batch is one of 64."),
        ("tp in (3, 5)", "tp is one of 1, 2, 4, 8"),
        ("tp in ()", "tp is a number, not empty"),
        ("tp in (2, 4", "'tp in (2' is no constraint; write, between commas"),
        ("schedule in (1f1b, cats)", "unknown schedule 'cats'"),
        ("pp within a server", "unknown group of devices 'pp'"),
        ("stage 0 has stage 1 has 5 blocks", "names two stages"),
        ("stage 0 has cats", "'stage 0 has cats' is no constraint"),
        ("tp <= 8 and no swap", "'tp <= 8 and no swap' is no constraint; write, between commas"),
    ],
)
def test_a_constraint_that_leaves_nothing_is_refused_with_what_there_is(text: str, why: str) -> None:
    with pytest.raises(InputError, match=re.escape(why)):
        kept(text)


def test_random_words_are_constraints_or_refused() -> None:
    """Whatever is typed: plans, or one line."""
    drawn, found, refused = random.Random(0), list[bool](), list[str]()
    words = ["tp", "in", "(2, 4)", "<=", "=", "2", "no", "stage 0", "stage -1", "each stage", "has", "blocks", "swap",
             "the embedding", "within a server", "dp", "zb_h1", "schedule", ",", "(", ")", "stage 99", "1e3", "-1",
             "==", "recompute", "5 blocks", "batch", "layout", "é", "''"]  # fmt: skip
    for _ in range(3000):
        text = " ".join(drawn.choices(words, k=drawn.randint(1, 5)))
        try:
            found.append(bool(kept(text)))
        except InputError as error:
            refused.append(str(error))
    assert all(found)
    assert 20 < len(found) < 1000
    assert all(error.startswith("--where: ") and "\n" not in error for error in refused)


def test_values_of_each_stage_satisfy_a_constraint() -> None:
    """Those of a plan whose stages have their own: each is looked at, or the one that is named."""
    # Devices 0 and 1; 2 to 9, on three servers.
    own = Choice(1, 2, 2, 1, 1, own=(Own(1, 2, "full"), Own(1, 8, "none")))
    for text, holds in {
        "tp <= 8": True, "tp <= 4": False, "tp in (2, 8)": True, "tp != 8": False, "stage 0 has tp <= 4": True,
        "stage 1 has tp <= 4": False, "tp within a server": False, "stage 0 has dp within a server": True,
        "no recompute": False, "last stage has no recompute": True, "dp = 1": True,
    }.items():  # fmt: skip
        (constraint,) = read(text, per_server=4)
        assert constraint.allows(own, None) == holds, text


def test_a_group_of_devices_is_within_a_server_by_where_its_stage_begins() -> None:
    """Three devices before it, of four on a server."""
    (inside,) = read("tp within a server", per_server=4)
    aligned, crossing = (Choice(n, 1, 2, 1, 1, own=(Own(n, 1, "none"), Own(2, 2, "none"))) for n in (4, 3))
    assert inside.allows(aligned, None)
    assert not inside.allows(crossing, None)
    # Devices 0 to 2 of a server.
    assert inside.allows(Choice(1, 3, 1, 1, 1), None)


@pytest.mark.parametrize(
    ("text", "blocks", "holds"),
    [
        ("stage 0 has 3 blocks", (3, 1), True),
        ("stage 0 has 3 blocks", (2, 2), False),
        ("last stage has < 2 blocks, stage 0 has the embedding", (3, 1), True),
        ("last stage has < 2 blocks, stage 0 has the head", (3, 1), False),
        ("each stage has 2 blocks", (), False),
        ("pp = 2", (), True),
    ],
)
def test_a_plan_satisfies_constraints_with_its_own_blocks(text: str, blocks: tuple[int, ...], holds: bool) -> None:
    assert satisfies(read(text), Choice(1, 1, 2, 1, 4, blocks=blocks)) == holds


@pytest.mark.slow
def test_the_found_plan_has_its_blocks_and_the_embedding_where_they_are_asked_for() -> None:
    """By the devices of the operators of the compiled plan."""
    where = "tp <= 8, no swap, stage 0 has the embedding, stage 0 has 3 blocks, pp = 2, rows = 8, schedule = 1f1b"
    graph = graph_of(GPT)
    best = search(graph, "a100:1x2", where=f"{where}, no recompute").best
    placed = ss.compile(graph, best.spec, "local:2").compiled.graph

    def devices(ops: Iterable[ss.Op]) -> set[int]:
        return {device for op in ops for device in placed.rows(placed.op(op.name)).device.tolist()}

    assert [devices(block.ops) for block in graph.blocks] == [{0}, {0}, {0}, {1}]
    assert devices(op for op in graph.forward_ops if op.name == "embedding") == {0}
