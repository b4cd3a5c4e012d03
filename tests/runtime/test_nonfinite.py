"""A step that is not finite names the operator, tensor or sum that it comes from."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import RuntimeFailure
from superscaler.runtime.step import Step
from superscaler.train.launch import train
from tests.helpers.ran import on_ranks

PIPELINES = {"pipeline_1f1b:stages=2,microbatches=2": 2, "zb_h1:stages=2,microbatches=2": 2}
PLANS = {"single": 1, "data_parallel": 2, "tensor_parallel": 2, **PIPELINES}
PIPELINE = ("pipeline_1f1b:stages=2,microbatches=2", "local:2")
BATCH = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
LOOPS = "pipeline_1f1b:stages=2,microbatches=16"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, inner: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down, self.inner = nn.Linear(4, 8), nn.Linear(8, 4), inner

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return x + self.down(torch.tanh(h if self.inner is None else self.inner(h)))


class Net(nn.Module):
    """Four blocks, of which the third does something else inside."""

    def __init__(self, inner: Callable[[Tensor], Tensor] | None = None, last: Callable[[Tensor], Tensor] | None = None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(inner if k == 2 else None) for k in range(4))
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x if self.last is None else self.last(x)).square().sum()


def captured(module: nn.Module, batch: Tensor, **options: Any) -> ss.Graph:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    return ss.capture(module, (torch.zeros_like(batch),), optimizer=optimizer, **options, check=False)


def run(
    graph: ss.Graph,
    plan: str,
    folder: Path | None,
    *,
    steps: int = 1,
    change: Callable[[Step], object] = lambda step: None,
    batch: Tensor = BATCH,
) -> list[Any]:
    """Train some steps on threads and return what each rank has then: losses, weights."""
    made = ss.compile(graph, plan, f"local:{PLANS.get(plan, 2)}")
    if folder is not None:
        made.save(folder, evaluation=False)
    found = made.compiled

    def work(step: Step) -> Any:
        step.form.directory = folder
        change(step)
        before = {n: w.detach().clone() for n, w in step.state.weights.items()}
        try:
            losses = [float(step({"x": batch}, check_finite=True)) for _ in range(steps)]
        except RuntimeFailure:
            assert all(torch.equal(w.nan_to_num(7.0), before[n].nan_to_num(7.0)) for n, w in step.state.weights.items())
            assert step.state.steps == 0
            raise
        return losses, {n: w.detach() for n, w in step.state.weights.items()}

    return on_ranks(found, work)


def failure(module: nn.Module | ss.Graph, plan: str, folder: Path | None, **options: Any) -> str:
    graph = module if isinstance(module, ss.Graph) else captured(module, options.get("batch", BATCH))
    with pytest.raises(RuntimeFailure) as caught:
        run(graph, plan, folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_op_within_a_segment_is_named_with_its_layer(tmp_path: Path) -> None:
    graph = captured(Net(lambda h: (h - 100).log()), BATCH)
    for number, plan in enumerate(("single", "tensor_parallel", *PIPELINES)):
        text = failure(graph, plan, tmp_path / f"{number}")
        what = r"step 1 is not finite \(its loss is nan\), which comes from the forward of log \(blocks\.2\) at "
        where = r"segments.py:\d+ \(log = torch.log\(sub\)\) on rank \d.*, which made (\d+) of \1 elements not finite "
        last = r"\(\1 nan\) of finite ones, sub from -1\d\d.* to -\d.*\. No weight was changed by it\."
        assert re.search(what + where + last, text)
        assert ("rank 1, microbatch 0" in text) == (plan in PIPELINES)


def test_an_op_whose_backward_alone_fails_is_named(tmp_path: Path) -> None:
    # The forward of both is finite, and so is the loss.
    root = captured(Net(lambda h: (h * 0).abs().sqrt()), BATCH)
    log = captured(Net(lambda h: torch.where(h > 100, (h * 0).log(), h)), BATCH)
    for plan in ("tensor_parallel", "zb_h1:stages=2,microbatches=2"):
        text = failure(root, plan, tmp_path / "a")
        assert "is not finite (the gradient of blocks." in text
        assert "the backward of sqrt (blocks.2) at segments.py:" in text
        text = failure(log, plan, tmp_path / "b")
        assert "the backward of log (blocks.2) at segments.py:" in text
        assert "elements not finite (" in text
        assert " nan) of finite ones, d_log from " in text


def test_what_is_given_is_named() -> None:
    def spoil(step: Step) -> None:
        for name, weight in step.state.weights.items():
            if name == "blocks_1_up_weight":
                weight.detach()[1, 2] = math.nan

    graph = captured(Net(), BATCH)
    for plan in ("data_parallel", "tensor_parallel", PIPELINE[0]):
        text = failure(graph, plan, None, change=spoil)
        assert "weight blocks.1.up.weight on rank " in text
        assert re.search(
            r", which has 1 of (32|16) elements not finite \(1 nan\) before the step: it was loaded so, or an ", text
        )
        text = failure(graph, plan, None, batch=torch.tensor([[1.0, math.inf, 2.0, 3.0]] * 4))
        assert re.search(r"input x on rank 0, which has \d of \d+ elements not finite \(\d inf\)", text)


def test_what_overflows_first_and_what_makes_nan_of_it_are_named(tmp_path: Path) -> None:
    text = failure(Net(lambda h: (h + 1000).exp() - (h + 1000).exp()), "single", tmp_path / "plan")
    assert "the forward of exp (blocks.2) at segments.py:" in text
    assert re.search(r"; sub \(blocks.2\) at segments.py:\d+ .* made nan of that\. No weight", text)


def test_a_mask_of_infinities_is_not_blamed(tmp_path: Path) -> None:
    mask = torch.zeros(8).masked_fill(torch.arange(8) > 3, -math.inf)
    fine = captured(Net(lambda h: (h + mask).softmax(-1)), BATCH)
    bad = captured(Net(lambda h: (h + mask).softmax(-1), last=lambda x: (x - 100).log()), BATCH)
    for plan in ("data_parallel", "zb_h1:stages=2,microbatches=2"):
        assert all(math.isfinite(loss) for losses, _ in run(fine, plan, None, steps=2) for loss in losses)
        text = failure(bad, plan, tmp_path / "plan")
        assert "the forward of log at segments.py:" in text


class Sum(nn.Module):
    """Its loss is zero, its gradient what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum()


