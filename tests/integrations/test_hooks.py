"""Hooks of loops around backward and update: what they get, what they change, and what is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superscaler.errors import InputError
from superscaler.integrations.gradients import checksums, differentiate, follow, unfollowed
from superscaler.integrations.hooks import Unread
from superscaler.launch.launch import launch
from superscaler.runtime.updates import Updates

HOOKS = Path(__file__).with_name("hooks.py")
# The cases of `hooks.py` that are refused, with the reason.
REFUSED = {
    "between": "a hook has changed weights between the loss and its backward",
    "batch_idx": r"batch_idx, read at .*hooks.py:\d+, changes from step to step",
    "none": "training_step returns a NoneType without a loss",
    "accumulate": "a plan does not run GradientAccumulationScheduler",
    "precision": "a plan does not run Own, a precision plugin of your own",
    "strategy": "a plan does not run Own.training_step; override that of the module",
    "comm_hook": "ddp_comm_hook changes what the ranks of DDP send",
    "own": r"Own.training_step computes a loss without the plan.* call super\(\).training_step",
}
LIGHTNING = ("clip", "value", "backward", "after_backward", "skip", "sam", "zero_grad", "norms", "callback", "tokens")


class Halving:
    """An updating plan that halves the weights it trains."""

    def __init__(self, *weights: Tensor) -> None:
        self.weights, self.is_open = weights, True

    def update(self) -> list[tuple[Tensor, Tensor | None]]:
        kept = [(weight, weight.grad) for weight in self.weights]
        for weight in self.weights:
            weight.data.mul_(0.5)
            weight.grad = None
        return kept


def trained(has_closure: bool, is_open: bool = True) -> tuple[list[float], list[Tensor | None]]:
    """Return weights of one, the first of a plan, after a step of SGD with gradients of one, and their gradients."""
    weights = [nn.Parameter(torch.ones(())) for _ in range(2)]
    optimizer, planned = torch.optim.SGD(weights, lr=0.25), Halving(weights[0])
    planned.is_open = is_open
    follow(optimizer, lambda: None)
    follow(optimizer, lambda: planned)

    def closure() -> float:
        for weight in weights:
            weight.grad = torch.ones(())
        return 7.0

    if has_closure:
        assert optimizer.step(closure) == 7.0
    else:
        closure()
        optimizer.step()
    return [weight.item() for weight in weights], [weight.grad for weight in weights]


@pytest.mark.parametrize("has_closure", [False, True])
def test_a_step_of_the_loops_optimizer_is_the_plans_update_and_leaves_the_gradients(has_closure: bool) -> None:
    weights, gradients = trained(has_closure)
    assert weights == [0.5, 0.75]
    assert gradients == [torch.ones(()), torch.ones(())]
    assert trained(has_closure, is_open=False)[0] == [0.75, 0.75]


def test_a_weight_with_two_updates_in_a_step_has_no_gradient_for_hooks() -> None:
    updates = SimpleNamespace(held=None, apply=print, set=print)
    updates.holding = partial(Updates.holding, updates)

    def step(batch: Any) -> Tensor:
        updates.held.extend([(print, [("w", batch["x"])])] * 2)
        return batch["x"]  # type: ignore[no-any-return]

    step.state = SimpleNamespace(updates=updates)  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="weight w is updated 2 times in a step of this plan"):
        differentiate(step, {"x": torch.ones(())})  # type: ignore[arg-type]
    assert updates.held is None


def test_captures_see_no_hooks_of_the_plan_but_those_of_the_user() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=0.25)
    optimizer.register_step_pre_hook(lambda *_: None)
    follow(optimizer, lambda: None)
    assert len(optimizer._optimizer_step_pre_hooks) == 2
    with unfollowed(optimizer):
        assert len(optimizer._optimizer_step_pre_hooks) == 1
        assert not optimizer._optimizer_step_post_hooks
    assert len(optimizer._optimizer_step_pre_hooks) == 2


def test_checksums_are_of_the_bits_of_tensors() -> None:
    x = torch.randn(3, 4)
    one, none, other, half = checksums([x, None, x.t(), x.to(torch.bfloat16)])
    assert none is None
    assert one == other == int(x.view(torch.int32).sum())
    assert half == int(x.to(torch.bfloat16).view(torch.int16).sum())


@pytest.mark.parametrize("read", [lambda n: n % 2, lambda n: n == 1, lambda n: torch.ones(2) * n, str, bool, range])
def test_a_number_that_changes_from_step_to_step_is_not_read(read: Any) -> None:
    with pytest.raises(InputError, match=r"batch_idx, read at .*test_hooks.py:\d+, changes from step to step"):
        read(Unread("batch_idx", "on_before_batch_transfer"))


@pytest.mark.slow
@pytest.mark.dist(python="real")
@pytest.mark.parametrize(
    ("library", "plan", "exact", "refused"),
    [
        ("lightning", "data_parallel", LIGHTNING, (*REFUSED,)[:-1]),
        ("lightning", "zero:stage=3", LIGHTNING, ()),
        ("huggingface", "tensor_parallel", ("plain", "twice", "by_value", "callback"), ("own",)),
    ],
)
def test_hooks_of_libraries_have_and_change_the_gradients_and_weights_of_one_device(
    library: str, plan: str, exact: tuple[str, ...], refused: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip({"huggingface": "accelerate", "lightning": "lightning"}[library])
    environment = {**os.environ, "PYTHONPATH": str(HOOKS.parents[2])}
    subprocess.run([sys.executable, HOOKS, library, "none", tmp_path, ",".join(exact)], check=True, env=environment)
    launch(HOOKS, [library, plan, str(tmp_path), ",".join((*exact, *refused))], 2, tmp_path)
    expected, found = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("none", plan))
    for case in exact:
        assert numbers(found[case]) == pytest.approx(numbers(expected[case]), rel=1e-12, abs=1e-14), case
    # Each hook changes what is trained.
    assert len({str(expected[case][-1]) for case in exact}) == len(exact)
    for case in refused:
        assert re.match(REFUSED[case], found[case]), found[case]


def numbers(log: Any) -> list[float]:
    if isinstance(log, dict):
        return [x for name in sorted(log) for x in numbers(log[name])]
    return [x for one in log for x in numbers(one)] if isinstance(log, list) else [log]
