"""Buffers that a step changes (running statistics, counters, moving averages), and random numbers that it draws."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import PlanError
from tests.helpers.ran import Around, captured, equal, on_ranks, trained


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


def smoothed(m: Around, x: Tensor) -> Tensor:
    """Change a moving average that the loss reads, one that nothing reads, and a counter."""
    h = m.linear(x)
    with torch.no_grad():
        m.count.add_(1)
        m.last.copy_(h.amax(0))
        m.average.mul_(0.9).add_(0.1 * h.mean(0))
    return ((h - m.average) ** 2).mean()


@ss.sprogram
def channels(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Cut the output channels of the first convolution, wherever they are."""
    factor = graph.model.tensors["blocks.0.0.weight"].slots[0][0]
    for op in graph.ops:
        ss.op_assign(graph, ss.op_trans(graph, op, ss.Split(factor, 2)), cluster.devices)


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


def test_batch_norm_is_exact_under_data_parallelism() -> None:
    options = {"affine": False}
    equal(captured(lambda: (Convolutions(**options), images())), "data_parallel", 4)


def test_buffers_follow_pytorch_for_several_steps() -> None:
    module = Convolutions()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    graph = ss.capture(module, images(), optimizer=optimizer, check=False)
    found = trained(ss.compile(graph, "data_parallel", "local:2"))
    for k in range(3):
        optimizer.zero_grad()
        loss = module(*images())
        loss.backward()
        optimizer.step()
        assert [losses[k] for losses, _ in found] == pytest.approx(2 * [loss.item()])
    for name, buffer in module.named_buffers():
        for _, weights in found:
            torch.testing.assert_close(weights[name.replace(".", "_")], buffer)


def test_other_buffers() -> None:
    values = {"average": torch.ones(4), "last": torch.zeros(4), "count": torch.zeros((), dtype=torch.long)}
    buffers = {name: nn.Buffer(value) for name, value in values.items()}
    graph = captured(lambda: (Around(smoothed, linear=nn.Linear(6, 4), **buffers), torch.randn(8, 6)))
    assert {op.inputs[0].tensor for op in graph.ops if op.is_write} == {"average", "last", "count"}
    equal(graph, "data_parallel")


def test_statistics_of_the_batch_cannot_wait_for_later_microbatches() -> None:
    graph = captured(lambda: (Convolutions(), images()))
    equal(graph, partial(stages, microbatches=1))
    with pytest.raises(PlanError, match=r"blocks\.0\.1\) reads .* of several microbatches, as norms and losses"):
        ss.compile(graph, partial(stages, microbatches=2), "local:2")


def test_channels_are_cut_with_their_statistics() -> None:
    program = equal(captured(lambda: (Convolutions(), images())), channels).program
    held = {w.tensor: w.box for w in program.devices[1].weights}
    assert held["blocks.0.1.running_mean"] == ((4, 8),)


def noisy(m: Around, x: Tensor, y: Tensor) -> Tensor:
    """Drop-path, noise, and both kinds of Bernoulli masks."""
    h = F.gelu(m.up(x))
    h = h / 0.8 * (torch.rand(h.shape[0], 1) + 0.8).floor()
    h = h + 0.1 * torch.randn_like(h)
    h = h * torch.bernoulli(torch.full_like(h, 0.7)) * torch.empty_like(h).bernoulli_(0.6)
    return F.mse_loss(m.down(h), y)


def test_every_plan_draws_the_same_random_numbers() -> None:
    plan, devices = "tensor_parallel", 2
    module = Around(noisy, up=nn.Linear(6, 12), down=nn.Linear(12, 3))
    graph = captured(lambda: (module, (torch.randn(8, 6), torch.randn(8, 3))))
    equal(graph, plan, devices)
    drawn = [op for op in graph.ops if op.target in ("ss.uniform", "ss.normal")]
    assert len(drawn) == 4
    assert all(op.indices[0].factor == "batch" for op in drawn)


