"""Segments are recorded once a process: a plan that is predicted again, or beside another, runs no function again."""

import pytest

import superscaler as ss
from superscaler.simulate import segments
from superscaler.simulate.recording import Recorder
from tests.helpers.graphs import graph_of

PLANS = ("tensor_parallel:2", "zero:2,stage=3", "hybrid:dp=1,tp=1,pp=2,microbatches=2")


def test_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second prediction of each plan is equal to one without memory, and records nothing."""
    graph, cold = graph_of("gpt2:size=tiny"), {}
    for plan in PLANS:
        monkeypatch.setattr(segments, "_RECORDED", {})
        cold[plan] = ss.compile(graph, plan, "a100:1x2").simulate().as_json()
    monkeypatch.setattr(segments, "_RECORDED", {})
    for plan in PLANS:
        assert ss.compile(graph, plan, "a100:1x2").simulate().as_json() == cold[plan]
    monkeypatch.setattr(Recorder, "segment", None)
    for plan in PLANS:
        assert ss.compile(graph, plan, "a100:1x2").simulate().as_json() == cold[plan]
