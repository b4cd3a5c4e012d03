"""Loss scaling against a plain loop of torch: the same scales, the same skipped steps, the same weights."""

from __future__ import annotations

import functools
import io
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from superscaler.artifact import describe, initial_values
from superscaler.comm.communicator import Communicator
from superscaler.comm.threads import ThreadCommunicator, run_ranks
from superscaler.errors import InputError
from superscaler.ir.graph import Graph
from superscaler.ir.text.model import parse_model, print_model
from superscaler.models import build
from superscaler.plan import capture, compile
from superscaler.runtime.load import modules
from superscaler.runtime.scaling import Scaler
from superscaler.runtime.step import Step, build_step
from superscaler.runtime.updates import Pairs
from tests.helpers.replays import Emulator
from tests.helpers.sweeps import slow

# Overflows at first, then grows twice, overflows again.
OPTIONS = {"init_scale": 2.0**21, "growth_factor": 8.0, "backoff_factor": 0.25, "growth_interval": 3}
STEPS = 16
CLIP = 0.3


@dataclass
class History:
    losses: list[float]
    scales: list[tuple[float, int]]
    norms: list[float | None]
    weights: dict[str, Tensor]

    @property
    def skipped(self) -> list[bool]:
        before = [OPTIONS["init_scale"], *(scale for scale, _ in self.scales)]
        return [after < scale for scale, after in pairwise(before)]


def scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{**OPTIONS, **options})


@functools.cache
def graph() -> Graph:
    built = build("mlp")
    optimizer = torch.optim.AdamW(built.module.parameters(), lr=1e-2, fused=True)
    return capture(built.module, built.args, built.kwargs, optimizer, autocast="fp16", scaler=scaler())


def batches() -> list[dict[str, Tensor]]:
    make = build("mlp").make_batch
    assert make is not None
    return [make(step) for step in range(STEPS)]


def plain(clip: float | None) -> History:
    """Train as a user of torch does."""
    module, scaling = build("mlp").module, scaler()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    found = History([], [], [], dict(module.named_parameters()))
    for batch in batches():
        with torch.autocast("cpu", dtype=torch.float16):
            loss = module(**batch)
        scaling.scale(loss).backward()
        scaling.unscale_(optimizer)
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), clip)) if clip else None)
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
        found.losses.append(loss.item())
        found.scales.append((scaling.get_scale(), scaling.state_dict()["_growth_tracker"]))
    return found


def steps(plan: str, world: int, of: Graph | None = None) -> Any:
    """Return how a communicator becomes the step of its rank."""
    compiled = compile(of or graph(), plan, f"local:{world}").compiled
    described, code = describe(compiled), modules(compiled.emitted.files)
    values = initial_values(compiled.graph.model, compiled.graph.captured.values)
    return lambda communicator, **options: build_step(described, code, values, communicator, **options)


def train(plan: str, world: int, clip: float | None = None, is_recorded: bool = False) -> list[History]:
    make = steps(plan, world)

    def run(communicator: ThreadCommunicator) -> History:
        step: Step = make(communicator, recorder=Emulator(communicator) if is_recorded else None)
        found = History([], [], [], {})
        for batch in batches():
            found.losses.append(float(step(batch, clip)))
            state = step.state_dict()["scaler"]
            found.scales.append((state["scale"], state["_growth_tracker"]))
            found.norms.append(step.last_norm)
        names = {w["name"]: w["tensor"] for w in step.state.tables["weights"]}
        found.weights = {names[n]: w for n, w in step.state_dict()["weights"].items()}
        return found

    return run_ranks(world, run)


@pytest.mark.parametrize("is_recorded", [False, True])
@pytest.mark.parametrize("clip", [None, CLIP])
def test_one_device_does_what_torch_does(clip: float | None, is_recorded: bool) -> None:
    expected, (found,) = plain(clip), train("single", 1, clip, is_recorded)
    assert True in expected.skipped
    assert expected.skipped.count(False) > 6
    assert any(after[0] > before[0] for before, after in pairwise(expected.scales))
    assert found.scales == expected.scales
    if is_recorded:
        # Rates are float32 tensors in replays.
        assert found.losses == pytest.approx(expected.losses, abs=1e-3)
    elif not clip:
        assert found.losses == expected.losses
        assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())
    else:
        # Norms are added up in float64 here and in float32 by torch: the last bit of a clipped weight may differ, and
        # then, now and then, the float16 that it is cast to.
        assert found.losses == pytest.approx(expected.losses, abs=1e-4)
        # Steps with an overflow have no norm; some of the others are clipped.
        assert found.norms == pytest.approx(expected.norms, rel=1e-6, nan_ok=True)
        assert any(norm > clip for norm, skips in zip(found.norms, found.skipped, strict=True) if not skips)


@pytest.mark.parametrize(
    ("plan", "world", "clip"),
    [
        ("data_parallel", 2, None),
        *slow(("hybrid:dp=2,tp=2,microbatches=2", 4, CLIP)),
    ],
)
def test_all_ranks_decide_alike(plan: str, world: int, clip: float | None) -> None:
    results = train(plan, world, clip)
    assert True in results[0].skipped
    assert False in results[0].skipped
    for found in results:
        assert found.scales == results[0].scales
        assert found.losses == results[0].losses
        assert found.norms == pytest.approx(results[0].norms, nan_ok=True)
        assert all(weight.isfinite().all() for weight in found.weights.values())


