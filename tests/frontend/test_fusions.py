"""Chains of calls that become one operator."""

from __future__ import annotations

from math import pi, sqrt

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss


class Written(nn.Module):
    """Gelu by tanh, as a model may write it out; with another number it is another function."""

    def __init__(self, cubic: float, shows: bool = False) -> None:
        super().__init__()
        self.linear, self.cubic, self.shows = nn.Linear(4, 4), cubic, shows

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        tanh = torch.tanh(sqrt(2.0 / pi) * (x + self.cubic * torch.pow(x, 3.0)))
        y = 0.5 * x * (1.0 + tanh)
        return (y + tanh if self.shows else y).sum()


@pytest.mark.parametrize(
    ("module", "is_fused"),
    [(Written(0.044715), True), (Written(0.05), False), (Written(0.044715, shows=True), False)],
    ids=["gelu", "another number", "what is inside is read"],
)
def test_gelu_that_is_written_out_is_one_operator(module: nn.Module, is_fused: bool) -> None:
    graph = ss.capture(module, (torch.randn(6, 4),), optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    targets = [op.target for op in graph.model.ops]
    assert ("aten.gelu.default" in targets, "aten.tanh.default" in targets) == (is_fused, not is_fused)
    assert ss.compile(graph, "data_parallel", "local:2").verify()["equal"]
