"""Weights of 16 bits with float32 copies: steps equal those of a reference in torch, under plans and after a resume."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import superscaler as ss
from superscaler.errors import CaptureError, InputError
from superscaler.ir.text.model import parse_model, print_model
from superscaler.models import BuiltModel, build
from superscaler.plan import capture_named
from superscaler.runtime.optimizer import WithCopies
from superscaler.runtime.step import Step
from tests.helpers.graphs import graph_of
from tests.helpers.ran import Around, captured, equal, moved, on_ranks
from tests.helpers.sweeps import slow

SPEC = "gpt2:size=tiny,layers=2,batch=4"
# By tensor: the weight, and its optimizer states by name.
Trained = dict[str, dict[str, Tensor]]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def scaler(scale: float = 2.0**10) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale)


@cache
def built() -> BuiltModel:
    return build(SPEC)


def batch() -> dict[str, Tensor]:
    """Return a batch in whose halves equally many labels count."""
    ids = built().kwargs["input_ids"]
    return {"input_ids": ids, "labels": ids}


@cache
def step_in(precision: str, scale: float = 0.0) -> ss.Graph:
    model = built()
    options: dict[str, Any] = {"scaler": scaler(scale)} if scale else {}
    given = model.module, model.args, model.kwargs, adamw(model.module)
    return capture_named(SPEC, *given, precision=precision, **options, check=False)


@cache
def mlp() -> ss.Graph:
    model = build("mlp")
    return ss.capture(model.module, model.args, model.kwargs, adamw(model.module), precision="bf16", check=False)


class Reference:
    """Mixed precision in torch alone: 16-bit weights are rounded from float32 copies, which torch's AdamW updates."""

    def __init__(self, precision: str, scale: float = 1.0) -> None:
        self.module, self.scale = copy.deepcopy(built().module).to(DTYPES[precision]), scale
        self.copies = {n: p.detach().float() for n, p in self.module.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.copies.values(), lr=1e-2, fused=True)

    def step(self, microbatches: int = 1, clip: float | None = None) -> None:
        parts = {n: x.chunk(microbatches) for n, x in batch().items()}
        for k in range(microbatches):
            self.module.zero_grad()
            loss = self.module(**{n: x[k] for n, x in parts.items()}).loss
            (loss * (self.scale / microbatches)).backward()
            for name, weight in self.module.named_parameters():
                assert weight.grad is not None
                sums = self.copies[name].grad
                self.copies[name].grad = weight.grad.float() + (0 if sums is None else sums)
        for x in self.copies.values():
            assert x.grad is not None
            x.grad /= self.scale
        if clip is not None:
            nn.utils.clip_grad_norm_(self.copies.values(), clip)
        if all(x.grad is not None and x.grad.isfinite().all() for x in self.copies.values()):
            self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, weight in self.module.named_parameters():
                weight.copy_(self.copies[name])


def state(step: Step) -> Trained:
    """Return copies of a rank's weights, as `weight`, and of their optimizer states, by tensor."""
    assert step.state.updates.optimizer is not None
    found = {}
    for entry in step.state.tables["weights"]:
        weight = step.state.weights[entry["name"]]
        found[entry["tensor"]] = {
            "weight": weight.detach().clone(),
            **copy.deepcopy(step.state.updates.optimizer.state.get(weight, {})),
        }
    return found


def train(steps: int, inputs: dict[str, Tensor] | None = None, clip: float | None = None) -> Callable[[Step], Trained]:
    def run(step: Step) -> Trained:
        for _ in range(steps):
            step(inputs or batch(), clip)
        return state(step)

    return run


@pytest.mark.parametrize(
    ("precision", "scale", "microbatches"), [*slow(("bf16", 0.0, 1)), ("bf16", 0.0, 2), *slow(("fp16", 2.0**10, 1))]
)
def test_one_device_has_the_bits_of_the_reference(precision: str, scale: float, microbatches: int) -> None:
    plan = ss.compile(step_in(precision, scale), f"gradient_accumulation:microbatches={microbatches}", "local:1")
    (found,) = on_ranks(plan, train(4))
    reference = Reference(precision, scale or 1.0)
    for _ in range(4):
        reference.step(microbatches)
    for name, weight in reference.module.named_parameters():
        assert found[name]["weight"].dtype == DTYPES[precision]
        assert torch.equal(found[name]["weight"], weight), name
        assert torch.equal(found[name]["copy"], reference.copies[name]), name
    # The copies have digits that the weights lack.
    assert any(not torch.equal(x["copy"], x["weight"].float()) for x in found.values())


