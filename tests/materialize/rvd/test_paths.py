"""Every path gives exactly the tensor, costs what an exhaustive search costs, and beats messages where it can."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest

from superscaler.cluster import Cluster
from superscaler.errors import InputError
from superscaler.ir.layout import Layout
from superscaler.materialize.rvd.route import START, priced
from superscaler.materialize.rvd.search import Path, find_path
from superscaler.materialize.rvd.spread import spread
from superscaler.materialize.rvd.transitions import INTRA, MESSAGES, messages
from tests.helpers.sweeps import few, slow
from tests.materialize.rvd.layouts import Servers, execute, exhaustive, holds, layout, scattered, shapes

SIZES = (24, 24, 24)
ITEMSIZE = 4096
# Devices of both sides, how many they are, and the servers they are on.
GROUPS = {
    "2": (range(2), range(2)),
    "4": (range(4), range(4)),
    "6": (range(6), range(6)),
    "8": (range(8), range(8)),
    "4 to 8": (range(4), range(8, 16)),
    "8 to 4": (range(8), range(8, 12)),
    "8 to 8": (range(8), range(8, 16)),
    "4 to 6": (range(4), range(8, 14)),
    "6 to 4": (range(6), range(8, 12)),
    "4 to 8, overlapping": (range(4), range(2, 10)),
    "8 to 4, a subgroup": (range(8), range(2, 6)),
    "4 to 8, a subgroup": (range(4), range(8)),
}


def pairs(name: str, sample: int | None, slots: int = 3) -> Iterator[tuple[Layout, Layout]]:
    """Yield pairs of layouts on two groups, in natural and in shuffled order; all of them, or some."""
    rng = np.random.default_rng(0)
    few, many = GROUPS[name]
    found = list(itertools.product(shapes(len(few), 2 + slots), shapes(len(many), 2 + slots)))
    for i in range(len(found)) if sample is None else rng.choice(len(found), min(sample, len(found)), replace=False):
        for ids in ([list(few), list(many)], [rng.permutation(list(few)), rng.permutation(list(many))]):
            yield layout(found[i][0], ids[0]), layout(found[i][1], ids[1])


def check_values(source: Layout, goal: Layout, path: Path, sizes: tuple[int, ...] = SIZES) -> None:
    rng = np.random.default_rng(1)
    full = rng.integers(-9, 9, sizes).astype(float)
    data = execute(path, scattered(source, full, rng), sizes)
    assert holds(data, goal, full), f"{source} -> {goal}: {[step.kind for step in path.steps]}"


def check_path(source: Layout, goal: Layout, costs: Servers, sizes: tuple[int, ...] = SIZES) -> Path:
    path = find_path(source, goal, sizes, ITEMSIZE, costs)
    check_values(source, goal, path, sizes)
    priced_again = [costs.seconds(step.kind, step.groups, step.size) for step in path.steps if step.groups]
    assert path.seconds == pytest.approx(sum(priced_again))
    assert not path.steps or path.steps[-1].layout == goal
    return path


def check_least(source: Layout, goal: Layout, costs: Servers) -> None:
    path = check_path(source, goal, costs, SIZES[: source.devices.ndim - 2])
    least = exhaustive(source, goal, SIZES[: source.devices.ndim - 2], ITEMSIZE, costs)
    assert path.seconds == pytest.approx(least, rel=1e-9, abs=1e-11)


@pytest.mark.parametrize(
    "name", ["2", "6", *slow("8 to 4"), *slow("4 to 6"), *slow("4 to 8, overlapping"), *slow("8 to 4, a subgroup")]
)
def test_paths_give_exactly_the_tensor_and_none_is_cheaper(name: str) -> None:
    for devices in (8, 3, 2):
        for source, goal in pairs(name, 2):
            check_path(source, goal, Servers(devices))
    for source, goal in pairs(name, 2, slots=1):
        check_least(source, goal, Servers(4))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("devices", [8, 4, 3, 2])
@pytest.mark.parametrize("name", GROUPS)
def test_all_paths_give_exactly_the_tensor_and_none_is_cheaper(name: str, devices: int) -> None:
    for source, goal in pairs(name, None):
        check_path(source, goal, Servers(devices))
    for source, goal in pairs(name, None, slots=2):
        check_least(source, goal, Servers(devices))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("devices", [4, 8, 16])
def test_random_pairs_give_exactly_the_tensor(devices: int) -> None:
    rng = np.random.default_rng(devices)
    for _ in range(500):
        sizes = (16,) * int(rng.integers(1, 4))
        found = list(shapes(devices, 2 + len(sizes)))
        held, read = (found[i] for i in rng.integers(len(found), size=2))
        ids = rng.permutation(devices), rng.permutation(devices) + rng.choice([0, devices])
        source, goal = layout(held, ids[0]), layout(read, ids[1])
        costs = Servers(int(rng.choice([4, 8, 16])))
        direct = messages(MESSAGES, source, goal, sizes, ITEMSIZE, costs)
        assert check_path(source, goal, costs, sizes).seconds <= direct.seconds


# The paper's table: R, V and D of a 1-D tensor by devices; gain over messages, at 12.5 and 150 GB/s (facts.md 2).
HALF_GIGABYTE = 2**27
SPREAD = {"R": lambda n: (n, 1, 1), "V": lambda n: (1, n, 1), "D": lambda n: (1, 1, n)}
GAINS = {
    ("R", "R"): (7.5, 3.8, 7.5),
    ("R", "D"): (1, 1, 1),
    ("V", "R"): (56, 28, 28),
    ("V", "D"): (7.5, 7.5, 3.8),
    ("D", "R"): (7.5, 3.8, 7.5),
    ("D", "D"): (1, 1, 1),
}


def across(held: str, read: str, few: int, many: int) -> tuple[Layout, Layout]:
    """Producers on one server, consumers on another."""
    return layout(SPREAD[held](few), range(few)), layout(SPREAD[read](many), range(8, 8 + many))


@pytest.mark.parametrize(("held", "read"), GAINS)
def test_cases_of_the_paper(held: str, read: str) -> None:
    costs = Servers(8)
    for (less, more), gain in zip(((8, 8), (8, 4), (4, 8)), GAINS[held, read], strict=True):
        source, goal = across(held, read, less, more)
        path = find_path(source, goal, (HALF_GIGABYTE,), 4, costs)
        direct = messages(MESSAGES, source, goal, (HALF_GIGABYTE,), 4, costs)
        assert direct.seconds / path.seconds == pytest.approx(gain, rel=0.02)
        crossing = 0
        for step in path.steps:
            if step.kind in {kind for kind, _, _ in INTRA}:
                assert all(len({costs.place(d) for d in group}) == 1 for group in step.groups)
            else:
                crossing += costs.crossing(step.groups, step.size)
        assert crossing == 4 * HALF_GIGABYTE


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        (("R", "R", 4, 8), ["chunk", "rd_scatter", "all_gather"]),
        (("V", "D", 4, 8), ["reduce_scatter", "rd_scatter"]),
    ],
)
def test_searched_plans_of_the_paper(case: tuple[str, str, int, int], kinds: list[str]) -> None:
    path = find_path(*across(*case), (HALF_GIGABYTE,), 4, Servers(8))
    assert [step.kind for step in path.steps] == kinds


# What a single collective of p devices does to a tensor of two slots.
SINGLE = {
    "all_reduce": lambda p: ((1, p, 1, 1), (p, 1, 1, 1)),
    "all_gather": lambda p: ((1, 1, p, 1), (p, 1, 1, 1)),
    "reduce_scatter": lambda p: ((1, p, 1, 1), (1, 1, p, 1)),
    "all_to_all": lambda p: ((1, 1, p, 1), (1, 1, 1, p)),
}


NARROW, WIDE = ([*range(8)], [0, 8], [0, 1, 8, 9], [0, 8, 1, 9]), ([*range(16)],)


@pytest.mark.parametrize(("kind", "groups"), few(itertools.product(SINGLE, (NARROW, WIDE)), 0, 2, 4, 6))
def test_no_path_is_much_cheaper_than_a_single_collective(kind: str, groups: Sequence[list[int]]) -> None:
    """Why the search is not asked where one collective does it: from 4 MiB on there is less than a tenth to gain."""
    for preset, devices, size in itertools.product(("v100:2x8", "h100:4x8"), groups, (2**20, 2**26)):
        cluster = Cluster.parse(preset)
        source, goal = (layout(shape, devices) for shape in SINGLE[kind](len(devices)))
        path = find_path(source, goal, (64, size // 64), 4, priced(cluster))
        single = cluster.seconds(kind, [devices], 4 * size // prod(source.shape[2])) + START
        assert path.seconds <= single * (1 + 1e-9)
        assert single <= 1.1 * path.seconds, [step.kind for step in path.steps]


def test_only_what_is_missing_moves() -> None:
    source, goal = layout((2, 1, 2, 1), range(4)), layout((1, 1, 2, 2), range(4))
    (step,) = find_path(source, goal, (128, 256), 1, Servers(4)).steps
    assert set(step.groups) == {(1, 2), (2, 1)} or {group[1] for group in step.groups} == {1, 2}
    assert sum(step.size for _ in step.groups) == 16384


def test_equal_layouts_need_nothing() -> None:
    here = layout((2, 2, 2, 1, 1), range(8))
    turned = Layout(here.devices[::-1, ::-1])
    assert find_path(here, here, SIZES, 4, Servers()).steps == ()
    assert find_path(here, turned, SIZES, 4, Servers()).steps == ()


@dataclass(frozen=True)
class Odd:
    """Costs that see each device for itself: nothing may be renamed."""

    def seconds(self, kind: str, groups: Sequence[Sequence[int]], size: int) -> float:
        return 1e-6 * max(sum(group) for group in groups) + size * 1e-9

    def __hash__(self) -> int:
        return 0


def test_known_paths_are_renamed_where_the_costs_allow() -> None:
    kept: dict[Hashable, tuple[tuple[int, ...], Path]] = {}
    shape, goal_shape = (1, 2, 2, 1, 2), (2, 1, 1, 4, 1)
    ids = [list(range(8)), [11, 10, 9, 8, 15, 14, 13, 12], [0, 1, 2, 3, 8, 9, 10, 11]]
    for known, order in zip((1, 1, 2), ids, strict=True):
        source, goal = layout(shape, order), layout(goal_shape, order)
        path = find_path(source, goal, SIZES, 4, Servers(8), kept)
        assert len(kept) == known
        assert (path.source, path.goal) == (source, goal)
        assert path.seconds == find_path(source, goal, SIZES, 4, Servers(8)).seconds
        check_values(source, goal, path)
    for known, order in zip((3, 4, 5), ids, strict=True):
        source, goal = layout(shape, order), layout(goal_shape, order)
        check_values(source, goal, find_path(source, goal, SIZES, 4, Odd(), kept))
        assert len(kept) == known


@pytest.mark.parametrize(
    ("source", "goal", "sizes", "message"),
    [
        ("R(1)V(1)D(4) @ [0, 1, 2, 3]", "R(4)V(1)D(1) @ [0, 1, 2, 3]", (6,), "slot 0 of 6 elements into 4 parts"),
        ("R(1)V(1)D(2) @ [0, 1]", "R(2)V(1)D(1) @ [0, 0]", (6,), "names device 0 2 times"),
        ("R(1)V(1)D(2,1) @ [0, 1]", "R(2)V(1)D(1,1) @ [0, 1]", (6,), "cuts 2 slots, but the tensor has 1"),
    ],
)
def test_layouts_that_do_not_fit(source: str, goal: str, sizes: tuple[int, ...], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_path(Layout.parse(source), Layout.parse(goal), sizes, 4, Servers())


@pytest.mark.parametrize("rows", [1, 2])
def test_slices_spread_to_rows_of_many_devices_without_a_search(rows: int) -> None:
    ids = np.random.default_rng(0).permutation(12 * (1 + rows))
    source, goal = layout((1, 1, 1, 12, 1), ids[:12]), layout((len(ids), 1, 1, 1, 1), ids)
    path = spread(source, goal, SIZES, ITEMSIZE, Servers(8))
    assert path is not None
    check_values(source, goal, path)
    # A link carries each slice once to each row, and then what a ring of each row needs.
    whole = prod(SIZES)
    assert sum(step.moved for step in path.steps) == rows * whole + (1 + rows) * 11 * whole
    assert path.steps[-1].layout == goal
