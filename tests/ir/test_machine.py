"""The machine leaves out repetitions that only move a state, and no other; codes wait for each other."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from superscaler.ir.running.machine import Domain, Lap, Walk, execute


class Sums(Domain[int, int]):
    """Adds numbers up; from the `steady`-th on all are one. Its state is moved by their step in each repetition."""

    def __init__(self, steady: int = 0, is_open: bool = True) -> None:
        self.total, self.ran, self.steady, self.is_open = 0, list[int](), steady, is_open

    def step(self, at: int, i: int) -> bool:
        self.ran.append(at)
        self.total += i if len(self.ran) > self.steady else -i
        return True

    def state(self, lap: Lap[int], turns: int) -> object:
        return self.total + turns * lap.step if self.is_open else None

    def skip(self, lap: Lap[int], turns: int, before: Any, now: Any) -> None:
        assert before == now
        self.total += turns * lap.step


BODY, COUNT = [1, 2], 40
CODE = [5, *BODY * COUNT, 7]
LAP = Lap(1, len(BODY), COUNT, sum(BODY))


@pytest.mark.parametrize("kept", [0, 3])
def test_repetitions_that_only_move_the_state_are_left_out(kept: int) -> None:
    sums = Sums()
    assert execute([Walk(CODE, sums, [LAP])], kept) == []
    assert sums.total == sum(CODE)
    # Two repetitions show the move.
    assert len(sums.ran) == 2 + len(BODY) * (2 + kept)
    assert sums.ran[-1] == len(CODE) - 1


def test_a_loop_that_becomes_steady_late_is_left_out_from_then_on() -> None:
    sums = Sums(steady=1 + 6 * len(BODY))
    execute([Walk(CODE, sums, [LAP])])
    assert sums.total == sum(CODE) - 2 * (5 + 6 * sum(BODY))
    # States are compared after repetitions 2, 3, 4, 6 and 10.
    assert len(sums.ran) == 2 + len(BODY) * 10


def test_all_repetitions_run_where_a_state_is_never_a_moved_one() -> None:
    moving, closed = Sums(), Sums(is_open=False)
    execute([Walk(CODE, moving, [Lap(1, len(BODY), COUNT, 4)])])
    execute([Walk(CODE, closed, [LAP])])
    assert moving.ran == closed.ran == [*range(len(CODE))]


class Queue(Domain[str, int]):
    """Puts letters that are small into a queue; takes those that are capitals, and waits until they are there."""

    def __init__(self, queue: deque[str]) -> None:
        self.queue, self.ran = queue, 0

    def step(self, at: int, i: str) -> bool:
        if i.islower():
            self.queue.append(i)
        elif i.lower() not in self.queue:
            return False
        else:
            self.queue.remove(i.lower())
        self.ran += 1
        return True

    def state(self, lap: Lap[int], turns: int) -> object:
        return tuple(sorted(self.queue))


def run(*codes: str, laps: Sequence[Lap[int] | None] = ()) -> tuple[list[int], list[int]]:
    """Return where each code that waits for ever is, and the number of steps that each ran."""
    queue = deque[str]()
    found = [Queue(queue) for _ in codes]
    own = [[lap] if lap is not None else [] for lap in laps or [None] * len(codes)]
    walks = [Walk(code, one, some) for code, one, some in zip(codes, found, own, strict=True)]
    return [walk.at for walk in execute(walks)], [one.ran for one in found]


def test_codes_wait_for_each_other() -> None:
    assert run("aBc", "Abd", "CD") == ([], [3, 3, 2])
    assert run("ABx", "bay", "z") == ([], [3, 3, 1])
    assert run("Ab", "Ba", "c") == ([0, 0], [0, 0, 1])
    assert run("", "A") == ([0], [0, 0])


def test_rounds_are_left_out_for_all_codes_together() -> None:
    one, other = Lap(0, 2, 20, 0), Lap(1, 2, 19, 0)
    # The second code sends first, and reads what it is sent a repetition later.
    assert run("aB" * 20, "b" + "Ab" * 19 + "A", laps=[one, other]) == ([], [6, 6])
    # A code without the loop runs all of it, and so do the others then.
    assert run("aB" * 20, "b" + "Ab" * 19 + "A", laps=[one, None]) == ([], [40, 40])


def test_repetitions_that_are_not_one_round_are_not_compared() -> None:
    # The first code runs two repetitions for each of the second.
    one, other = Lap(0, 1, 40, 0), Lap(0, 2, 20, 0)
    assert run("a" * 40, "AA" * 20, laps=[one, other]) == ([], [40, 40])
