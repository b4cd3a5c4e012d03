"""Mixed precision as part of the graph: what autocast casts, how often, and what its plans compute."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from superscaler.artifact import slots_of
from superscaler.cluster import Cluster
from superscaler.emit.device import emit
from superscaler.errors import CaptureError, InputError
from superscaler.frontend.base.oracle import reference_step
from superscaler.ir.graph import Graph
from superscaler.models import BuiltModel, build
from superscaler.plan import Plan, capture, compile
from superscaler.runtime.executor import take
from superscaler.runtime.step import Step
from superscaler.verbs import Microbatch, op_assign, op_trans
from tests.helpers.graphs import assert_equal, step_of
from tests.helpers.ran import on_ranks
from tests.helpers.sweeps import slow

PLANS = [
    ("single", 1),
    ("data_parallel", 2),
    ("tensor_parallel", 2),
    ("pipeline_1f1b:stages=2,microbatches=4", 2),
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
CAST = "aten._to_copy.default"


def loss_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.loss


Found = tuple[Tensor, dict[str, Tensor]]


def eager(module: nn.Module, batch: Mapping[str, Tensor], dtype: torch.dtype | None) -> Found:
    """Return the loss and the gradients of one backward, under autocast where a dtype is given."""
    # A region that is off would keep the casts of the regions inside of it.
    with torch.autocast("cpu", dtype=dtype) if dtype else nullcontext():
        loss = loss_of(module(**batch))
    module.zero_grad()
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


def masked(batch: dict[str, Tensor], spec: str) -> dict[str, Tensor]:
    """Return the batch for eager runs. With grouped heads the library chooses another kernel unless it has a mask, as
    it always has while it is exported.
    """
    size = batch["input_ids"].shape[1] if "input_ids" in batch else 0
    mask = {"attention_mask": torch.ones(1, 1, size, size, dtype=torch.bool).tril()} if "llama" in spec else {}
    return {**batch, **mask}


def one_step(plan: Plan) -> list[Found]:
    """Return what each rank finds in one step in the plan's own precision: the loss, and gradients by weight."""

    def run(step: Step) -> tuple[Tensor, dict[str, Tensor]]:
        step.state.updates.keep_gradients = True
        loss = step(plan.compiled.graph.captured.batch)
        names = {w["name"]: w["tensor"] for w in step.state.tables["weights"]}
        return loss, {names[n]: g for n, g in step.state.updates.gradients.items()}

    return on_ranks(plan, run)


def step_under(built: BuiltModel, autocast: str | None = "bf16", **options: Any) -> Graph:
    return step_of(built.module, *built.args, lr=1e-2, kwargs=built.kwargs, autocast=autocast, **options)


@functools.cache
def captured(spec: str, autocast: str | None = "bf16") -> tuple[nn.Module, dict[str, Tensor], Graph]:
    built = build(spec)
    return built.module, built.kwargs, step_under(built, autocast)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))


def assert_bits(graph: Graph, expected: Tensor, gradients: Mapping[str, Tensor]) -> None:
    """One device computes the loss and the gradients bit for bit, and keeps gradients in float32."""
    ((loss, found),) = one_step(compile(graph, "single", "local:1"))
    assert torch.equal(loss, expected)
    assert found.keys() == gradients.keys()
    assert not [n for n, g in gradients.items() if not torch.equal(found[n], g.float())]
    assert {g.dtype for g in found.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("spec", "name"), [("mlp", "fp16"), *slow(("gpt2:size=tiny", "bf16"), ("llama:size=tiny", "bf16"))]
)
@pytest.mark.filterwarnings("ignore:.*float16 gradients")
def test_one_device_gives_the_bits_of_eager_autocast(spec: str, name: str) -> None:
    module, batch, graph = captured(spec, name)
    assert_bits(graph, *eager(module, masked(batch, spec), DTYPES[name]))


