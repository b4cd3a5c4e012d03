"""Every plan equals one device, on unmodified Hugging Face models: two steps in float64, 20 in float32."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from superscaler.artifact import describe, initial_values
from superscaler.cluster import Cluster
from superscaler.comm.threads import run_ranks
from superscaler.ir.program import Backward, Collective, Forward
from superscaler.models import build
from superscaler.plan import Plan, compile
from superscaler.plans import resolve
from superscaler.runtime.step import build_step, modules
from tests.graphs import graph_of
from tests.sweeps import slow

# All plans on a model without blocks, those that cut most on two others; all of all with `-m slow`.
DEEP = ["gpt2:size=tiny,layers=4", "llama:size=tiny,layers=4"]
MODELS = ["mlp", *DEEP, "gpt2:size=tiny", "llama:size=tiny"]
PLANS = [
    ("single", 1),
    ("data_parallel", 2),
    ("data_parallel", 4),
    ("tensor_parallel", 2),
    ("tensor_parallel", 4),
    *((f"pipeline_1f1b:stages={s},microbatches={m}", s) for s in (2, 4) for m in (4, 8)),
    ("hybrid:dp=2,tp=2,pp=2,microbatches=2", 8),
    ("hybrid:dp=2,tp=2,pp=2,microbatches=4", 8),
]


class Ran(NamedTuple):
    """What a rank did in some steps."""

    losses: list[float]
    moved: int
    outside: int


def plan_of(model: str, spec: str, world: int) -> Plan:
    return compile(graph_of(model), resolve(spec), Cluster.local(world))


CASES = [
    (model, *plan) if model == "mlp" or (model in DEEP and plan in (PLANS[4], PLANS[-2])) else slow((model, *plan))[0]
    for model in MODELS
    for plan in PLANS
]


@pytest.mark.parametrize(("model", "spec", "world"), CASES)
def test_a_step_equals_the_exported_model(model: str, spec: str, world: int) -> None:
    result = plan_of(model, spec, world).verify()
    assert result["equal"], result
    assert max(result["loss_error"], result["gradient_error"], result["parameter_error"]) <= 1e-9
    assert result["bytes_moved"] == result["bytes_planned"]


def test_labels_are_unevenly_ignored_so_that_a_mean_of_means_would_fail() -> None:
    labels = graph_of("gpt2:size=tiny").captured.batch["labels"]
    kept = (labels != -100).sum(dim=1)
    assert len(set(kept.tolist())) > 2


def test_verify_fails_on_a_plan_that_is_wrong() -> None:
    graph = graph_of("gpt2:size=tiny")
    op = next(o for o in graph.ops if o.target == "aten.layer_norm.default")
    broken = graph.copy()
    broken.model = type(graph.model)(
        **{
            **{f: getattr(graph.model, f) for f in graph.model.__dataclass_fields__},
            "ops": tuple(
                o
                if o is not op
                else type(o)(**{**{f: getattr(o, f) for f in o.__dataclass_fields__}, "args": (*o.args[:4], 0.5)})
                for o in graph.model.ops
            ),
        }
    )
    result = compile(broken, resolve("data_parallel"), Cluster.local(2)).verify()
    assert not result["equal"]
    assert result["gradient_error"] > 1e-6
    assert result["worst_tensor"]


def train(plan: Plan, steps: int, batches: list[Mapping[str, Tensor]], clip: float | None = None) -> list[Ran]:
    """Train in this process, a rank in each thread."""
    values = initial_values(plan.compiled.graph.model, plan.compiled.graph.captured.values)
    described, code = describe(plan.compiled), modules(plan.compiled.emitted.files)

    def run(communicator):  # type: ignore[no-untyped-def]
        step = build_step(described, code, values, communicator)
        found = [float(step(batches[k % len(batches)], clip)) for k in range(steps)]
        return Ran(found, step.bytes_moved, communicator.bytes_outside_plan)

    return run_ranks(plan.compiled.program.world, run, timeout=120)


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


FIVE = [
    ("single", 1),
    ("data_parallel", 2),
    ("tensor_parallel", 2),
    ("pipeline_1f1b:stages=2,microbatches=4", 2),
    ("hybrid:dp=2,tp=2,pp=2,microbatches=2", 8),
]


@pytest.mark.parametrize(
    ("model", "clip", "spec", "world"),
    [(model, None, *plan) for model in ("gpt2:size=tiny", "llama:size=tiny") for plan in FIVE]
    + [("gpt2:size=tiny", 0.5, *plan) for plan in (FIVE[0], FIVE[-1])],
)
def test_twenty_steps_follow_the_module(model: str, clip: float | None, spec: str, world: int) -> None:
    expected = reference(model, clip)
    for found in losses(plan_of(model, spec, world), 20, batches_of(model), clip):
        assert found == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("spec", "world"), [("tensor_parallel", 2), ("hybrid:dp=2,tp=2,pp=2,microbatches=2", 8)])
def test_dropout_draws_the_same_numbers_under_every_plan(spec: str, world: int) -> None:
    model = "gpt2:size=tiny,dropout=0.1"
    batches = batches_of(model)
    alone = losses(plan_of(model, "single", 1), 5, batches)[0]
    assert alone != pytest.approx(reference("gpt2:size=tiny", None)[:5], abs=1e-5)
    for found in losses(plan_of(model, spec, world), 5, batches):
        assert found == pytest.approx(alone, abs=1e-5)


def test_the_loss_is_bit_for_bit_the_same_on_all_ranks() -> None:
    found = losses(
        plan_of("gpt2:size=tiny", "hybrid:dp=2,tp=2,pp=2,microbatches=2", 8), 3, batches_of("gpt2:size=tiny")
    )
    assert all(rank == found[0] for rank in found)


@pytest.mark.parametrize(
    ("spec", "world"),
    [
        ("data_parallel", 2),
        ("data_parallel", 3),
        ("tensor_parallel", 2),
        ("tensor_parallel", 4),
        ("hybrid:dp=2,tp=2,pp=2,microbatches=2", 8),
        ("pipeline_1f1b:stages=4,microbatches=4", 4),
    ],
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
    assert sum(rank.outside for rank in ran) == 3 * 2 * (world - 1) * (4 + 8)


@pytest.mark.parametrize(("layers", "world"), [(2, 4), (3, 2)])
@pytest.mark.parametrize(
    ("model", "block", "halves"),
    [("gpt2", "transformer.h", ("attn", "mlp")), ("llama", "model.layers", ("self_attn", "mlp"))],
)
def test_tensor_parallelism_issues_two_all_reduces_per_layer_and_direction(
    model: str, block: str, halves: tuple[str, str], layers: int, world: int
) -> None:
    """Forward the sums of what attention and the MLP make, backward of the gradients of what they read: one for the
    queries, keys and values, which llama makes by an op each, and one for what its MLP multiplies.
    """
    program = plan_of(f"{model}:size=tiny,layers={layers}", "tensor_parallel:vocabulary=false", world).compiled.program
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
