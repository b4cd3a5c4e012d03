"""Losses and norms over the whole batch: no order of microbatches but all forwards before all backwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import ScheduleError
from tests.helpers.ran import captured, equal


class Coupled(nn.Module):
    """Two layers, and a loss that is no sum over the batch."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.loss(self.norm(h) if self.loss is _squares else h, self.second(h))


def _squares(h: Tensor, out: Tensor) -> Tensor:
    return (h * out).square().mean()


COUPLED = {
    "batch norm": (_squares, r"norm\) reads "),
    "contrastive": (
        lambda h, out: F.cross_entropy(out @ h.T, torch.arange(4)),
        r"matmul \(.*test_coupled.py:\d+\) reads ",
    ),
    "router": (lambda h, out: (out.softmax(-1).mean(0) * (h > 0).float().mean(0)).sum(), r"mul \(.*\) reads mean"),
    "logarithm": (lambda h, out: out.square().mean().log(), r"log \(.*\) reads mean"),
}


@pytest.mark.parametrize(("loss", "told"), COUPLED.values(), ids=COUPLED)
def test_a_loss_that_couples_microbatches_is_refused_by_its_op_and_runs_as_advised(
    loss: Callable[[Tensor, Tensor], Tensor], told: str
) -> None:
    graph = captured(lambda: (Coupled(loss), torch.randn(4, 6)))
    message = f"^[^\n]*{told}[^\n]* of several microbatches[^\n]*Use 1 microbatch[^\n]*$"
    with pytest.raises(ScheduleError, match=message):
        ss.compile(graph, "pipeline_1f1b:stages=2,microbatches=2", "local:2")

    def advised(graph: ss.Graph, cluster: ss.Cluster) -> None:
        parts = ss.op_trans(graph, graph.forward_ops, ss.Microbatch(2))
        ss.op_assign(graph, parts, cluster.devices[0])
        ss.op_order(graph, graph.select(), graph.select(kind="B"))

    equal(graph, advised, 1)