class Regression(nn.Module):
    """A squared error of all rows, whose targets have an outlier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(24, 48), nn.LayerNorm(48), nn.Linear(48, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(self.norm(torch.relu(self.first(x)))), y)


@pytest.mark.parametrize(("plan", "world"), [("data_parallel", 2), ("gradient_accumulation:microbatches=2", 1)])
def test_parts_of_a_batch_have_the_bits_of_eager_autocast_on_each(plan: str, world: int) -> None:
    """No sum over rows is rounded to bf16: plans differ from the module on the whole batch by its parts alone."""
    torch.manual_seed(0)
    module, x, y = Regression(), torch.randn(8, 24), torch.randn(8, 3)
    y[1, 1] = 300.0
    graph = step_of(module, x, y, autocast="bf16")
    halves = [eager(module, {"x": a, "y": b}, torch.bfloat16)[1] for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]
    for _, found in one_step(compile(graph, plan, Cluster.local(world))):
        assert not [n for n, gradient in found.items() if not torch.equal(gradient, (halves[0][n] + halves[1][n]) / 2)]
        assert found.keys() == halves[0].keys()


@pytest.mark.parametrize("spec", ["gpt2:size=tiny", *slow("llama:size=tiny")])
def test_plans_are_exact_in_float64_and_as_close_to_the_truth_as_eager_autocast(spec: str) -> None:
    """Plans and eager round at other places: a plan's worst gradient is at most half farther from float64's."""
    module, batch, graph = captured(spec)
    assert CAST in {op.target for op in graph.ops}
    model = graph.captured
    values = {n: v.double() if v.is_floating_point() else v for n, v in model.values.items()}
    inputs = {n: v.double() if v.is_floating_point() else v for n, v in model.batch.items()}
    exact_loss, exact, *_ = reference_step(model, inputs, values, torch.float64)
    _, gradients = eager(module, batch, torch.bfloat16)
    # Gradients that are zero but for rounding (of key biases) say nothing.
    largest = max(float(g.norm()) for g in exact.values())
    telling = {n for n, g in exact.items() if g.norm() > 1e-3 * largest}
    bound = 1.5 * max(distance(gradients[n], exact[n]) for n in telling)
    for plan, world in PLANS[2:3]:
        assert_equal(graph, plan, world)
        compiled = compile(graph, plan, Cluster.local(world))
        results = one_step(compiled)
        assert len({float(found) for found, _ in results}) == 1
        assert abs(float(results[0][0] - exact_loss)) <= 2**-8 * float(exact_loss)
        seen = set()
        for device, (_, mine) in zip(compiled.compiled.program.devices, results, strict=True):
            for weight in device.weights:
                if weight.tensor in telling:
                    want = take(exact[weight.tensor], slots_of(graph.model, weight.tensor), weight.box)
                    assert distance(mine[weight.tensor], want) <= bound, (plan, weight.tensor)
                    seen.add(weight.tensor)
        assert seen == telling


class Twice(nn.Module):
    """Reads weights more than once: in one region, in another one, in full, and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = torch.tanh(self.first(self.first(x)))
            with torch.no_grad(), torch.no_grad():
                fixed = self.second(h)
            fixed = fixed + self.second(h).detach()
            with torch.autocast("cpu", enabled=False):
                full = self.second(h.float())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.first(h) + torch.einsum("bi,oi->bo", h.float(), self.second.weight)
        return (h.float() * full + fixed).pow(2).mean()


def test_regions_of_the_model_are_followed_to_the_bit() -> None:
    module, x = Twice(), torch.randn(4, 8)
    graph = step_of(module, x)
    assert_bits(graph, *eager(module, {"x": x}, None))
    assert_equal(graph)
    # Once in each of two regions; of the second linear also within its einsum, which eager does not keep either.
    casts = Counter(op.inputs[0].tensor for op in graph.ops if op.target == CAST and op.from_weights)
    assert casts == {"first.weight": 2, "first.bias": 2, "second.weight": 2, "second.bias": 1}
    # Of activations they stay apart, so that their gradients are added in float32.
    casts = Counter(op.inputs[0].tensor for op in captured("llama:size=tiny")[2].ops if op.target == CAST)
    assert max(casts.values()) == 3
    # Ops keep their modules, by which plans choose them.
    assert {"first", "second"} <= {op.module for op in graph.ops if op.target == CAST}


