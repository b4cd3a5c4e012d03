"""The order of communication is chosen before any instruction is written."""

from __future__ import annotations

import pytest

import superscaler as ss
from superscaler.collectives import KINDS, PART, TILE
from superscaler.materialize import actions, buckets, build
from superscaler.materialize.actions import Action, Arrive, Bucket
from superscaler.schedule import segments
from superscaler.schedule.dependencies import Node
from tests.helpers.graphs import graph_of


def in_flight(order: list[Action]) -> list[int]:
    """Return how many buckets of sums in slices are in flight when each other one has started."""
    flying: list[set[int]] = []
    found = []
    for action in order:
        if isinstance(action, Bucket) and KINDS[action.entries[0].step.how.kind].ends == (PART, TILE):
            flying.append({entry.number for entry in action.entries})
        elif isinstance(action, Arrive):
            flying = [left for some in flying if (left := some - {action.number})]
        else:
            continue
        found.append(len(flying))
    return found


def test_sums_of_a_backward_arrive_after_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a block with many buckets, as of 13B, no sum is waited for before the backward of the block before it."""
    made: list[list[Action]] = []
    real = build.actions
    monkeypatch.setattr(build, "actions", lambda *given: made.append(list(real(*given))) or made[-1])
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    ss.compile(graph_of("gpt2:size=tiny,layers=4,batch=16"), "fsdp", "local:2")
    works, started = 0, dict[int, int]()
    most = 0
    for action in made[-1]:
        works += isinstance(action, Node)
        if isinstance(action, Bucket) and KINDS[action.entries[0].step.how.kind].ends == (PART, TILE):
            started |= {entry.number: works for entry in action.entries}
        elif isinstance(action, Arrive) and action.number in started:
            assert works > started[action.number]
        most = max(most, len([number for number, at in started.items() if at == works]))
    assert most > 3 * actions.FLYING


@pytest.mark.parametrize("most", [1, 2, 4])
def test_few_sums_are_in_flight(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more starts before the first of them arrives."""
    made: list[list[Action]] = []
    real = build.actions
    monkeypatch.setattr(build, "actions", lambda *given: made.append(list(real(*given))) or made[-1])
    for module in (buckets, segments):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(actions, "FLYING", most)
    ss.compile(graph_of("gpt2:size=tiny"), "zero:stage=2", "local:2")
    assert max(in_flight(made[-1])) == most + 1
