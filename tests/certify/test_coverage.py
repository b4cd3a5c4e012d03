"""Boxes of many devices at once against sets of points of each device."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from superscaler.certify.boxes import Boxes, clipped, first_fault, is_tiled, joined
from superscaler.ir.grid import Ints

Points = Counter[tuple[int, ...]]
SIZE = 5


@st.composite
def boxes(draw: st.DrawFn, devices: int, columns: int) -> Ints:
    """Draw boxes [devices, boxes, columns, 2], those of all devices alike but for a shift, or each for itself."""
    count = draw(st.integers(1, 4))
    is_alike = draw(st.booleans())
    ends = st.lists(st.integers(0, SIZE), min_size=2, max_size=2).map(sorted)
    shape = st.lists(st.lists(ends, min_size=columns, max_size=columns), min_size=count, max_size=count)
    rows = [draw(shape)] * devices if is_alike else [draw(shape) for _ in range(devices)]
    shift = np.array([[draw(st.integers(0, 3))] * columns for _ in range(devices)])
    return np.array(rows, dtype=np.int64) + shift[:, None, :, None]


@st.composite
def several(draw: st.DrawFn) -> list[Ints]:
    devices, columns = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return [draw(boxes(devices, columns)) for _ in range(draw(st.integers(1, 3)))]


def points(found: Ints) -> Points:
    return Counter(p for box in found.tolist() for p in product(*(range(lo, hi) for lo, hi in box)))


def inside(some: Points, box: Ints) -> Points:
    """Return the points whose first coordinates are in a box."""
    ends = box.tolist()
    return Counter({p: n for p, n in some.items() if all(lo <= x < hi for x, (lo, hi) in zip(p, ends, strict=False))})


@settings(max_examples=40)
@given(several())
def test_joined_boxes_have_the_same_points_as_often(parts: list[Ints]) -> None:
    found = joined([Boxes.of(part) for part in parts]).whole
    for device in range(len(found)):
        assert points(found[device]) == sum((points(part[device]) for part in parts), Points())


@settings(max_examples=40)
@given(several(), st.data())
def test_a_cut_has_the_points_inside(parts: list[Ints], data: st.DataObject) -> None:
    some = Boxes.of(parts[0])
    box = data.draw(boxes(len(parts[0]), data.draw(st.integers(1, parts[0].shape[2]))))[:, 0]
    found = clipped(some, box).whole
    for device, region in enumerate(box):
        assert points(found[device]) == inside(points(parts[0][device]), region)


@settings(max_examples=40)
@given(several(), st.data())
def test_tiled_is_each_point_once(parts: list[Ints], data: st.DataObject) -> None:
    region = data.draw(boxes(len(parts[0]), parts[0].shape[2]))[:, 0]
    # Every index of an op has at least one element.
    region[..., 1] = np.maximum(region[..., 1], region[..., 0] + 1)
    some = clipped(joined([Boxes.of(part) for part in parts]), region)
    expected = [points(mine) == points(region[device, None]) for device, mine in enumerate(some.whole)]
    assert is_tiled(some, region).tolist() == expected
    for device, mine in enumerate(some.whole):
        if not expected[device]:
            cell, times = first_fault(mine, region[device])
            assert set(points(cell[None])) <= set(points(region[device, None]))
            assert {points(mine)[point] for point in points(cell[None])} == {times}
            assert times != 1


@settings(max_examples=40)
@given(several(), st.data())
def test_rows_are_those_of_the_devices(parts: list[Ints], data: st.DataObject) -> None:
    chosen = np.array(data.draw(st.lists(st.integers(0, len(parts[0]) - 1), min_size=1, max_size=4)))
    assert np.array_equal(Boxes.of(parts[0]).rows(chosen).whole, parts[0][chosen])


def test_one_shape_stands_for_devices_that_differ_by_where_they_start() -> None:
    rows = np.array([[[[2 * d, 2 * d + 1]], [[2 * d + 1, 2 * d + 2]]] for d in range(1000)])
    found = joined([Boxes.of(rows[:, :1]), Boxes.of(rows[:, 1:])])
    assert found.shapes.shape == (1, 1, 1, 2)
    assert found.whole[7].tolist() == [[[14, 16]]]
