"""Everything of the IR prints in one line and parses back."""

from __future__ import annotations

import numpy as np
import pytest

from superscaler.errors import InputError
from superscaler.ir.grid import Axis, Grid
from superscaler.ir.layout import Layout, layout_of
from superscaler.ir.mask import Mask, inside, intersect
from superscaler.ir.model import Operand
from superscaler.ir.orders import parse_schedule, print_schedule
from superscaler.ir.text.model import parse_model, print_model
from superscaler.plans.lib.schedules import schedule_1f1b
from tests.helpers.random_graphs import random_model


@pytest.mark.parametrize("seed", range(5))
def test_a_model_parses_back(seed: int) -> None:
    model, _ = random_model(seed, 6)
    again = parse_model(print_model(model))
    assert again == model
    assert print_model(again) == print_model(model)


@pytest.mark.parametrize("text", ["h[0:4, 0:512]", "h[]", "h.0.w[1:2]{2=0:8, 5=1:3}"])
def test_a_mask_parses_back(text: str) -> None:
    assert str(Mask.parse(text)) == text


@pytest.mark.parametrize(("parse", "text"), [(Mask.parse, "h[0-4]x"), (Layout.parse, "R(1)"), (parse_model, "op x")])
def test_a_bad_text_is_an_input_error(parse, text: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InputError):
        parse(text)


def test_a_layout_parses_back_and_counts_its_devices() -> None:
    text = "R(2)V(1)D(1,2) @ [[[[0, 1]]], [[[3, 2]]]]"
    assert str(Layout.parse(text)) == text
    with pytest.raises(InputError, match="names 3 devices, but its shape needs 4"):
        Layout.parse("R(2)V(1)D(1,2) @ [0, 1, 2]")


def test_a_grid_gives_layouts_of_its_operands() -> None:
    # y[b, n] = sum over k of x[b, k] w[k, n], cut on b (2) and k (2), in two microbatches on the same devices.
    axes = (Axis(0, (4, 4), is_microbatch=True), Axis(0, (2, 2)), Axis(2, (3, 3)))
    grid = Grid(axes, np.array([[[3, 2], [1, 0]], [[3, 2], [1, 0]]]))
    assert str(layout_of(grid, Operand("y", (0, 1)), output=True)) == "R(1)V(2)D(2,1) @ [[[[3], [1]], [[2], [0]]]]"
    assert str(layout_of(grid, Operand("x", (0, 2)), output=False)) == "R(1)V(1)D(2,2) @ [[[[3, 2], [1, 0]]]]"
    assert str(layout_of(grid, Operand("w", (2, 1)), output=False)) == "R(2)V(1)D(2,1) @ [[[[3], [2]]], [[[1], [0]]]]"
    # What is on one device is in one piece; the gradients of routing replicas are value parts.
    grid = Grid((Axis(0, (2, 2)), Axis(None, (1, 1), mirror="route")), np.array([[4, 5], [4, 5]]))
    assert str(layout_of(grid, Operand("x", (0, 2)), output=False)) == "R(2)V(1)D(1,1) @ [[[[4]]], [[[5]]]]"
    assert str(layout_of(grid, Operand("x", (0, 2)), True, is_gradient=True)) == "R(1)V(2)D(1,1) @ [[[[4]], [[5]]]]"


def test_a_schedule_parses_back() -> None:
    rows = schedule_1f1b(3, 4)
    text = print_schedule(rows)
    assert text.splitlines()[0] == "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3"
    assert text.splitlines()[2] == "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
    assert parse_schedule(text) == rows
    with pytest.raises(InputError, match="as 2F0"):
        parse_schedule("F0")


def test_boxes_intersect_and_move() -> None:
    assert intersect(((0, 4), (2, 6)), ((3, 8), (0, 3))) == ((3, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 8),)) is None
    assert inside(((3, 4),), ((2, 9),)) == ((1, 2),)
