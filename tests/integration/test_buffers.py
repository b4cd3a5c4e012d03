"""Buffers that a step changes: batch normalization's running statistics, counters, moving averages."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.artifact import describe, initial_values
from superscaler.comm.communicator import Communicator
from superscaler.comm.threads import run_ranks
from superscaler.errors import PlanError
from superscaler.plans import data_parallel
from superscaler.runtime.step import build_step, modules


class Convolutions(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b, **options), nn.ReLU())
            for a, b in ((3, 8), (8, 8))
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class Smoothed(nn.Module):
    """A moving average that the loss reads, one that nothing reads, and a counter."""

    average: Tensor
    last: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("average", torch.ones(4))
        self.register_buffer("last", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        with torch.no_grad():
            self.count.add_(1)
            self.last.copy_(h.amax(0))
            self.average.mul_(0.9).add_(0.1 * h.mean(0))
        return ((h - self.average) ** 2).mean()


@ss.sprogram
def channels(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Cut the output channels of the first convolution, wherever they are."""
    factor = graph.model.tensors["blocks.0.0.weight"].slots[0][0]
    for op in graph.ops:
        for part, device in zip(ss.op_trans(graph, op, ss.Split(factor, 2)), cluster.devices, strict=True):
            ss.op_assign(graph, part, device)


@ss.sprogram
def stages(graph: ss.Graph, cluster: ss.Cluster, microbatches: int = 1) -> None:
    for op in graph.forward_ops:
        stage = 0 if op.module.startswith("blocks.0") else 1
        parts = ss.op_trans(graph, op, ss.Microbatch(microbatches))
        ss.op_assign(graph, parts, cluster.devices[stage])
    for m in range(microbatches - 1):
        ss.op_order(graph, graph.select(microbatch=m, kind="F"), graph.select(microbatch=m + 1, kind="F"))


def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 3, 6, 6), torch.randint(0, 5, (8,))


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}, {"affine": False}], ids=str)
def test_batch_norm_is_exact_under_data_parallelism(options: dict[str, bool], devices: int) -> None:
    graph = ss.capture(m := Convolutions(**options), images(), optimizer=torch.optim.SGD(m.parameters(), lr=1e-2))
    found = ss.compile(graph, data_parallel.data_parallel, ss.Cluster.local(devices)).verify()
    assert found["equal"], found


def test_buffers_follow_pytorch_for_several_steps() -> None:
    module, batch = Convolutions(), images()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    graph = ss.capture(module, batch, optimizer=optimizer)
    plan = ss.compile(graph, data_parallel.data_parallel, ss.Cluster.local(2))
    values = initial_values(graph.model, graph.captured.values)

    def run(communicator: Communicator) -> tuple[list[Tensor], dict[str, Tensor]]:
        step = build_step(describe(plan.compiled), modules(plan.compiled.emitted.files), values, communicator)
        return [step({"x": batch[0], "y": batch[1]}) for _ in range(3)], step.state.weights

    found = run_ranks(2, run)
    for k in range(3):
        optimizer.zero_grad()
        loss = module(*batch)
        loss.backward()
        optimizer.step()
        for losses, _ in found:
            torch.testing.assert_close(losses[k], loss.detach())
    for name, buffer in module.named_buffers():
        for _, weights in found:
            torch.testing.assert_close(weights[name.replace(".", "_")], buffer)


@pytest.mark.parametrize("devices", [1, 2])
def test_other_buffers(devices: int) -> None:
    torch.manual_seed(0)
    graph = ss.capture(m := Smoothed(), (torch.randn(8, 6),), optimizer=torch.optim.SGD(m.parameters(), lr=1e-2))
    assert {op.inputs[0].tensor for op in graph.ops if op.is_write} == {"average", "last", "count"}
    found = ss.compile(graph, data_parallel.data_parallel, ss.Cluster.local(devices)).verify()
    assert found["equal"], found


def test_statistics_of_the_batch_cannot_wait_for_later_microbatches() -> None:
    graph = ss.capture(m := Convolutions(), images(), optimizer=torch.optim.SGD(m.parameters(), lr=1e-2))
    assert ss.compile(graph, partial(stages, microbatches=1), ss.Cluster.local(2)).verify()["equal"]
    with pytest.raises(PlanError, match=r"blocks\.0\.1\) reads .* of several microbatches, as norms and losses"):
        ss.compile(graph, partial(stages, microbatches=2), ss.Cluster.local(2))


def test_channels_are_cut_with_their_statistics() -> None:
    plan = ss.compile(
        ss.capture(m := Convolutions(), images(), optimizer=torch.optim.SGD(m.parameters(), lr=1e-2)),
        channels,
        ss.Cluster.local(2),
    )
    assert plan.verify()["equal"]
    held = {w.tensor: w.box for w in plan.compiled.program.devices[1].weights}
    assert held["blocks.0.1.running_mean"] == ((4, 8),)


def test_a_checkpoint_of_training_is_evaluated(tmp_path: Path) -> None:
    """The counter of batches, which only training reads, is another one than at capture."""
    batch = {"x": torch.randn(4, 3, 8, 8), "y": torch.randint(5, (4,))}
    module, fresh, trained = Convolutions(), Convolutions().eval(), Convolutions().eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for name, plan in (
        ("train", ss.compile(ss.capture(module, kwargs=batch, optimizer=optimizer), "single", "local:1")),
        ("evaluate", ss.compile(ss.capture(fresh, kwargs=batch, optimizer=None), "single", "local:1")),
    ):
        plan.save(str(tmp_path / name))
    step = ss.load(tmp_path / "train")
    step(batch)
    step.save(tmp_path / "kept")
    evaluated = ss.load(tmp_path / "evaluate")
    assert evaluated.load_weights(tmp_path / "kept") == []
    ss.load_weights(trained, tmp_path / "kept")
    torch.testing.assert_close(evaluated(batch), trained(**batch).detach())
    assert evaluated.fixed["blocks.0.1.num_batches_tracked"] == 1
