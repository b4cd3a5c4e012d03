"""Gradients that share memory: clipped, scaled and updated as torch does it with gradients of their own."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.artifact import describe
from superscaler.runtime.scaling import scale
from superscaler.runtime.step import Step
from superscaler.runtime.updates import Updates
from tests.helpers.graphs import graph_of
from tests.helpers.ran import exact, on_ranks

SHARED = {
    "rows of a whole": lambda x: (x, x[4:]),
    "whole after its rows": lambda x: (x[4:], x),
    "inner rows": lambda x: (x[1:5], x[2:3], x),
    "columns of a whole": lambda x: (x[:, 1:3], x),
    "a transposed one": lambda x: (x.t(), x[5]),
    "rows that overlap": lambda x: (x[:3], x[2:4], x[5:]),
    "columns side by side": lambda x: (x[:, :2], x[:, 2:]),
    "rows side by side": lambda x: (x[:3], x[3:]),
    "a row for all rows": lambda x: (x[0].expand(3, 4), x[0, 1:3]),
    "one number for all": lambda x: (x[0, 0].expand(6), x),
    "one memory, two storages": lambda x: (torch.from_numpy(x.numpy()), torch.from_numpy(x.numpy())[1:]),
}


@pytest.mark.parametrize("views", SHARED.values(), ids=SHARED)
def test_each_gradient_is_scaled_once(views: Any) -> None:
    gradients = dict(zip("abc", views(torch.randn(6, 4, generator=torch.Generator().manual_seed(0))), strict=False))
    expected = {name: gradient.double().clone() * 0.5 for name, gradient in gradients.items()}
    scale(gradients, torch.tensor(0.5, dtype=torch.float64))
    assert all(torch.equal(gradients[name].double(), want) for name, want in expected.items())


def test_gradients_of_one_buffer_are_scaled_in_place() -> None:
    """The results of a collective are ranges of its buffer: they take no memory again."""
    buffer = torch.ones(10)
    gradients = {"first": buffer[:4].view(2, 2), "second": buffer[4:], "none": buffer[4:4]}
    scale(gradients, torch.tensor(0.5, dtype=torch.float64))
    assert buffer.tolist() == [0.5] * 10


class Joined(nn.Module):
    """The weight of a linear layer: the rows of a fixed and of a learnt one, plus another learnt one."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.a, self.d = (nn.Parameter(torch.randn(rows, 4, generator=draw)) for rows in (6, 2))
        self.register_buffer("f", torch.randn(4, 4, generator=draw))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(x @ (torch.cat([self.f, self.d]) + self.a), y)


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 6, generator=draw), "y": torch.randn(8, 4, generator=draw)}


def by_columns(graph: ss.Graph, cluster: ss.Cluster) -> None:
    factor = graph.op("update.a").indices[1].factor
    ss.op_trans(graph, graph.ops, ss.Split(factor, 2, axis="tp"))
    ss.op_assign(graph, graph.ops, cluster.mesh(tp=2))


def as_torch(clip: float | None, **options: Any) -> tuple[list[float], dict[str, Tensor]]:
    module, given = Joined().double(), {name: x.double() for name, x in batch().items()}
    optimizer, losses = torch.optim.SGD(module.parameters(), 0.1, **options), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = module(**given)
        loss.backward()
        for weight in module.parameters():
            assert weight.grad is not None
            weight.grad = weight.grad.clone()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: weight.detach() for name, weight in module.named_parameters()}


def as_planned(step: Step, clip: float | None) -> tuple[list[float], dict[str, Tensor]]:
    losses = [float(step({name: x.double() for name, x in batch().items()}, clip=clip)) for _ in range(3)]
    return losses, {w["tensor"]: step.state.weights[w["name"]].detach() for w in step.state.tables["weights"]}


CASES = [
    (0.1, None, {}),
    (None, 1024.0, {}),
    (0.1, 1024.0, {}),
    (None, None, {"momentum": 0.9, "nesterov": True, "foreach": True}),
    (0.1, None, {"momentum": 0.9, "nesterov": True, "foreach": True}),
]


@pytest.mark.parametrize(("clip", "start", "options"), CASES)
def test_gradients_that_share_memory_train_as_by_torch(
    clip: float | None, start: float | None, options: dict[str, Any]
) -> None:
    module = Joined()
    scaler = torch.amp.GradScaler("cpu", init_scale=start) if start else None
    optimizer = torch.optim.SGD(module.parameters(), 0.1, **options)
    graph = ss.capture(module, kwargs=batch(), optimizer=optimizer, scaler=scaler, check=False)
    losses, weights = as_torch(clip, **options)
    for plan, world in (("single", 1), ("data_parallel", 2), (by_columns, 2)):
        for rank, (have, own) in enumerate(on_ranks(exact(graph, plan, world), lambda step: as_planned(step, clip))):
            assert have == pytest.approx(losses, rel=1e-12)
            for name, want in weights.items():
                columns = want.chunk(2, 1)[rank] if plan is by_columns else want
                torch.testing.assert_close(own[name], columns, rtol=1e-11, atol=1e-12)


def test_verify_runs_steps_with_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification compares a clipped step, and one with a scaled loss: a fault of these alone is a difference."""
    module = Joined()
    graph = ss.capture(module, kwargs=batch(), optimizer=torch.optim.SGD(module.parameters(), 0.1), check=False)
    plan = ss.compile(graph, by_columns, "local:2")
    found = plan.verify()
    assert found["equal"]
    assert found["options"]["loss_scale"]["value"] == 1024
    assert all(option["error"] < 1e-12 for option in found["options"].values())
    monkeypatch.setattr("superscaler.runtime.scaling._shared", lambda tensors: set())
    found = plan.verify()
    assert not found["equal"]
    # The rows of `a` that are those of `d`, too, are scaled twice: 1/100 less one, and 1/1024 less one.
    assert found["options"]["clip"]["error"] > 0.5
    assert found["options"]["loss_scale"]["error"] > 0.5
    assert re.fullmatch(
        r"the gradient of [ad]\[.*\] on device 0 in a step with clip \S+ is off by .*", found["first_difference"]
    )


def test_verify_finds_a_norm_of_too_many_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ss.compile(graph_of("mlp"), "data_parallel", "local:2")
    for entry in describe(plan.compiled)["devices"][1]["weights"]:
        assert not entry["counted"]
    made = Updates.__init__

    def counting_all(self: Updates, *given: Any) -> None:
        made(self, *given)
        self._counted = list(self.weights)

    monkeypatch.setattr(Updates, "__init__", counting_all)
    found = plan.verify()
    assert not found["equal"]
    assert found["options"]["clip"]["error"] == pytest.approx(1 - 2**-0.5, rel=1e-4)
    assert found["options"]["loss_scale"]["error"] < 1e-12
    assert "in a step with clip" in found["first_difference"]
