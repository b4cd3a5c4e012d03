"""What a forward changes in place without gradients: weights and buffers after two steps are those of the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.artifact import initial_values
from superscaler.verify.locate import on_threads


class Net(nn.Module):
    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Linear(8, 8), nn.Linear(8, 1), between
        self.register_buffer("mean", torch.rand(8, 8))
        self.register_buffer("book", torch.randn(4, 8))
        self.register_buffer("seen", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x))).pow(2).mean()

    @torch.no_grad()
    def move(self) -> None:
        self.mean.mul_(0.9).add_(self.first.weight, alpha=0.1)


def teacher(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean.mul_(0.9).add_(m.first.weight, alpha=0.1)
    return h + h @ m.mean


def codebook(m: Any, h: Tensor) -> Tensor:
    chosen = F.one_hot(torch.cdist(h, m.book).argmin(1), 4).to(h.dtype)
    with torch.no_grad():
        m.seen.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        m.book.lerp_(chosen.T @ h / m.seen[:, None], 0.1)
    near = chosen @ m.book
    return h + (near - h).detach() + (near - h).pow(2)


def decorated(m: Any, h: Tensor) -> Tensor:
    m.move()
    return h @ m.mean


def nested(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        with torch.enable_grad():
            twice = h * 2
        with torch.no_grad():
            m.mean += m.first.weight
        torch.mul(m.mean, m.first.bias, out=m.mean)
    return twice @ m.mean


def parts(m: Any, h: Tensor) -> Tensor:
    with torch.no_grad():
        m.mean[:4].mul_(0.9).add_(m.first.weight[:4])
        m.mean[5] = m.first.weight[5]
        m.mean.view(-1)[3:5].copy_(h.sum(0)[:2])
    return h @ m.mean


def inside_and_outside(m: Any, h: Tensor) -> Tensor:
    m.seen.add_(1)
    with torch.no_grad():
        m.seen.mul_(m.first.bias[:4])
        m.mean.add_(m.first.weight)
    m.mean.mul_(0.5)
    return h @ m.mean * m.seen.sum()


def past_a_gradient(m: Any, h: Tensor) -> Tensor:
    """A tensor that has a gradient keeps it, whatever its value becomes; so does one that it is a view of."""
    moved = m.mean * m.first.weight
    rows = moved[:4]
    with torch.no_grad():
        rows.mul_(m.first.weight[:4])
        h.clamp_(-0.5, 0.5)
    return h @ moved + rows.sum()


@pytest.mark.parametrize(
    "between", [teacher, codebook, decorated, nested, parts, inside_and_outside, past_a_gradient],
    ids=lambda between: between.__name__,
)  # fmt: skip
def test_what_moves_in_place_has_no_gradient(between: Callable[[Any, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    module, x = Net(between).double(), torch.randn(6, 8, dtype=torch.float64)
    twin = copy.deepcopy(module)
    graph = ss.capture(module, (x,), optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    compiled = ss.compile(graph, "single", "local:1").compiled
    values = initial_values(graph.model, graph.captured.values)

    def train(step: Any) -> dict[str, Tensor]:
        for _ in range(2):
            step(graph.captured.batch)
        return dict(step.state.weights)

    (found,) = on_threads(compiled, values, train, 60.0)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        twin(x).backward()
        optimizer.step()
    # Emitted code has no dots in its names.
    state = {name.replace(".", "_"): value for name, value in twin.state_dict().items()}
    moved = {op.inputs[0].tensor.replace(".", "_") for op in graph.ops if op.kind == "optimizer"}
    assert {"first_weight", "first_bias", "last_weight", "last_bias"} <= moved <= found.keys()
    for name in moved:
        torch.testing.assert_close(found[name].detach(), state[name].detach(), rtol=1e-10, atol=1e-12)
