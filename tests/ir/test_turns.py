"""Turns of a loop: what may differ between them, and what may not."""

from dataclasses import replace
from typing import Any

import pytest

from superscaler.ir import program as p
from superscaler.ir.running.turns import is_alike, keys

A, B = p.Value("x", 0), p.Value("x", 1)
FORWARD = p.Forward(p.Task(0, 0), 3, (0, 8), (A,), (p.Value("y", 0),))
BACKWARD = p.Backward(p.Task(0, 0), (A, None), (p.Value("d", 0),))
LOAD = p.Load(A, "x", ((0, 4), (0, 8)))
SEND = p.Send(A, 1, 7, 64, 7)


@pytest.mark.parametrize(
    ("one", "change", "alike"),
    [
        (FORWARD, {"task": p.Task(0, 1), "at": (4, 8), "inputs": (B,)}, True),
        (FORWARD, {"function": 4}, False),
        (FORWARD, {"inputs": (A, B)}, False),
        (BACKWARD, {"gradients": (B, None)}, True),
        (BACKWARD, {"gradients": (None, A)}, False),
        (LOAD, {"out": B, "box": ((4, 8), (0, 8))}, True),
        (LOAD, {"box": ((0, 8), (0, 8))}, False),
        (SEND, {"source": B, "message": 9, "point": 9}, True),
        (SEND, {"peer": 2}, False),
        (p.Loss((A,), (True,)), {}, False),
    ],
)
def test_turns_are_alike_but_for_names_and_places(one: p.Instruction, change: dict[str, Any], alike: bool) -> None:
    assert is_alike(one, replace(one, **change)) == alike


def test_turns_of_different_kinds_are_not_alike() -> None:
    assert not is_alike(p.Free((A,)), LOAD)


def test_keys_are_all_names_and_the_task() -> None:
    assert [*keys(BACKWARD)] == [p.Task(0, 0), A, None, p.Value("d", 0)]