def test_an_overflow_on_one_rank_is_seen_by_all() -> None:
    make = steps("pipeline_1f1b:stages=2,microbatches=4", 2)

    def run(communicator: Communicator) -> tuple[bool, float]:
        step: Step = make(communicator)
        before = {name: weight.clone() for name, weight in step.state_dict()["weights"].items()}
        step.state.updates.scaler.scale.fill_(1.0)  # type: ignore[union-attr]
        apply = step.state.updates.apply

        def poisoned(pairs: Pairs) -> None:
            apply([(name, g * float("nan") if communicator.rank == 1 else g) for name, g in pairs])

        step.state.updates.apply = poisoned  # type: ignore[method-assign]
        step(batches()[0])
        after = step.state_dict()
        return all(torch.equal(before[n], w) for n, w in after["weights"].items()), after["scaler"]["scale"]

    assert run_ranks(2, run) == [(True, 0.25)] * 2


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    make = steps("data_parallel", 2)

    def run(communicator: Communicator) -> tuple[list[Any], list[Any]]:
        step: Step = make(communicator)
        saved: dict[str, Any] = {}
        whole = []
        for k, batch in enumerate(batches()):
            whole.append((float(step(batch)), step.state_dict()["scaler"]))
            if k == 7:
                torch.save(step.state_dict(), stored := io.BytesIO())
                stored.seek(0)
                saved = torch.load(stored)
        again: Step = make(communicator)
        again.load_state_dict(saved)
        return whole[8:], [(float(again(batch)), again.state_dict()["scaler"]) for batch in batches()[8:]]

    for expected, found in run_ranks(2, run):
        assert found == expected


def test_the_state_of_another_plan_is_refused() -> None:
    (saved,) = run_ranks(1, lambda c: steps("single", 1)(c).state_dict())

    def run(communicator: Communicator) -> None:
        steps("tensor_parallel", 2)(communicator).load_state_dict(saved)

    with pytest.raises(InputError, match=r"weight \w+ has shape .* in this state and .* on rank"):
        run_ranks(2, run)


def test_the_numbers_of_the_scaler_are_in_the_plan_and_in_torchs_own_format() -> None:
    described = describe(compile(graph(), "single", "local:1").compiled)["optimizer"]["scaler"]
    assert described == scaler().state_dict()
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0)
    # A scaler of torch makes its scale when it is first used.
    theirs.load_state_dict(Scaler(described, torch.device("cpu")).state_dict())
    theirs.scale(torch.ones(()))
    assert theirs.state_dict() == described
    assert parse_model(print_model(graph().model)) == graph().model


def test_factors_that_are_no_powers_of_two_round_as_torchs() -> None:
    theirs = scaler(init_scale=1000.0, growth_factor=1.1, backoff_factor=0.7, growth_interval=2)
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    theirs.scale(torch.ones(()))
    ours = Scaler(theirs.state_dict(), torch.device("cpu"))
    for value in (1.0, 1.0, float("inf"), 1.0, float("nan"), 3.0, 1.0, 1.0, 1.0):
        weight.grad = torch.tensor([0.1, value, 7.0])
        gradients = {"w": weight.grad.clone()}
        ours.update(ours.unscale(gradients))
        theirs.unscale_(optimizer)
        assert torch.equal(gradients["w"], weight.grad) or not weight.grad.isfinite().all()
        theirs.step(optimizer)
        theirs.update()
        assert ours.state_dict() == theirs.state_dict()


def test_plans_without_a_scaler_reduce_nothing_for_it() -> None:
    built = build("mlp")
    sgd = torch.optim.SGD(built.module.parameters(), lr=1e-2)
    found = []
    for g in (capture(built.module, built.args, built.kwargs, sgd), graph()):
        make = steps("data_parallel", 2, g)

        def run(communicator: Communicator, make: Any = make) -> int:
            make(communicator)(batches()[0])
            return communicator.bytes_outside_plan

        found.append(run_ranks(2, run)[0])
    # The loss; and with a scaler, whether anything overflowed.
    assert found[1] > found[0] > 0


class Shifted(torch.nn.Module):
    """A loss whose gradient is that of its scalar weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.shift = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).square().mean() + self.shift


def test_the_gradient_of_a_scalar_weight_is_not_the_scale() -> None:
    module, scaler = Shifted(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    graph = capture(module, (torch.ones(2, 4),), {}, torch.optim.SGD(module.parameters(), lr=0.25), scaler=scaler)
    compiled = compile(graph, "single", "local:1").compiled
    values, code = initial_values(compiled.graph.model, graph.captured.values), modules(compiled.emitted.files)

    def run(communicator: Communicator) -> tuple[float, float]:
        step = build_step(describe(compiled), code, values, communicator)
        step({"x": torch.ones(2, 4)})
        assert step.state.updates.scaler is not None
        return step.state.updates.scaler.scale.item(), step.state.weights["shift"].item()

    assert run_ranks(1, run) == [(1024.0, 0.25)]
