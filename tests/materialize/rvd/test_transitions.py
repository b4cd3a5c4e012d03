"""Each row of the table, from every layout that it applies to, gives exactly the tensor."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from layouts import execute, holds, layout, scattered, shapes

from superscaler.ir.layout import Layout
from superscaler.materialize.rvd import transitions as table
from superscaler.materialize.rvd.frames import frames as find_frames
from superscaler.materialize.rvd.search import Path
from superscaler.materialize.rvd.transitions import INTER, INTRA, D, Inter, Intra, Step

SIZES = (8, 16)


def check(source: Layout, step: Step, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    full = rng.integers(-9, 9, sizes).astype(float)
    path = Path(source, step.layout, (step,), 0.0, 0.0, 0)
    assert holds(execute(path, scattered(source, full, rng), sizes), step.layout, full), (str(source), step)


@pytest.mark.parametrize("row", INTRA, ids=[row.kind for row in INTRA])
def test_collectives(row: Intra) -> None:
    tried = 0
    for n, sizes in ((8, SIZES), (6, (6, 12))):
        for shape in shapes(n, 4):
            source = layout(shape, np.random.default_rng(n).permutation(n))
            for frame in find_frames(source, source, None)[0]:
                for kind, take, give in table.slots(4):
                    for digits in table.leaving(frame.start[take], take) if kind == row.kind else ():
                        for ordered in table.orders(digits, take, give):
                            after = frame.layout(table.moved(frame.start, take, give, ordered))
                            if any(size % k for size, k in zip(sizes, after.shape[2], strict=True)):
                                continue
                            groups = frame.groups(ordered)
                            slots = [axis - D if axis >= D else -1 for axis in (take, give)]
                            check(source, Step(kind, groups, *slots, len(groups[0]), after, 0, 0.0), sizes)
                            tried += 1
    assert tried > 10


@pytest.mark.parametrize("row", INTER, ids=[row.kind for row in INTER])
def test_messages(row: Inter) -> None:
    rng, tried = np.random.default_rng(0), 0
    for few, many in itertools.product((2, 3, 4, 6), repeat=2):
        for first, (a, b) in itertools.product((0, 1, few), itertools.product(shapes(few, 4), shapes(many, 4))):
            source, goal = layout(a, rng.permutation(few)), layout(b, first + rng.permutation(many))
            if not row.fits(a, b, set(source.devices.flat) == set(goal.devices.flat)):
                continue
            groups, kept, _ = table.messages(source, goal, (12, 12), int)
            groups = table.stars(groups) if row.kind == "broadcast" else groups
            check(source, Step(row.kind, groups, -1, -1, 1, goal, 0, 0.0, kept), (12, 12))
            tried += 1
    assert tried > 10


def test_messages_join_any_two_layouts() -> None:
    rng = np.random.default_rng(0)
    for few, many in itertools.product((2, 3, 4), repeat=2):
        for first, (a, b) in itertools.product((0, 1, few), itertools.product(shapes(few, 4), shapes(many, 4))):
            source, goal = layout(a, rng.permutation(few)), layout(b, first + rng.permutation(many))
            groups, kept, largest = table.messages(source, goal, (12, 12), int)
            assert all(sender != receiver for sender, receiver in groups)
            assert (largest > 0) == bool(groups)
            check(source, Step(table.LAST, groups, -1, -1, 1, goal, 0, 0.0, kept), (12, 12))


def test_a_device_reads_from_its_own_place() -> None:
    source, goal = layout((2, 1, 1), [0, 4]), layout((4, 1, 1), [1, 2, 5, 6])
    groups, _, _ = table.messages(source, goal, (4,), lambda device: device // 4)
    assert set(groups) == {(0, 1), (0, 2), (4, 5), (4, 6)}
