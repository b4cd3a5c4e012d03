"""Training under a plan follows the module itself: its losses, its random numbers, the bytes that ranks move."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from superscaler.cluster import Cluster
from superscaler.ir.program import Backward, Collective, Forward
from superscaler.models import build
from superscaler.plan import Plan, compile
from superscaler.plans import resolve
from superscaler.runtime.step import Step
from tests.helpers.graphs import graph_of
from tests.helpers.ran import on_ranks
from tests.helpers.sweeps import slow


class Ran(NamedTuple):
    """What a rank did in some steps."""

    losses: list[float]
    moved: int
    outside: int


def plan_of(model: str, spec: str, world: int) -> Plan:
    return compile(graph_of(model), resolve(spec), Cluster.local(world))


def test_labels_are_unevenly_ignored_so_that_a_mean_of_means_would_fail() -> None:
    labels = graph_of("gpt2:size=tiny").captured.batch["labels"]
    kept = (labels != -100).sum(dim=1)
    assert len(set(kept.tolist())) > 2


def test_verify_fails_on_a_plan_that_is_wrong() -> None:
    graph = graph_of("gpt2:size=tiny")
    broken = graph.copy()
    ops = [o if o.target != "aten.layer_norm.default" else replace(o, args=(*o.args[:4], 0.5)) for o in graph.model.ops]
    broken.model = replace(graph.model, ops=tuple(ops))
    result = compile(broken, "data_parallel", "local:2").verify()
    assert not result["equal"]
    assert result["gradient_error"] > 1e-6
    assert result["worst_tensor"]


def train(plan: Plan, steps: int, batches: list[Mapping[str, Tensor]], clip: float | None = None) -> list[Ran]:
    def run(step: Step) -> Ran:
        found = [float(step(batches[k % len(batches)], clip)) for k in range(steps)]
        return Ran(found, step.bytes_moved, step.state.communicator.bytes_outside_plan)

    return on_ranks(plan, run)


def losses(plan: Plan, steps: int, batches: list[Mapping[str, Tensor]], clip: float | None = None) -> list[list[float]]:
    return [rank.losses for rank in train(plan, steps, batches, clip)]


@functools.cache
def reference(model: str, clip: float | None) -> list[float]:
    """Train the module itself, by hand."""
    built = build(model)
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-3)
    found = []
    for batch in batches_of(model):
        out = built.module(**batch)
        loss = getattr(out, "loss", out)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(built.module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def batches_of(model: str) -> list[dict[str, Tensor]]:
    shapes = graph_of(model).captured.batch
    made = []
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        made.append({n: torch.randint(0, 500, x.shape, generator=generator) for n, x in shapes.items()})
    return made


PIPELINE, HYBRID = "pipeline_1f1b:stages=2,microbatches=4", "hybrid:dp=2,tp=2,pp=2,microbatches=2"


@pytest.mark.parametrize(
    ("model", "clip", "spec", "world"),
    [
        ("gpt2:size=tiny", None, "data_parallel", 2),
        *slow(("gpt2:size=tiny", None, "single", 1), ("gpt2:size=tiny", None, "tensor_parallel", 2)),
        *slow(("gpt2:size=tiny", None, PIPELINE, 2), ("gpt2:size=tiny", None, HYBRID, 8)),
        *slow(("llama:size=tiny", None, "tensor_parallel", 2)),
        ("gpt2:size=tiny", 0.5, "single", 1),
        *slow(("gpt2:size=tiny", 0.5, HYBRID, 8)),
    ],
)
def test_twenty_steps_follow_the_module(model: str, clip: float | None, spec: str, world: int) -> None:
    expected = reference(model, clip)
    found = losses(plan_of(model, spec, world), 20, batches_of(model), clip)
    assert found[0] == pytest.approx(expected, abs=1e-5)
    # Bit for bit.
    assert all(rank == found[0] for rank in found)


@pytest.mark.parametrize(("spec", "world"), [("tensor_parallel", 2), *slow((HYBRID, 8))])
def test_dropout_draws_the_same_numbers_under_every_plan(spec: str, world: int) -> None:
    model = "gpt2:size=tiny,dropout=0.1"
    batches = batches_of(model)
    alone = losses(plan_of(model, "single", 1), 5, batches)[0]
    assert alone != pytest.approx(reference("gpt2:size=tiny", None)[:5], abs=1e-5)
    for found in losses(plan_of(model, spec, world), 5, batches):
        assert found == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("spec", "world"), [("data_parallel", 3), *slow(("tensor_parallel", 4), (HYBRID, 8), (PIPELINE, 2))]
)
def test_the_ranks_move_the_bytes_that_the_plan_says(spec: str, world: int) -> None:
    """Of float32, by sums that share buckets, by messages; the loss and its norm are sums over all that come on top."""
    model = "gpt2:size=tiny,batch=6" if world == 3 else "gpt2:size=tiny"
    plan = plan_of(model, spec, world)
    code = (i for device in plan.compiled.program.devices for i in device.instructions)
    has_buckets = any(isinstance(i, Collective) and len(i.works) > 1 for i in code)
    assert has_buckets == (not spec.startswith("pipeline"))
    batch = graph_of(model).captured.batch
    ran = train(plan, 3, [batch], clip=0.5)
    assert sum(rank.moved for rank in ran) == 3 * plan.counts["bytes_moved"] > 0
    # With the loss two numbers of each rank travel.
    assert sum(rank.outside for rank in ran) == 3 * 2 * (world - 1) * (4 * (1 + 2 * world) + 8)


@pytest.mark.parametrize(
    ("model", "block", "halves", "layers", "world"),
    [
        ("gpt2:size=tiny,layers=4,batch=16", "transformer.h", ("attn", "mlp"), 4, 2),
        ("llama:size=tiny", "model.layers", ("self_attn", "mlp"), 2, 4),
    ],
)
def test_tensor_parallelism_issues_two_all_reduces_per_layer_and_direction(
    model: str, block: str, halves: tuple[str, str], layers: int, world: int
) -> None:
    """Forward the sums of what attention and the MLP make, backward of the gradients of what they read: one for the
    queries, keys and values, which llama makes by an op each, and one for what its MLP multiplies.
    """
    program = plan_of(model, "tensor_parallel:vocabulary=false", world).compiled.program
    parts = [f"{block}.{layer}.{half}" for layer in range(layers) for half in halves]
    for device in program.devices:
        forwards = (i for i in device.instructions if isinstance(i, Forward))
        module_of = {i.task: program.functions[i.function].module for i in forwards}
        issued, after = list[tuple[str, str]](), ("", "")
        for i in device.instructions:
            if isinstance(i, Forward | Backward):
                after = type(i).__name__, module_of[i.task]
            # Two queries of this llama share a key, whose weights' gradients are summed over pairs of devices besides.
            elif isinstance(i, Collective) and i.kind == "all_reduce" and len(i.group) == world:
                issued.append(after)
        head = ("Backward", "lm_head")
        assert issued == [*(("Forward", part) for part in parts), head, *(("Backward", part) for part in parts[::-1])]
