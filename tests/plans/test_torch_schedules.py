"""The lists of torch.distributed.pipelining, row by row beside our tables of the same schedules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest

from superscaler.plans.lib import schedules
from superscaler.plans.lib.tables import KEEPS, SECONDS, Table, finish
from superscaler.verbs import Action

lists = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer")
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
SIZES = [(2, 4), (3, 6), (4, 8), (4, 16)]
Rule = Callable[[int, int], Table]


def torchs(name: str, devices: int, microbatches: int) -> Table:
    return [[work for a in row for work in _works(a)] for row in lists.get_schedule_ops(name, devices, microbatches)]


def _works(action: Any) -> list[Action]:
    """Return the work of an action, of one that overlaps two both; of what is sent, summed or idle none."""
    if action is None:
        return []
    if action.sub_actions:
        return [work for sub in action.sub_actions for work in _works(sub)]
    kind = LETTERS.get(action.computation_type.name)
    return [Action(action.stage_index, kind, action.microbatch_index)] if kind else []


def numbered(table: Table) -> Table:
    """Return a table whose microbatches of each stage and kind are numbered as they come."""
    found: Table = []
    for row in table:
        seen = Counter[tuple[int, str]]()
        found.append([])
        for work in row:
            found[-1].append(Action(work.stage, work.kind, seen[work.stage, work.kind]))
            seen[work.stage, work.kind] += 1
    return found


def idle(table: Table) -> float:
    return sum(max(finish(table).values()) - sum(SECONDS[work.kind] for work in row) for row in table)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(
    ("name", "rule"),
    [("GPipe", schedules.gpipe), ("Interleaved1F1B", schedules.interleaved), ("DualPipeV", schedules.dualpipe_v)],
)
def test_rows_are_equal(name: str, rule: Rule, p: int, m: int) -> None:
    assert rule(p, m) == torchs(name, p, m)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize(("name", "rule"), [("1F1B", schedules.schedule_1f1b), ("LoopedBFS", schedules.breadth_first)])
def test_rows_are_equal_but_for_numbers_of_microbatches(name: str, rule: Rule, p: int, m: int) -> None:
    """torch's list of 1F1B numbers the forwards of rank r from r, beyond the last microbatch; its breadth-first one
    takes the backwards of the last microbatch first, which sends what each stage made in the other order.
    """
    theirs = torchs(name, p, m)
    assert rule(p, m) == numbered(theirs) != theirs


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_zbv_only_ends_with_weight_gradients_in_another_order(p: int, m: int) -> None:
    """Ours takes those that have waited longest, torch's those of one chunk after the other: nothing waits for any."""
    ours, theirs = schedules.zbv(p, m), torchs("ZBVZeroBubble", p, m)
    for row, other in zip(ours, theirs, strict=True):
        assert sorted(map(str, row)) == sorted(map(str, other))
        assert [w for w in row if w.kind != "W"] == [w for w in other if w.kind != "W"]
    assert idle(ours) == idle(theirs)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_a_v_is_no_worse_than_interleaved_zero_bubble(p: int, m: int) -> None:
    """torch's InterleavedZeroBubble has no rule here: with as many chunks zbv idles as little and keeps as little."""
    ours, theirs = schedules.zbv(p, m), torchs("InterleavedZeroBubble", p, m)
    assert idle(ours) <= idle(theirs)
    assert most(ours) <= most(theirs)


def most(table: Table) -> int:
    """Return the most activations that a device keeps."""
    return max(total for row in table for total in accumulate(KEEPS.get(work.kind, 0) for work in row))
