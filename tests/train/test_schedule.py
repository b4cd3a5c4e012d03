"""Learning rates by the step, and all optimizers that work element by element."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel

import superscaler as ss
from superscaler.errors import InputError
from superscaler.frontend.base.training import named_optimizer
from superscaler.runtime.step import Step
from superscaler.specs.options import OPTIMIZERS
from superscaler.train.options import RankOptions
from superscaler.train.resume import start_of
from superscaler.train.schedule import advance, check_schedule, schedule_of
from tests.helpers.ran import Around, equal, on_ranks


def make() -> tuple[nn.Module, Any]:
    module = Around(lambda self, x: self.last(self.first(x).tanh()).square().mean(),
                    first=nn.Linear(4, 8), last=nn.Linear(8, 2))  # fmt: skip
    return module, torch.randn(4, 4)


@pytest.mark.parametrize("name", ["adadelta", "adagrad", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop"])
def test_optimizers_are_torchs_under_zero(name: str) -> None:
    more = ["momentum=0.5", "centered=true"] if name == "rmsprop" else []
    module, x = make()
    chosen = named_optimizer(name, module.parameters(), 0.01, more)
    graph = ss.capture(module, (x,), optimizer=chosen, check=False)
    ran = equal(graph, "zero:stage=1", 2)
    assert ran.graph.model.optimizer.name == OPTIMIZERS[name]
    weight = module.last.weight  # type: ignore[union-attr]
    weight.grad = torch.ones_like(weight)
    chosen.step()
    kept = sum(x.nbytes for x in chosen.state[weight].values() if isinstance(x, Tensor) and x.shape == weight.shape)
    assert ran.graph.model.optimizer.state_bytes("float32") * weight.numel() == kept


def test_averages_and_numbers_of_optimizers_go_on_under_another_plan(tmp_path: Path) -> None:
    """A checkpoint of ZeRO under tensor parallelism, against torch's own optimizer and averages of a plain loop."""
    name = "nadam"
    more = ["initial_accumulator_value=0.3"] if name == "adagrad" else []
    module, x = make()
    plain = copy.deepcopy(module)
    graph = ss.capture(module, (x,), optimizer=named_optimizer(name, module.parameters(), 0.01, more), check=False)
    theirs, mean = named_optimizer(name, plain.parameters(), 0.01, more), AveragedModel(plain, multi_avg_fn=_decayed)
    for _ in range(4):
        theirs.zero_grad()
        plain(x).backward()
        theirs.step()
        mean.update_parameters(plain)

    def work(step: Step) -> Any:
        step.ema = 0.5
        if plan == "tensor_parallel":
            step.restore(tmp_path)
        for _ in range(2):
            step({"inputs_0": x})
        step.save(tmp_path)
        before = {n: w.detach().clone() for n, w in step.state.weights.items()}
        with step.averaged():
            inside = {n: w.detach().clone() for n, w in step.state.weights.items()}
        assert all(torch.equal(before[n], w) for n, w in step.state.weights.items())
        assert any(not torch.equal(before[n], w) for n, w in inside.items())

    for plan in ("zero:stage=1", "tensor_parallel"):
        on_ranks(ss.compile(graph, plan, "local:2"), work)
    for expected, ema in ((plain, False), (mean.module, True)):
        found = copy.deepcopy(plain)
        ss.load_weights(found, tmp_path, ema=ema)
        for ours, want in zip(found.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(ours, want)


def _decayed(averages: Any, values: Any, _: Any) -> None:
    torch._foreach_lerp_(averages, values, 0.5)


def test_a_schedule_of_torch_takes_the_step() -> None:
    torch.manual_seed(0)
    module, x = make()
    graph = ss.capture(module, (x,), optimizer=torch.optim.AdamW(module.parameters(), lr=0.1), check=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    (name,) = ss.compile(graph, "single", "local:1").compiled.graph.model.inputs

    def rates(optimizer: Any, step: Any) -> tuple[list[float], list[Any]]:
        schedule, losses, found = lr_scheduler.CosineAnnealingLR(optimizer, 3), [], []
        for _ in range(4):
            losses.append(float(step()))
            found.append(schedule.get_last_lr())
            schedule.step()
        return losses, found

    def work(step: Step) -> Any:
        with warnings.catch_warnings(action="error"):
            found = rates(step.optimizer, lambda: step({name: x}))
        step.lr = 0.5
        assert step.optimizer.param_groups[0]["lr"] == step.lr == 0.5
        return found

    def eager() -> float:
        optimizer.zero_grad()
        loss = module(x)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    (ours,) = on_ranks(ss.compile(graph, "single", "local:1"), work)
    theirs = rates(optimizer, eager)
    assert ours == (pytest.approx(theirs[0]), theirs[1])


def test_a_resume_takes_the_options_of_the_checkpoint_as_torch_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Among them the momentum, without which the plan has no state to go on from."""
    torch.manual_seed(0)
    module, x = make()
    plain = copy.deepcopy(module)
    first = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    then = torch.optim.SGD(plain.parameters(), lr=0.1, weight_decay=0.5)
    losses: list[float] = []
    for optimizer in (first, first, then, then):
        if optimizer is then:
            then.load_state_dict(first.state_dict())
        optimizer.zero_grad()
        loss = plain(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        first = optimizer
    graphs = [
        ss.capture(module, (x,), optimizer=torch.optim.SGD(module.parameters(), lr=0.1, **more))
        for more in ({"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.5})
    ]

    def work(step: Step) -> list[float]:
        if any(tmp_path.iterdir()):
            start_of(step, RankOptions(resume=tmp_path))
        found = [float(step({name: x})) for name in step.inputs for _ in range(2)]
        step.save(tmp_path)
        return found

    plans = [ss.compile(graph, "zero:stage=1", "local:2") for graph in graphs]
    assert [loss for plan in plans for loss in on_ranks(plan, work)[0]] == pytest.approx(losses, rel=1e-5)
    assert capsys.readouterr().err == (
        "note: the optimizer has options of the checkpoint, not of the plan: momentum 0.9, not 0; weight_decay 0, not "
        "0.5; nesterov true, not false\n"
    )


def test_a_schedule_changes_other_options_and_goes_on_under_another_plan(tmp_path: Path) -> None:
    """OneCycleLR changes Adam's betas, also of the group that one rank has none of."""
    torch.manual_seed(0)
    module, x = make()
    plain = copy.deepcopy(module)

    def optimizer_of(module: Any) -> torch.optim.Optimizer:
        groups = [{"params": list(module.first.parameters())}, {"params": list(module.last.parameters()), "lr": 0.2}]
        return torch.optim.AdamW(groups, lr=0.1)

    def cycle(optimizer: torch.optim.Optimizer) -> Any:
        return lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=8)

    theirs = optimizer_of(plain)
    graph, schedule = ss.capture(module, (x,), optimizer=optimizer_of(module), check=False), cycle(theirs)
    for number in range(6):
        theirs.zero_grad()
        plain(x).backward()
        theirs.step()
        schedule.step()
        if number == 2:
            kept = schedule.state_dict()

    def work(step: Step) -> Any:
        ours = cycle(step.optimizer)
        if plan == "single":
            step.restore(tmp_path)
            ours.load_state_dict(kept)
        found, before = copy.deepcopy(step.state_dict()), ours.state_dict()
        for _ in range(2):
            step.load_state_dict(copy.deepcopy(found))
            ours.load_state_dict(before)
            for _ in range(3):
                step({"inputs_0": x})
                ours.step()
        step.save(tmp_path)
        with pytest.raises(InputError, match=r"step\.optimizer has no state: .* step\.save\(folder\) have the state"):
            step.optimizer.state_dict()

    for plan in ("pipeline_1f1b:2,microbatches=2", "single"):
        on_ranks(ss.compile(graph, plan, "local:2" if plan != "single" else "local:1"), work)
    ss.load_weights(module, tmp_path)
    for mine, want in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, want)