def drawn(x: Tensor) -> dict[str, Tensor]:
    """Return numbers of each distribution that is drawn, in the ways of drawing them, around x + 1, or by rows of x."""
    return {
        "uniform": torch.empty_like(x).uniform_(-1, 3),
        "uniform to": torch.zeros_like(x).uniform_(to=4.0) - 1,
        "normal": x.new_empty(x.shape).normal_(1, 2),
        "normal around": torch.normal(x + 1, 2.0),
        "normal sample": torch.distributions.Normal(x + 1, 2.0).rsample(),
        "exponential": torch.empty_like(x).exponential_(1.0),
        "integers": torch.randint(3, x.shape),
        "integers from": torch.randint(-1, high=4, size=x.shape),
        "integers like": torch.randint_like(x.detach(), 0, 3),
    }


def test_numbers_of_distributions_are_drawn_by_element() -> None:
    """All have mean 1. A whole tensor is that of one device."""
    graph = captured(lambda: (Around(lambda m, x: drawn(x)), torch.zeros(64, 64)), optimizer=None)
    alone, *others = (
        found
        for plan, devices in (("single", 1), ("data_parallel", 2))
        for found in on_ranks(ss.compile(graph, plan, f"local:{devices}"), lambda step: step(graph.captured.batch))
    )
    spread = {"exponential": 1.0, "integers": (2 / 3) ** 0.5, "integers like": (2 / 3) ** 0.5, "integers from": 2**0.5}
    for name, expected in drawn(torch.zeros(2, 2)).items():
        numbers, wide = alone[name], alone[name].double()
        assert all(torch.equal(numbers, other[name]) for other in others), name
        assert numbers.dtype == expected.dtype
        assert float(wide.mean()) == pytest.approx(1.0, abs=0.1)
        assert float(wide.std()) == pytest.approx(spread.get(name, 4 / 12**0.5 if "uniform" in name else 2.0), rel=0.05)
    assert alone["exponential"].min() > 0
    assert alone["integers from"].unique().tolist() == [-1, 0, 1, 2, 3]


def test_numbers_of_distributions_are_those_that_the_module_is_given() -> None:
    def forward(m: Around, x: Tensor) -> Tensor:
        h = m.up(x)
        made = torch.stack([x.to(h.dtype) for x in drawn(h).values()], -1)
        return ((made * m.scale).sum(-1) * h + m.table(torch.randint(5, (8,)))).square().mean()

    layers = {"up": nn.Linear(6, 12), "table": nn.Embedding(5, 12), "scale": nn.Parameter(torch.ones(9))}
    graph = captured(lambda: (Around(forward, **layers), torch.randn(8, 6)))
    for plan, devices in (("data_parallel", 4), ("tensor_parallel", 2)):
        assert equal(graph, plan, devices).found["reference"] == "eager"
    assert ss.compile(graph, "data_parallel", "local:2").verify()["equal"]


def test_a_checkpoint_of_training_is_evaluated(tmp_path: Path) -> None:
    """The counter of batches, which only training reads, is another one than at capture."""
    batch = {"x": torch.randn(4, 3, 8, 8), "y": torch.randint(5, (4,))}
    module, fresh, trained = Convolutions(), Convolutions().eval(), Convolutions().eval()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for name, plan in (
        ("train", ss.compile(ss.capture(module, kwargs=batch, optimizer=optimizer, check=False), "single", "local:1")),
        ("evaluate", ss.compile(ss.capture(fresh, kwargs=batch, optimizer=None, check=False), "single", "local:1")),
    ):
        plan.save(str(tmp_path / name), evaluation=False)
    step = ss.load(tmp_path / "train")
    step(batch)
    step.save(tmp_path / "kept")
    evaluated = ss.load(tmp_path / "evaluate")
    assert evaluated.load_weights(tmp_path / "kept") == []
    ss.load_weights(trained, tmp_path / "kept")
    torch.testing.assert_close(evaluated(batch), trained(**batch).detach())
    assert evaluated.fixed["blocks.0.1.num_batches_tracked"] == 1