def test_a_sum_that_overflows_is_named(tmp_path: Path) -> None:
    """Over ranks, and over microbatches."""
    text = failure(Sum(), "data_parallel", None, batch=torch.full((2, 4), 3e38))
    comes = r"\(the gradient of weight\), which comes from program_0.py:\d+ \(\w+ = rt.all_reduce\(.*\)\) on rank 0, "
    sums = r"which gave 4 of 4 elements not finite \(4 inf\): all that is summed is finite, and the sum too large"
    assert re.search(comes + sums, text)
    PLANS["pipeline_1f1b:stages=1,microbatches=2"] = 1
    text = failure(Sum(), "pipeline_1f1b:stages=1,microbatches=2", tmp_path, batch=torch.full((2, 4), 3e38))
    adds = r'\(rt.backward\("s0_m1", .*into={0: d_weight}\)\) on rank 0, microbatch 1, which made 4 of 4'
    assert re.search(rf"program_0.py:\d+ {adds}", text)


class Halves(nn.Module):
    """A gradient that no half holds once it is scaled, of a loss that is small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().sum()


def test_a_skipped_step_of_a_loss_scale_stops_nothing(tmp_path: Path) -> None:
    module = Halves()
    graph = captured(module, BATCH, autocast="fp16", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**30))
    for losses, weights in run(graph, "data_parallel", None, steps=2):
        assert all(math.isfinite(loss) for loss in losses)
        # Both steps were skipped.
        assert losses[0] == losses[1]
        assert torch.equal(weights["first_weight"], module.first.weight)
    text = failure(graph, "data_parallel", tmp_path / "plan", batch=torch.full((4, 4), 6e4))
    assert "its loss is " in text
    assert re.search(r"which comes from the forward of \w+.* at segments.py:.*-?inf\) of finite ones, ", text)


def test_a_finite_step_is_the_same_step() -> None:
    module = Net()
    losses, weights = run(captured(module, BATCH), "data_parallel", None, steps=3)[0]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for loss in losses:
        here = module(BATCH)
        assert here.item() == pytest.approx(loss, rel=1e-5)
        optimizer.zero_grad()
        here.backward()
        optimizer.step()
    assert torch.allclose(weights["blocks_2_up_weight"], module.blocks[2].up.weight, rtol=1e-4)


@pytest.mark.dist
def test_processes_end_and_say_it(tmp_path: Path) -> None:
    ss.compile(captured(Net(lambda h: (h - 100).log()), BATCH), *PIPELINE).save(tmp_path / "plan", evaluation=False)
    where = r"^rank 1 of 2 failed .* the forward of log \(blocks.2\) at segments.py:"
    with pytest.raises(RuntimeFailure, match=where) as end:
        train(tmp_path / "plan", world=2, steps=2, check_finite=True)
    assert "\n" not in str(end.value)


def test_the_repetition_of_a_loop_is_named(tmp_path: Path) -> None:
    graph = captured(Net(lambda h: (1e4 - h.abs()).log()), torch.randn(16, 4))
    for bad in (9, 15):
        batch = torch.randn(16, 4)
        batch[bad] += 1e6
        text = failure(graph, LOOPS, tmp_path / "plan", batch=batch)
        assert "the forward of log (blocks.2) at segments.py" in text
        assert f"rank 1, microbatch {bad}," in text
    assert "    for m in range(" in (tmp_path / "plan" / "program_1.py").read_text()


def test_the_block_of_a_loop_inside_a_segment_is_named(tmp_path: Path) -> None:
    bad = 3
    net = Net()
    for k, block in enumerate(net.blocks):
        block.inner = lambda h: (h + 100).log()
        nn.init.constant_(block.up.bias, -200 if k == bad else 0)
    text = failure(net, "data_parallel", tmp_path)
    assert f"the forward of log{f'_{bad}' * bool(bad)} (blocks.{bad}) at segments.py" in text
    assert "    for l in range(3):" in (tmp_path / "segments.py").read_text()


def test_a_loss_whose_sum_alone_is_too_large_is_told(tmp_path: Path) -> None:
    batch = torch.zeros(16, 4, dtype=torch.float64)
    batch[2:] = 3e153
    text = failure(Net().double(), LOOPS, tmp_path / "plan", batch=batch)
    assert "its loss is inf): all its parts are finite, and their sum is too large for torch.float64." in text
