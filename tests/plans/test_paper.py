"""The plans of the paper's evaluation, as its scripts write them, are equal to the model at a small shape."""

from __future__ import annotations

import sys
from math import prod
from pathlib import Path

import pytest

from tests.graphs import graph_of
from tests.ran import equal
from tests.sweeps import few

PAPER = Path(__file__).parents[2] / "benchmarks/paper"
sys.path.insert(0, str(PAPER))

from points import Point  # noqa: E402
from systems import MAKERS  # noqa: E402

ROWS = [
    ("gpt3", "co-shard", "2x1x1/2"),
    ("mbart", "interlaced", "2x1"),
    ("gpt3", "co-shard", "2x2x1/2"),
    ("gpt3", "Megatron-LM, Alpa", "2x2x1+"),
    ("gpt3", "Megatron-LM, Alpa", "1x2x2"),
    ("gpt3", "DeepSpeed", "2x2"),
    ("gpt3", "DeepSpeed", "2x1 offload"),
    ("mbart", "Megatron-LM", "2x2x1+"),
    ("mbart", "DeepSpeed", "2x2 offload"),
    ("mbart", "interlaced", "2x2"),
    ("mbart", "interlaced, recompute late", "2x2"),
    ("swin", "Megatron-LM", "2x2x1+"),
    ("swin", "DeepSpeed", "2x2"),
    ("swin", "co-shard, first 4", "2x2x1/2"),
    ("alphafold2", "DAP + DP", "2x2+"),
    ("alphafold2", "3F1B", "2x1+"),
    ("alphafold2", "3F1B", "2x2+"),
]


@pytest.mark.parametrize(("family", "system", "config"), few(ROWS, 0, 1))
def test_plan_is_equal_to_the_model(family: str, system: str, config: str) -> None:
    devices = prod(map(int, config.rstrip("+").partition(" ")[0].partition("/")[0].split("x")))

    def place(plan: str, stages: int = 1, dp: int = 1) -> Point:
        tiny = f"{PAPER / 'gpt3.py'}:gpt3:size=tiny,seq=24,vocab=320,dropout=0"
        model = tiny if family == "gpt3" else f"{family}:size=tiny"
        return Point(model, plan, "", 512, stages, dp)

    point = MAKERS[system](place, config)
    rows = point.few * point.dp
    # The batch of other tests, where it can be cut so.
    equal(graph_of(point.model if 8 % rows == 0 else f"{point.model},batch={rows}"), point.spec, devices)
