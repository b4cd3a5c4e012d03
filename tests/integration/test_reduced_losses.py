"""Losses that a mean or a sum over the batch is a part of: each microbatch and each device computes its own part."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from tests.helpers.ran import Around, captured, equal
from tests.helpers.sweeps import few

Loss = Callable[[Around, Tensor, Tensor], Tensor]


LOSSES: dict[str, Loss] = {
    "weighted": lambda m, z, t: F.cross_entropy(z, t.argmax(1) % 3, m.weight),
    "weighted, some ignored": lambda m, z, t: F.cross_entropy(z, t.argmax(1) % 3, m.weight, ignore_index=0),
    "weighted and smoothed": lambda m, z, t: F.cross_entropy(
        z, t.argmax(1) % 3, m.weight, ignore_index=0, label_smoothing=0.1
    ),
    "weighted probabilities": lambda m, z, t: F.cross_entropy(z, t.softmax(1), m.weight),
    "weighted scores": lambda m, z, t: F.nll_loss(z.log_softmax(1), t.argmax(1) % 3, m.weight, ignore_index=0),
    "sum of weighted positives": lambda m, z, t: F.binary_cross_entropy_with_logits(
        z, t.sigmoid(), pos_weight=m.weight, reduction="sum"
    ),
    "numbers": lambda m, z, t: (
        (0.7 + z.abs().mean()) + torch.rsub((z - t).square().mean() - 0.1, 1, alpha=-2) + (1 - z.exp().sum() / 8)
    ),
    "stacked": lambda m, z, t: (
        (torch.stack([z.square().mean(), (z - t).abs().sum()]) * (-m.scales).exp() + m.scales).mean()
        + torch.dot(torch.stack([(z * t).mean(), z.sum()]), t[0, :2])
    ),
    "sequences": lambda m, z, t: F.ctc_loss(
        z.new_ones(5, 1, 1).mul(z).log_softmax(2),
        t.argsort(1)[:, :2].clamp(1),
        5 - t.argmax(1) % 2,
        1 + t.argmin(1) % 2,
    ),
    "triplet": lambda m, z, t: F.triplet_margin_loss(z, t, t.flip(1), swap=True),
    "cosine": lambda m, z, t: F.cosine_embedding_loss(z, t, t[:, 0].sign(), margin=0.1),
    "hinge": lambda m, z, t: F.hinge_embedding_loss(z, t.sign(), margin=0.1),
    "margins": lambda m, z, t: F.multi_margin_loss(z, t.argmax(1) % 3, weight=m.weight),
    "margins of several": lambda m, z, t: F.multilabel_margin_loss(
        z, t.argsort(1).where(z.new_tensor([1, 1, 0, 0, 0]) > 0, -1)
    ),
}


def graph_of(loss: Loss) -> ss.Graph:
    def forward(m: Around, x: Tensor, t: Tensor) -> Tensor:
        for block in m.blocks:
            x = x + block(x)
        return loss(m, x, t)

    def make() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        module = Around(forward, blocks=nn.ModuleList(nn.Linear(5, 5) for _ in range(2)))
        module.scales = nn.Parameter(torch.tensor([0.2, -0.4]))
        module.register_buffer("weight", torch.tensor([0.5, 1.3, 2.0, 0.3, 0.7]))
        return module, (torch.randn(8, 5), torch.randn(8, 5))

    return captured(make)


@pytest.mark.parametrize("name", few(list(LOSSES), 2, 5, 6, 7, 8, 9))
def test_a_stage_computes_the_loss_of_a_microbatch_when_it_has_its_scores(name: str) -> None:
    """1F1B has the backward of a microbatch before the forward of the next one."""
    equal(graph_of(LOSSES[name]), "pipeline_1f1b:microbatches=4")
