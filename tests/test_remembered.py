"""Remembered results: one array for equal arguments, never another argument's result, and none can be written."""

import numpy as np
import pytest

from superscaler.ir.cohorts import _rows
from superscaler.ir.grid import Ints
from superscaler.remembered import Arrays, forget, interned, ints, remembered


class Pair(Arrays):
    def __init__(self, one: Ints, two: Ints) -> None:
        self.one, self.two = one, two


@remembered
def moved(box: Ints, step: int) -> Ints:
    return box + step


def test_equal_results_are_one_array_that_cannot_be_written() -> None:
    one, other = ints(1, 2), ints(2, 3)
    assert moved(one, 1) is moved(one, 1)
    assert moved(one, 2) is moved(other, 1)
    for array in (one, moved(one, 1)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


def test_an_array_at_the_address_of_an_ended_one_has_a_result_of_its_own() -> None:
    for n in range(200):
        # Unkept, each array would be where the last one was.
        assert moved(np.full(3, n), 1).tolist() == [n + 1] * 3


def test_results_are_new_once_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    box = ints(4, 5)
    first = moved(box, 1)
    forget()
    assert moved(box, 1) is not first
    second = moved(box, 1)
    monkeypatch.setattr("superscaler.remembered.MOST", 0)
    moved(box, 2)
    assert moved(box, 1) is not second


def test_values_of_equal_arrays_are_one_value() -> None:
    one, other = (Pair(np.array([1, 2]), np.array([n])) for n in (3, 4))
    assert interned(one) is interned(Pair(np.array([1, 2]), np.array([3])))
    assert interned(other) is not interned(one)
    assert interned(other).one is interned(one).one


def test_flags_are_not_taken_for_equal_numbers() -> None:
    assert _rows("at", 2, ((1, 0),)).dtype == np.int64
    assert _rows("counted", 2, ((True, False),)).dtype == bool
