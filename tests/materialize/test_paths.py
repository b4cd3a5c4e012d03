"""Every path gives exactly the tensor, costs what an exhaustive search costs, and beats messages where it can."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from layouts import Servers, execute, exhaustive, holds, joined, layout, scattered, shapes

from superscaler.errors import InputError
from superscaler.ir.layout import Layout
from superscaler.materialize.paths import find_path
from superscaler.materialize.transitions import INTER, INTRA

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


def check(name: str, shuffled: bool, sample: int | None, costs: Servers) -> None:
    rng = np.random.default_rng(0)
    few, many = GROUPS[name]
    pairs = list(itertools.product(shapes(len(few), 5), shapes(len(many), 5)))
    chosen = pairs if sample is None else [pairs[i] for i in rng.choice(len(pairs), sample)]
    full = rng.integers(-9, 9, SIZES).astype(float)
    for a, b in chosen:
        source, goal = (
            layout(shape, rng.permutation(list(ids)) if shuffled else ids)
            for shape, ids in ((a, few), (b, many))
        )
        path = find_path(source, goal, SIZES, ITEMSIZE, costs)
        data = execute(path, scattered(source, full, rng), SIZES)
        assert holds(data, goal, full), f"{source} -> {goal}: {[step.kind for step in path.steps]}"
        assert path.seconds == pytest.approx(sum(costs.seconds(s.kind, s.groups, s.size) for s in path.steps if s.groups))
        assert path.is_optimal
        assert not path.steps or path.steps[-1].layout == goal or (path.steps[-1].kind, a) == ("", b)


@pytest.mark.parametrize("shuffled", [False, True], ids=["natural", "shuffled"])
@pytest.mark.parametrize("name", GROUPS)
def test_paths_give_exactly_the_tensor(name: str, shuffled: bool) -> None:
    check(name, shuffled, 25, Servers(8))
    check(name, shuffled, 25, Servers(2))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [8, 4, 2])
@pytest.mark.parametrize("shuffled", [False, True], ids=["natural", "shuffled"])
@pytest.mark.parametrize("name", GROUPS)
def test_all_pairs_give_exactly_the_tensor(name: str, shuffled: bool, devices: int) -> None:
    check(name, shuffled, None, Servers(devices))