def test_a_named_schedule_warms_up_and_goes_on_where_it_was() -> None:
    def run(start: int, steps: int) -> list[float]:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        found = schedule_of(optimizer, "cosine:eta_min=0.1", 2, 6)
        advance(found, start)
        values = []
        for _ in range(start, steps):
            values.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            advance(found, 1)
        return values

    whole = run(0, 6)
    assert whole[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert whole[4] == pytest.approx(0.1 + 0.9 / 2)
    assert run(3, 6) == pytest.approx(whole[3:])


@pytest.mark.parametrize(
    ("spec", "warmup", "message"),
    [
        ("cosin", 0, "unknown schedule 'cosin'; did you mean 'cosine'"),
        ("step:size=3", 0, "unknown key 'size'; did you mean 'step_size'"),
        ("linear:start_factor=2", 0, "--schedule linear:start_factor=2: "),
        ("step:step_size=0", 0, "--schedule step:step_size=0: step_size is 0, but it must be 1 or more."),
        ("polynomial:power=-1", 0, "power is -1.0, but it must be 0 or more."),
        ("cosine:T_max=0", 2, "T_max is 0, but it must be 1 or more."),
        ("cosine:eta_min=nan", 0, "eta_min is nan, but it must be a finite number."),
        ("cosine:last_epoch=5", 0, "param 'initial_lr' is not specified"),
        (None, 6, "--warmup is 6, but it must be 0 or more, and less than the 6 steps"),
    ],
)
def test_bad_schedules_are_one_line(spec: str | None, warmup: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_schedule(spec, warmup, 6)
    assert message in str(caught.value)


def test_bad_options_of_optimizers_are_one_line() -> None:
    for given, message in (("weight_deca=1", "did you mean 'weight_decay'"), ("eps=-1", "--set eps=-1: Invalid eps")):
        with pytest.raises(InputError, match=message):
            named_optimizer("adamw", [nn.Parameter(torch.zeros(1))], 0.1, [given])
    found = named_optimizer("adamw", [nn.Parameter(torch.zeros(1))], 0.1, ["betas=0.8,0.9", "amsgrad=true"])
    assert (found.defaults["betas"], found.defaults["amsgrad"]) == ((0.8, 0.9), True)
