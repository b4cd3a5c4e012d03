"""Models that draw random numbers: every plan draws the same ones, element by element."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.plans import data_parallel, tensor_parallel


class Noisy(nn.Module):
    """Drop-path, noise, and both kinds of Bernoulli masks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        h = h / 0.8 * (torch.rand(h.shape[0], 1) + 0.8).floor()
        h = h + 0.1 * torch.randn_like(h)
        h = h * torch.bernoulli(torch.full_like(h, 0.7)) * torch.empty_like(h).bernoulli_(0.6)
        return F.mse_loss(self.down(h), y)


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("plan", ["data_parallel", "tensor_parallel"])
def test_random_ops(plan: str, devices: int) -> None:
    torch.manual_seed(0)
    module = Noisy()
    graph = ss.capture(
        module, (torch.randn(8, 6), torch.randn(8, 3)), optimizer=torch.optim.SGD(module.parameters(), lr=1e-2)
    )
    sprogram = {"data_parallel": data_parallel.data_parallel, "tensor_parallel": tensor_parallel.tensor_parallel}[plan]
    found = ss.compile(graph, sprogram, ss.Cluster.local(devices)).verify()
    assert found["equal"], found
    drawn = [op for op in graph.ops if op.target in ("ss.uniform", "ss.normal")]
    assert len(drawn) == 4
    assert all(op.indices[0].factor == "batch" for op in drawn)
