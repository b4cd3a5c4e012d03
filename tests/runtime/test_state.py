"""Options of a step that are set before a state is loaded, or after: what was loaded stays, as in torch's own loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import superscaler as ss
from superscaler.runtime.step import Step
from tests.helpers.ran import on_ranks

DECAY = 0.5
# Made on the optimizer at the start; each changes an option in every step.
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "cosine": lambda one, **more: lr_scheduler.CosineAnnealingLR(one, 9, **more),
    "lambda": lambda one, **more: lr_scheduler.LambdaLR(one, lambda k: 0.8**k, **more),
    "one_cycle": lambda one, **more: lr_scheduler.OneCycleLR(one, 0.1, total_steps=9, **more),
    "cyclic": lambda one, **more: lr_scheduler.CyclicLR(one, 0.01, 0.1, 3, cycle_momentum=False, **more),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(torch.tanh(self.one(x))).square().mean()


def made() -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    module = Net().double()
    groups = [{"params": module.one.parameters()}, {"params": module.two.parameters(), "lr": 0.02}]
    return module, torch.optim.AdamW(groups, lr=0.05), torch.randn(4, 4, dtype=torch.float64)


@cache
def planned() -> ss.Plan:
    module, optimizer, x = made()
    return ss.compile(ss.capture(module, (x,), optimizer=optimizer, check=False), "zero:stage=1", "local:2")


def trained(step: Step, count: int, schedule: Any = None) -> list[float]:
    found = []
    for _ in range(count):
        found.append(float(step(planned().compiled.graph.captured.batch).detach()))
        if schedule is not None:
            schedule.step()
    return found


def set_then(load: Callable[[], Any], change: Callable[[], Any], first: str) -> Any:
    """Call both, in one order or the other; return the result of `change`."""
    if first == "load":
        load()
        return change()
    found = change()
    load()
    return found


def averages(step: Step) -> list[Tensor]:
    with step.averaged():
        return [w.detach().clone() for name, w in sorted(step.state.weights.items())]


@pytest.mark.parametrize("first", ["load", "set"])
@pytest.mark.parametrize("way", ["restore", "load_state_dict"])
def test_averages_go_on_whether_the_decay_is_set_before_or_after(way: str, first: str, tmp_path: Path) -> None:
    module, optimizer, x = made()
    mean = AveragedModel(module, multi_avg_fn=lambda a, v, _: torch._foreach_lerp_(a, v, 1 - DECAY))
    for _ in range(4):
        optimizer.zero_grad()
        module(x).backward()
        optimizer.step()
        mean.update_parameters(module)

    kept: dict[int, Any] = {}

    def save(step: Step) -> None:
        step.ema = DECAY
        trained(step, 2)
        step.save(tmp_path / "two")
        kept[step.rank] = copy.deepcopy(step.state_dict())

    def go_on(step: Step) -> None:
        load = {
            "restore": lambda: step.restore(tmp_path / "two"),
            "load_state_dict": lambda: step.load_state_dict(kept[step.rank]),
        }
        set_then(load[way], lambda: setattr(step, "ema", DECAY), first)
        trained(step, 2)
        step.save(tmp_path / "four")

    for work in (save, go_on):
        on_ranks(planned().compiled, work)
    for ema, expected in ((False, module), (True, mean.module)):
        found = made()[0]
        ss.load_weights(found, tmp_path / "four", ema=ema)
        for ours, want in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-14)


def test_a_step_without_a_decay_drops_averages(tmp_path: Path) -> None:
    def work(step: Step) -> None:
        step.ema = DECAY
        trained(step, 1)
        step.ema = None
        trained(step, 1)
        step.ema = DECAY
        trained(step, 1)
        # As in a new step: the first averages are the weights.
        assert all(
            torch.equal(a, w) for a, (_, w) in zip(averages(step), sorted(step.state.weights.items()), strict=True)
        )

    on_ranks(planned().compiled, work)


def rates_of(optimizer: Any, step: Callable[[], Any], schedule: Any) -> list[list[float]]:
    found = []
    for _ in range(3):
        step()
        schedule.step()
        found.append([group["lr"] for group in optimizer.param_groups])
    return found


def resumed(make: Any, way: str, optimizer: Callable[[], Any], load: Callable[[], Any], state: Any) -> Any:
    """Return a schedule of an optimizer that loads its state before, or after: one with its own state, or a new one."""
    if way == "last_epoch":
        load()
        return make(optimizer(), last_epoch=2)
    schedule = set_then(load, lambda: make(optimizer()), way.partition(" ")[0])
    if "state" in way:
        schedule.load_state_dict(copy.deepcopy(state))
    return schedule


@pytest.mark.parametrize("way", ["load, state", "set, state", "load", "last_epoch"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_made_before_or_after_a_load_go_on_as_torchs(name: str, way: str, tmp_path: Path) -> None:
    make, kept = SCHEDULES[name], dict[int, Any]()

    def torchs() -> list[list[float]]:
        _, optimizer, _ = made()
        schedule = make(optimizer)
        rates_of(optimizer, optimizer.step, schedule)
        state, before = copy.deepcopy(schedule.state_dict()), optimizer.state_dict()
        _, other, _ = made()
        again = resumed(make, way, lambda: other, lambda: other.load_state_dict(before), state)
        return rates_of(other, other.step, again)

    def save(step: Step) -> None:
        schedule = make(step.optimizer)
        rates_of(step.optimizer, lambda: trained(step, 1), schedule)
        step.save(tmp_path)
        kept[step.rank] = copy.deepcopy((step.state_dict(), schedule.state_dict()))

    def ours(step: Step) -> list[list[list[float]]]:
        found = []
        for load in (lambda: step.restore(tmp_path), lambda: step.load_state_dict(kept[step.rank][0])):
            step.groups.__dict__.pop("scheduled", None)
            schedule = resumed(make, way, lambda: step.optimizer, load, kept[step.rank][1])
            found.append(rates_of(step.optimizer, lambda: trained(step, 1), schedule))
            assert step.groups.rates() == [group["lr"] for group in step.groups.here().values()] == found[-1][-1]
        return found

    on_ranks(planned().compiled, save)
    expected = torchs()
    for found in on_ranks(planned().compiled, ours):
        assert found == [expected] * 2