class Casts(TorchDispatchMode):
    """The shapes of tensors that are cast in a block: `alone`, and in `lists`."""

    def __init__(self) -> None:
        super().__init__()
        self.alone, self.lists = list[torch.Size](), list[list[torch.Size]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::_to_copy":
            self.alone.append(args[0].shape)
        if func.name() == "aten::_foreach_copy_":
            self.lists.append([x.shape for x in args[0]])
        return func(*args, **(kwargs or {}))


def test_gradients_are_cast_by_lists() -> None:
    """A GPU starts one kernel for a list, and one for each tensor that is cast alone."""

    def casts(step: Step) -> Casts:
        train(1, inputs)(step)
        with Casts() as found:
            step(inputs)
        return found

    inputs = mlp().captured.batch
    (found,) = on_ranks(ss.compile(mlp(), "single", "local:1"), casts)
    shapes = sorted(t.shape for t in mlp().model.parameters())
    # Gradients become float32, and weights are rounded from their copies.
    assert [sorted(some) for some in found.lists] == [shapes] * 2
    assert not set(shapes) & set(found.alone)


def test_clipping_is_of_float32_gradients() -> None:
    (found,) = on_ranks(ss.compile(step_in("bf16"), "single", "local:1"), train(1, clip=0.1))
    reference = Reference("bf16")
    reference.step(clip=0.1)
    for name, x in reference.copies.items():
        torch.testing.assert_close(
            found[name]["exp_avg"], reference.optimizer.state[x]["exp_avg"], rtol=1e-5, atol=1e-9
        )


def test_a_step_that_is_not_finite_changes_no_weight_and_no_copy() -> None:
    plan = ss.compile(step_in("fp16", 2.0**10), "data_parallel", "local:2")

    def run(step: Step) -> tuple[bool, float]:
        assert step.state.updates.scaler is not None
        step.state.updates.scaler.scale.fill_(2.0**40)
        before = {n: w.detach().clone() for n, w in step.state.weights.items()}
        step(batch())
        after = state(step).values()
        return all(torch.equal(before[n], w) for n, w in step.state.weights.items()) and all(
            x.keys() == {"weight"} for x in after
        ), float(step.state.updates.scaler.scale)

    assert on_ranks(plan, run) == [(True, 2.0**39)] * 2


@pytest.mark.parametrize(
    ("plan", "world"),
    [
        ("zero:stage=2", 2),
        *slow(
            ("bytescheduler:piece=4096", 2),
            ("swap:what=optimizer", 1),
            ("pipedream:microbatches=2", 2),
            ("zero:stage=3", 2),
            ("tensor_parallel", 2),
        ),
    ],
)
def test_plans_update_copies_as_torch_does(plan: str, world: int) -> None:
    """In float64, and in the trained dtype with the rule of the precision."""
    found = ss.compile(step_in("bf16"), plan, f"local:{world}").verify()
    assert found["equal"], found["first_difference"]
    assert (found["reference"], found["trained_dtype"]) == ("eager", "bfloat16")


@pytest.mark.parametrize("wrong", ["copy", *slow("weight")])
def test_verify_finds_a_wrong_copy_and_a_wrong_weight(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(self: torch.optim.Optimizer, closure: Any = None) -> None:
        WithCopies.step(self)  # type: ignore[arg-type]
        # The steps in float64 have no copies.
        for weight, kept in ((w, kept) for w, kept in self.state.items() if "copy" in kept):
            (kept["copy"] if wrong == "copy" else weight.detach()).mul_(1 + 2**-6)

    def made(name: str) -> type:
        return type(name, (WithCopies, getattr(torch.optim, name)), {"step": changed})

    monkeypatch.setattr("superscaler.runtime.optimizer.with_copies", made)
    found = ss.compile(mlp(), "single", "local:1").verify()
    assert not found["equal"]
    assert "in bfloat16, after its update " + "the float32 copy of " * (wrong == "copy") in found["first_difference"]


@pytest.mark.parametrize("stage", [*slow(1), 3])
def test_weights_move_in_two_bytes_and_gradients_in_four(stage: int) -> None:
    """A device keeps 2 + 12 bytes for each of its parameters."""
    graph = step_in("bf16")
    elements = sum(t.nbytes // 2 for t in graph.model.parameters())
    plans = [ss.compile(one, f"zero:stage={stage}", "local:2") for one in (graph_of(SPEC), graph)]
    wide, found = (moved(plan.compiled.program) for plan in plans)
    assert found.pop(("all_gather", "bfloat16", "")) * 2 == wide.pop(("all_gather", "float32", "")) >= elements * 4
    assert found == wide
    assert wide["reduce_scatter", "float32", ""] == elements * 4
    assert graph.model.optimizer.state_bytes("bfloat16") == 12

    def sizes(step: Step) -> tuple[int, int]:
        step(batch())
        kinds = [x for t in state(step).values() if "copy" in t for x in t.items() if x[0] != "step"]
        weights = sum(x.nbytes for name, x in kinds if name == "weight")
        return weights, sum(x.nbytes for name, x in kinds if name != "weight")

    assert on_ranks(plans[1], sizes) == [(elements // 2 * 2, elements // 2 * 12)] * 2


def assert_same(found: Trained, expected: Trained) -> None:
    for name, tensors in found.items():
        assert tensors.keys() == expected[name].keys()
        assert not [key for key, x in tensors.items() if not torch.equal(x, expected[name][key])], name


def test_training_goes_on_bit_for_bit_on_other_devices(tmp_path: Path) -> None:
    """Six steps are three, a checkpoint, and three on another number of devices, which add in the same order."""
    graph = mlp()
    inputs = graph.captured.batch
    plans = {n: ss.compile(graph, f"pipeline_1f1b:stages={n},microbatches=2", f"local:{n}") for n in (1, 2)}
    (expected,) = on_ranks(plans[1], train(6, inputs))
    assert all(x.keys() == {"weight", "copy", "exp_avg", "exp_avg_sq", "step"} for x in expected.values())

    def first(step: Step) -> None:
        train(3, inputs)(step)
        step.save(tmp_path)

    def second(step: Step) -> Trained:
        train(1, inputs)(step)
        step.restore(tmp_path)
        return train(3, inputs)(step)

    on_ranks(plans[2], first)
    for plan in plans.values():
        for found in on_ranks(plan, second):
            assert_same(found, expected)


def test_copies_are_cut_and_put_together_as_other_states(tmp_path: Path) -> None:
    plans = [ss.compile(step_in("bf16"), "zero:stage=3", "local:2"), ss.compile(step_in("bf16"), "single", "local:1")]

    def first(step: Step) -> Trained:
        train(2)(step)
        step.save(tmp_path)
        return state(step)

    def between(step: Step) -> None:
        step.restore(tmp_path)
        step.state.steps += 1
        step.save(tmp_path)

    def last(step: Step) -> Trained:
        step.restore(tmp_path)
        assert step.state.steps == 3
        return state(step)

    before = on_ranks(plans[0], first)
    on_ranks(plans[1], between)
    for found, expected in zip(on_ranks(plans[0], last), before, strict=True):
        assert_same(found, expected)


def test_other_weights_get_new_copies_and_other_precisions_are_refused(tmp_path: Path) -> None:
    plan = ss.compile(step_in("bf16"), "single", "local:1")

    def save(step: Step) -> Trained:
        step.save(tmp_path)
        return train(1)(step)

    def load(step: Step) -> Trained:
        train(2)(step)
        step.load_weights(tmp_path)
        assert step.state.updates.optimizer is not None
        assert not any("copy" in states for states in step.state.updates.optimizer.state.values())
        saved = copy.deepcopy(step.state_dict())
        found = train(1)(step)
        step.load_state_dict(saved)
        again = train(1)(step)
        assert_same(again, found)
        return found

    (saved,), (loaded,) = on_ranks(plan, save), on_ranks(plan, load)
    # The averages of gradients are others, and a step of Adam changes a weight by little more than the learning rate.
    pairs = [(x["copy"], loaded[name]["copy"]) for name, x in saved.items() if "copy" in x]
    assert all((one - other).abs().max() < 0.05 for one, other in pairs)
    module = copy.deepcopy(built().module).bfloat16()
    other = ss.compile(ss.capture(module, (), built().kwargs, adamw(module), check=False), "single", "local:1")
    with pytest.raises(InputError, match="trained with precision bf16, but this plan has precision none"):
        on_ranks(other, lambda step: step.restore(tmp_path))


def test_batch_norms_and_rotary_frequencies_keep_their_dtype() -> None:
    def make() -> tuple[nn.Module, Any]:
        module = Around(lambda m, x: m.norm(m.first(x) * m.inv_freq.cos().to(x.dtype) + m.shift).square().mean())
        module.first, module.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        module.register_buffer("inv_freq", torch.linspace(0.1, 1, 4))
        module.register_buffer("shift", torch.linspace(0.1, 1, 4))
        return module, torch.randn(8, 4)

    graph = captured(make, precision="bf16")
    wide = {n for n, t in graph.model.tensors.items() if t.dtype == "float32" and t.kind in ("parameter", "buffer")}
    assert {n for n in wide if n != "inv_freq"} == {
        f"norm.{n}" for n in ("weight", "bias", "running_mean", "running_var")
    }
    found = equal(graph, "data_parallel", 2).found
    assert found["reference"] == "eager"
    assert parse_model(print_model(graph.model)).optimizer == graph.model.optimizer
    plan = ss.compile(graph, "single", "local:1").verify()
    assert plan["equal"], plan["first_difference"]


def test_the_module_of_the_user_stays_as_it_is() -> None:
    one = nn.Linear(4, 4)
    one.weight.register_hook(lambda g: g * 2)  # type: ignore[no-untyped-call]
    loss = Around(lambda m, x: m.one(x).mean(), one=one)
    with pytest.raises(CaptureError, match="1 gradient hooks would be lost"):
        ss.capture(loss, (torch.randn(2, 4),), optimizer=adamw(loss), precision="bf16")
    assert {p.dtype for p in built().module.parameters()} == {torch.float32}
    assert step_in("bf16").captured.call.module is not built().module


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "fp8"}, "unknown precision 'fp8'"),
        ({"precision": "bf16", "autocast": "bf16"}, "autocast and precision exclude each other"),
    ],
)
def test_wrong_precisions_are_refused(options: dict[str, Any], message: str) -> None:
    module = Around(lambda m, x: m.one(x).mean(), one=nn.Linear(4, 4))
    with pytest.raises(InputError, match=message):
        ss.capture(module, (torch.randn(2, 4),), optimizer=adamw(module), **options)