def test_the_region_around_a_capture_counts_and_its_device_is_not_in_the_plan() -> None:
    built, scaler = build("mlp"), torch.amp.GradScaler("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graph, other = step_under(built, None), step_under(built, "fp16", scaler=scaler)
    assert graph.model == step_under(built).model
    assert "bfloat16" not in {t.dtype for t in other.model.tensors.values()}
    assert CAST not in {op.target for op in step_under(built, None).ops}
    files = emit(compile(graph, "single", "local:1").compiled.program).files
    assert ".to(torch.bfloat16)" in files["segments.py"]
    assert not any(word in text for text in files.values() for word in ("cpu", "autocast"))
    assert {t.dtype for t in graph.model.parameters()} == {"float32"}


def test_a_step_inside_of_a_region_is_the_same() -> None:
    _, batch, graph = captured("mlp", None)

    def run(step: Step) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return step(batch)

    (loss,) = on_ranks(compile(graph, "single", "local:1"), run)
    assert torch.equal(loss, eager(build("mlp").module, batch, None)[0])


def test_models_without_data_are_cast_too() -> None:
    spec = "mlp:device=meta"
    module, _, graph = captured(spec)
    real = captured(spec.replace("meta", "cpu"))[2]
    assert [(op.name, op.target) for op in graph.ops] == [(op.name, op.target) for op in real.ops]
    assert all(p.is_meta for p in module.parameters())
    assert not set(graph.captured.values) & {n for n, _ in module.named_parameters()}
    assert compile(graph, "data_parallel", "local:2").verify(batch=real.captured.batch)["equal"]


class Summed(nn.Module):
    """Its gradients have one sign, so that a sum in halves stops growing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(self.head(x).float(), y)


def cast_once(graph: Graph, cluster: Cluster) -> None:
    for op in graph.forward_ops:
        op_assign(graph, op if op.from_weights else op_trans(graph, op, Microbatch(64)), cluster.devices[0])


@pytest.mark.parametrize(
    ("is_whole", "plan", "world"),
    [
        *slow((False, "pipeline_1f1b:stages=2,microbatches=64", 2)),
        (True, "hybrid:dp=2,microbatches=32", 2),
        *slow((False, cast_once, 1)),
    ],
)
def test_microbatches_add_their_gradients_in_float32(is_whole: bool, plan: Any, world: int) -> None:
    module, x, y = Summed(), torch.rand(64, 16), torch.full((64, 1), 10.0)
    if is_whole:
        module, x = module.bfloat16(), x.bfloat16()
    graph = step_of(module, x, y, autocast=None if is_whole else "bf16")
    exact: dict[str, Tensor] = {}
    halves: dict[str, Tensor] = {}
    for k in range(64):
        batch = {"x": x[k : k + 1], "y": y[k : k + 1]}
        for name, gradient in eager(module, batch, None if is_whole else torch.bfloat16)[1].items():
            exact[name] = exact.get(name, torch.zeros(())) + gradient.double() / 64
            halves[name] = halves.get(name, torch.zeros(())).bfloat16() + gradient.bfloat16() / 64
    found = {n: g for _, mine in one_step(compile(graph, plan, Cluster.local(world))) for n, g in mine.items()}
    assert found.keys() == exact.keys()
    for name, gradient in exact.items():
        # One cast for all microbatches has one gradient, their sum, which is rounded once.
        expected = gradient.bfloat16() if plan is cast_once else gradient
        assert distance(found[name], expected) <= 1e-6, name
    # What bfloat16 sums would give is farther than any single rounding.
    assert max(distance(halves[n], exact[n]) for n in exact) > 2**-8


@pytest.mark.filterwarnings("ignore:.*float16 gradients")
@pytest.mark.parametrize(
    ("spec", "dtype", "plans"),
    [
        ("llama:size=tiny,layers=1", torch.bfloat16, PLANS[2:3]),
        *slow(("gpt2:size=tiny", torch.float16, PLANS[3:]), ("llama:size=tiny", torch.bfloat16, PLANS[2:3])),
    ],
)
def test_whole_modules_in_halves(spec: str, dtype: torch.dtype, plans: list[tuple[str, int]]) -> None:
    built = build(spec)
    built.module.to(dtype)
    graph = step_under(built, None)
    assert_bits(graph, *eager(built.module, masked(built.kwargs, spec), None))
    for plan, world in plans:
        assert_equal(graph, plan, world)


class Half(nn.Module):
    """Losses in the module's own half, summed, averaged, and scaled after the mean."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 64, dtype=torch.float32), nn.Linear(64, 8, dtype=dtype)
        self.dtype = dtype

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        out = self.second(torch.tanh(self.first(x)).to(self.dtype))
        return F.cross_entropy(out, labels) * 0.5 + F.mse_loss(out, torch.full_like(out, 30.0)) + out.pow(2).mean()


@pytest.mark.filterwarnings("ignore:.*float16 gradients")
def test_mixed_parameters_and_losses_in_halves() -> None:
    dtype = torch.bfloat16
    module, x, labels = Half(dtype), torch.randn(64, 8), torch.randint(0, 8, (64,))
    graph = step_of(module, x, labels)
    assert {t.dtype for t in graph.model.parameters()} == {"float32", str(dtype).removeprefix("torch.")}
    expected, gradients = eager(module, {"x": x, "labels": labels}, None)
    for plan, world in (PLANS[1], PLANS[3]):
        assert_equal(graph, plan, world)
        compiled = compile(graph, plan, Cluster.local(world))
        for loss, found in one_step(compiled):
            # The sum of the squares of 512 errors near 30 is far above what a float16 can hold.
            assert loss.isfinite()
            assert float(loss) == pytest.approx(float(expected), rel=2**-7)
            for name, gradient in found.items():
                assert distance(gradient, gradients[name]) <= 2**-5, name


def test_what_cannot_be_cast_is_refused() -> None:
    built = build("mlp")
    with pytest.raises(InputError, match="unknown autocast 'bfloat16'; did you mean 'bf16'"):
        step_under(built, "bfloat16")
    built.module.head.to("meta")
    with pytest.raises(CaptureError, match=r"layers\.0\.weight of MLP is on cpu, but head\.weight on meta; put"):
        step_under(built, None)


def test_float16_without_a_scaler_warns_once() -> None:
    built = build("mlp")
    optimizer = torch.optim.SGD(built.module.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="float16 gradients") as record:
        graph = capture(built.module, built.args, built.kwargs, autocast="fp16", optimizer=optimizer)
    assert len(record) == 1
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert one_step(compile(graph, "single", "local:1"))[0][0].isfinite()
        step_under(built, "fp16", scaler=torch.amp.GradScaler("cpu"))
