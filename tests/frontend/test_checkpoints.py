"""What a model wraps in `torch.utils.checkpoint` is found at capture, whatever way it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointFunction, checkpoint, checkpoint_sequential

from superscaler.errors import CaptureError
from superscaler.frontend.base.captured import Captured
from superscaler.frontend.capture_cache import key_of
from superscaler.ir.text.model import parse_model, print_model
from superscaler.report.model import describe
from tests.helpers.graphs import step_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + self.second(torch.relu(self.first(x))) * scale


class Model(nn.Module):
    """Two blocks, called by a function of the model and of what the first layer gives."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.into, self.blocks = nn.Linear(8, 8), nn.Sequential(Block(), Block())
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.into(x)).square().mean()


def captured(run: Callable[[Any, Tensor], Tensor]) -> Captured:
    return step_of(Model(run), torch.rand(4, 8)).captured


def plain(m: Model, x: Tensor) -> Tensor:
    return checkpoint(m.blocks[1], checkpoint(m.blocks[0], x, use_reentrant=False, scale=2.0), use_reentrant=False)


def reentrant(m: Model, x: Tensor) -> Tensor:
    return checkpoint(m.blocks[1], checkpoint(m.blocks[0], x, use_reentrant=True), use_reentrant=True)


def repeated(m: Model, x: Tensor) -> Tensor:
    return checkpoint(m.blocks[0], checkpoint(m.blocks[0], x, use_reentrant=False), use_reentrant=False)


def sequential(m: Model, x: Tensor) -> Tensor:
    return checkpoint_sequential(m.blocks, 2, x, use_reentrant=False)


def nested(m: Model, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(m.blocks[0], x, use_reentrant=True) + x

    return checkpoint(inner, checkpoint(inner, x, use_reentrant=True), use_reentrant=False)


def bare(m: Model, x: Tensor) -> Tensor:
    return m.blocks(checkpoint(torch.tanh, x, use_reentrant=False))


def idle(m: Model, x: Tensor) -> Tensor:
    """Nothing has a gradient in either: the argument of a reentrant region is what counts."""
    with torch.no_grad():
        y = checkpoint(m.blocks[0], x, use_reentrant=False)
    return x * y * checkpoint(m.blocks[1], y, use_reentrant=True)


@pytest.mark.parametrize(
    ("run", "regions"),
    [
        (plain, ["blocks.0", "blocks.1"]),
        (reentrant, ["blocks.0", "blocks.1"]),
        (repeated, ["blocks.0", "blocks.0_2"]),
        (sequential, ["blocks.0"]),
        (nested, ["blocks.0", "blocks.0_2"]),
        (bare, ["tanh"]),
        (idle, ["blocks.1"]),
    ],
)
def test_regions_are_named_after_their_modules(run: Callable[[Any, Tensor], Tensor], regions: list[str]) -> None:
    model = captured(run).model
    assert list(dict.fromkeys(op.checkpoint for op in model.forward_ops if op.checkpoint)) == regions
    assert [op.checkpoint for op in parse_model(print_model(model)).ops] == [op.checkpoint for op in model.ops]


def test_a_region_has_gradients_where_torch_has_them() -> None:
    assert describe(captured(plain).model)["checkpoints"] == {"blocks.*": 2}
    assert describe(captured(idle).model)["checkpoints"] == {}
    with pytest.raises(CaptureError, match=r"depends on none of the 10 parameters .* reentrant checkpoints"):
        captured(lambda m, x: checkpoint(m.blocks[0], x.detach(), use_reentrant=True))


def test_torch_is_left_as_it_was_where_a_region_fails() -> None:
    def hooked() -> tuple[object, ...]:
        hooks = saved_tensors_hooks
        return hooks.__enter__, hooks.__exit__, inspect.getattr_static(CheckpointFunction, "apply")

    before = hooked()
    with pytest.raises(CaptureError, match="summ"):
        captured(lambda m, x: checkpoint(lambda x: x.summ(), x, use_reentrant=False))
    assert before == hooked()
    x = torch.rand(3, requires_grad=True)
    checkpoint(torch.tanh, x, use_reentrant=False).sum().backward()
    assert x.grad is not None
    assert not any(op.checkpoint for op in captured(lambda m, x: m.blocks(x)).model.ops)


def test_the_cache_tells_a_model_with_regions_from_one_without() -> None:
    module = Model(plain)
    before = key_of("mine", module, ())
    module.blocks[0].gradient_checkpointing = True
    assert key_of("mine", module, ()) != before
