"""Predicted bytes are those of the formulas of the field, or of the formula of what our programs keep instead."""

from __future__ import annotations

from functools import cache
from math import prod

import pytest
import torch

import superscaler as ss
from superscaler.ir.program import Backward, Update
from superscaler.models import build
from superscaler.simulate.memory import DeviceMemory, memories
from superscaler.simulate.storages import CATEGORIES
from tests.helpers.graphs import captured_once, graph_of
from tests.helpers.sweeps import few

S, B, H, A, LAYERS = 256, 4, 512, 8, 1
P, M = 4, 8


@cache
def gpt(layers: int, precision: str) -> ss.Graph:
    """Return GPT-3 with bf16 weights and float32 copies, or with float32 weights under bf16 autocast."""
    built = build(f"gpt3:size=tiny,layers={layers},hidden={H},heads={A},seq={S},batch={B},vocab=512,device=meta")
    optimizer = torch.optim.AdamW(built.module.parameters())
    given = {"autocast": "bf16"} if precision == "autocast" else {"precision": "bf16"}
    name = f"memory-{layers}-{precision}"
    return captured_once(name, built.module, built.args, built.kwargs, optimizer, check=False, **given)


def predicted(graph: ss.Graph, plan: str, devices: int) -> tuple[DeviceMemory, ss.Plan]:
    compiled = ss.compile(graph, plan, f"local:{devices}")
    return memories(compiled.compiled.program)[0], compiled


def kept(graph: ss.Graph, plan: str, devices: int) -> int:
    """Return the bytes between the forward and the backward that are no weights, states or gradients."""
    found, compiled = predicted(graph, plan, devices)
    code = compiled.compiled.program.devices[0].instructions
    at = next(n for n, i in enumerate(code) if isinstance(i, Backward)) - 1
    return int(sum(found.curve[at, CATEGORIES.index(name)] for name in ("activations", "values")))


# Megatron keeps sbh(34 + 5as/h) bytes a layer with dropout and the scores of attention. Our GPT-3 has no dropout (2 sbh
# of masks less) and fused attention (4as b of sums of exponents in place of 5as^2 b): sbh(32 + 4a/h). LayerNorm keeps
# two float32 numbers a token, twice: 16sb. Tensor parallelism cuts the 24 of them that Megatron cuts; sequence
# parallelism all but the gathered inputs of two products (4 sbh), unless these are gathered again.
KEPT = {
    ("single", 1): 32.0,
    ("recompute", 1): 2.0,
    ("tensor_parallel", 2): 8 + 24 / 2,
    ("tensor_parallel", 4): 8 + 24 / 4,
    ("sequence_parallel", 2): 28 / 2 + 4,
    ("sequence_parallel:regather=true", 2): 32 / 2,
    ("sequence_parallel:regather=true", 4): 32 / 4,
}
# Under autocast LayerNorm reads and makes float32 (2 sbh more, twice), and each microbatch keeps bf16 copies of the 12
# h^2 weights of a layer.
AUTOCAST = {("single", 1): 36.0 + 24 * H / (S * B)}
ROWS = [
    pytest.param(precision, *row, told, marks=[] if precision == "autocast" else pytest.mark.slow)
    for precision, some in (("copies", KEPT), ("autocast", AUTOCAST))
    for row, told in some.items()
]


@pytest.mark.parametrize(("precision", "plan", "devices", "told"), ROWS)
def test_a_layer_keeps_what_the_formula_says(precision: str, plan: str, devices: int, told: float) -> None:
    less, more = (kept(gpt(layers, precision), plan, devices) for layers in (LAYERS, 2 * LAYERS))
    # Full recomputation keeps the input of a block, and nothing of its inside.
    small = 0 if plan == "recompute" else (4 * A / H + 16 / H) / devices
    assert (more - less) / LAYERS / (S * B * H) == pytest.approx(told + small, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "gathered"), [("data_parallel", 0.0), ("zero:stage=1", 2.0), ("zero:stage=3", 1.03)])
def test_model_states_are_those_of_zero(plan: str, gathered: float) -> None:
    """With weights in bf16 and AdamW in float32: 16 bytes a parameter, and 2 more because gradients of copies are
    float32. ZeRO rests weights, states and gradients in 1 / N, and gathers bf16 weights: all, or those of two blocks.
    """
    graph, n = gpt(4 * LAYERS, "copies"), 4
    size = sum(prod(tensor.shape) for tensor in graph.model.parameters())
    found, compiled = predicted(graph, plan, n)
    code = compiled.compiled.program.devices[0].instructions
    at = max(k for k, i in enumerate(code) if isinstance(i, Update))
    share = 1 if plan == "data_parallel" else n
    assert found.during[at] / size == pytest.approx(18 / share, rel=0.05)
    weights, states = (found.curve[at, CATEGORIES.index(name)] / size for name in ("weights", "optimizer"))
    assert (weights, states) == pytest.approx((2 / share, 12 / share), rel=0.05)
    most = found.curve[:, CATEGORIES.index("gathered")].max() / size
    # Two blocks at the most.
    assert most <= gathered * 1.05
    assert most >= gathered * (0.95 if plan != "zero:stage=3" else 0.45)


@cache
def activations(schedule: str, layers: int) -> list[int]:
    """Return the most bytes of activations of each stage."""
    graph = graph_of(f"gpt2:size=tiny,layers={layers},batch=16")
    compiled = ss.compile(graph, f"{schedule}:microbatches={M}", f"local:{P}")
    return [int(m.curve[:, CATEGORIES.index("activations")].max()) for m in memories(compiled.compiled.program)]


SCHEDULES = {
    "gpipe": [M] * P,
    "pipeline_1f1b": [P - i for i in range(P)],
    # Where it is: the first stage has most.
    "interleaved": [P * (1 + (P - 1) / (P * 2))],
    "breadth_first": [M] * P,
    # A microbatch between its halves keeps as much as before them: inputs of products and gradients of their results.
    "zb_h1": [P] * P,
    "zb_h2": [2 * P - 1] * P,
}


@pytest.mark.parametrize("schedule", few(SCHEDULES, 1))
def test_stages_keep_as_many_microbatches_as_their_schedule_says(schedule: str) -> None:
    layers = P * (1 + (schedule in ("interleaved", "breadth_first")))
    one = [most / M for most in activations("gpipe", layers)]
    found = [most / of for most, of in zip(activations(schedule, layers), one, strict=True)]
    assert found[: len(SCHEDULES[schedule])] == pytest.approx(SCHEDULES[schedule], rel=0.05)
