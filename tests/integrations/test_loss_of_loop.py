"""The loss that a loop computes, as a module that a capture runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import CaptureError
from superscaler.integrations.loss import LossOfLoop


class Loop:
    """A loop with a loss of its own, and with what no copy can have."""

    def __init__(self) -> None:
        self.lock, self.scale, self.losses = threading.Lock(), 2.0, list[Tensor]()

    def compute(self, module: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return self.scale * module(batch["x"]).pow(2).mean(), {}


class Keeping(Loop):
    """A loop that keeps its losses, which a step of a plan would not do."""

    def compute(self, module: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, logged = super().compute(module, batch)
        self.losses.append(loss.detach())
        return loss, logged


def captured(loop: Loop) -> ss.Graph:
    module, batch = nn.Linear(4, 2), {"x": torch.ones(3, 4)}
    loss = LossOfLoop(module, loop.compute, loop, [*batch], torch.utils._pytree.tree_structure(batch))
    return ss.capture(loss, kwargs=dict(batch), optimizer=torch.optim.SGD(module.parameters(), lr=0.1), outputs=True)


def test_a_loop_is_not_copied_where_its_loss_is_compared_with_the_graph() -> None:
    assert captured(Loop()).captured.checked.startswith("2 steps are those of the module")


def test_a_loss_that_changes_its_loop_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"changes self\.trainer\.losses in every call"):
        captured(Keeping())
