"""Each row of the table, from every layout that it applies to, gives exactly the tensor."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from superscaler.ir.layout import Layout
from superscaler.materialize.rvd import transitions as table
from superscaler.materialize.rvd.search import Path
from superscaler.materialize.rvd.transitions import INTER, INTRA, MESSAGES, D, Step
from tests.materialize.rvd.layouts import Servers, execute, holds, layout, scattered, shapes

SIZES = (8, 16)


def check(source: Layout, step: Step, sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    full = rng.integers(-9, 9, sizes).astype(float)
    path = Path(source, step.layout, (step,), 0.0)
    assert holds(execute(path, scattered(source, full, rng), sizes), step.layout, full), (str(source), step)


@pytest.mark.parametrize("kind", [kind for kind, _, _ in INTRA])
def test_collectives(kind: str) -> None:
    tried = 0
    for n, sizes in ((8, SIZES), (6, (6, 12))):
        for shape in shapes(n, 4):
            source = layout(shape, np.random.default_rng(n).permutation(n))
            for frame in table.frames(source):
                for move in table.moves(frame.start, frame.devices.shape, sizes, False):
                    if move.kind == kind:
                        slots = [axis - D if axis >= D else -1 for axis in (move.gather_axis, move.scatter_axis)]
                        after = frame.layout(move.after)
                        check(source, Step(kind, frame.groups(move.digits), *slots, after, 0, 0, 0.0), sizes)
                        tried += 1
    assert tried > 10


def test_moves_back_are_moves() -> None:
    (frame,) = table.frames(layout((2, 2, 2, 1), list(range(8))))
    for move in table.moves(frame.start, frame.devices.shape, SIZES, True):
        assert move.after == frame.start
        assert move in table.moves(move.before, frame.devices.shape, SIZES, False)


@pytest.mark.parametrize("kind", INTER)
def test_messages(kind: str) -> None:
    rng, tried = np.random.default_rng(0), 0
    for few, many in itertools.product((2, 3, 4, 6), repeat=2):
        for first, (a, b) in itertools.product((0, 1, few), itertools.product(shapes(few, 4), shapes(many, 4))):
            source, goal = layout(a, rng.permutation(few)), layout(b, first + rng.permutation(many))
            if INTER[kind](a, b, set(source.devices.flat) == set(goal.devices.flat)):
                check(source, table.messages(kind, source, goal, (12, 12), 1, Servers()), (12, 12))
                tried += 1
    assert tried > 10


def test_messages_join_any_two_layouts() -> None:
    rng = np.random.default_rng(0)
    for few, many in itertools.product((2, 3, 4), repeat=2):
        for first, (a, b) in itertools.product((0, 1, few), itertools.product(shapes(few, 4), shapes(many, 4))):
            source, goal = layout(a, rng.permutation(few)), layout(b, first + rng.permutation(many))
            step = table.messages(MESSAGES, source, goal, (12, 12), 1, Servers())
            assert all(sender != receiver for sender, receiver in step.groups)
            assert (step.size > 0) == bool(step.groups)
            check(source, step, (12, 12))


def test_a_device_reads_from_its_own_place() -> None:
    source, goal = layout((2, 1, 1), [0, 4]), layout((4, 1, 1), [1, 2, 5, 6])
    step = table.messages(MESSAGES, source, goal, (4,), 1, Servers(4))
    assert set(step.groups) == {(0, 1), (0, 2), (4, 5), (4, 6)}
    assert (step.size, step.moved) == (4, 16)
