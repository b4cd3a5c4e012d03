"""Effects that a captured step would lose or freeze are refused by name; what only happens once is settled."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.errors import CaptureError
from superscaler.frontend.capture import capture

COUNTED = [0]


class Tally:
    count = 0

    def __init__(self) -> None:
        self.calls = 0


class Net(nn.Module):
    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.instance = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
        self.between = between
        self.tally = Tally()
        self.is_ready = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x))).pow(2).mean()


def global_count(m: Any, h: Tensor) -> Tensor:
    COUNTED[0] += 1
    return h * COUNTED[0]


def object_count(m: Any, h: Tensor) -> Tensor:
    m.tally.calls += 1
    return h * m.tally.calls


def freezing(m: Any, h: Tensor) -> Tensor:
    m.first.weight.requires_grad_(False)
    return h


def python_number(m: Any, h: Tensor) -> Tensor:
    return h * random.random()


def numpy_number(m: Any, h: Tensor) -> Tensor:
    return h * float(np.random.rand())


class Clipped(torch.autograd.Function):
    """Is its derivative for small gradients only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-1, 1) * 2


class Straight(torch.autograd.Function):
    """Is its derivative for small numbers only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-6, 6)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "object": (object_count, r"test_effects\.py:\d+ \(Net\.forward\) changes self\.tally\.calls in every call"),
    "switch": (freezing, r"changes first\.weight\.requires_grad in every call"),
    "python": (python_number, r"draws random numbers of Python, but a captured step would have the same ones always"),
    "numpy": (numpy_number, r"draws random numbers of numpy"),
    "clipped": (lambda m, h: Clipped.apply(h), r"uses Clipped, whose own backward is not its derivative"),
    "straight": (lambda m, h: Straight.apply(h), r"uses Straight, whose own backward is not its derivative"),
}


@pytest.mark.parametrize(("between", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_frozen_or_lost_is_refused(between: Callable[[Any, Tensor], Tensor], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Net(between), (torch.rand(4, 8),))


class Global(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        COUNTED[0] += 1
        return (super().forward(x) * COUNTED[0]).sum()


def test_a_counter_outside_of_the_module_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"\(Global\.forward\) changes COUNTED in every call"):
        capture(Global(8, 8), (torch.rand(4, 8),))


def test_what_a_hook_remembers_is_refused() -> None:
    kept = {"calls": 0}

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        kept["calls"] += 1
        return output * kept["calls"]

    module = Net(lambda m, h: h)
    module.first.register_forward_hook(hook)
    with pytest.raises(CaptureError, match=r"changes kept in every call"):
        capture(module, (torch.rand(4, 8),))


def test_a_switch_that_is_set_once_settles_without_its_effects_twice() -> None:
    """The first run of a forward is not in the graph of the second: running statistics move once a step."""

    def once(m: Any, h: Tensor) -> Tensor:
        m.is_ready = True
        return m.norm(h)

    torch.manual_seed(0)
    module = Net(once)
    graph = ss.capture(module, (torch.randn(4, 8),), optimizer=torch.optim.SGD(module.parameters(), lr=1e-2))
    assert len([op for op in graph.captured.model.ops if op.is_write]) == 3
    result = ss.compile(graph, "data_parallel", "local:2").verify()
    assert (result["equal"], result["reference"]) == (True, "eager"), result["first_difference"]


def test_a_tensor_that_is_set_once_settles_without_the_effects_of_two_runs() -> None:
    """The second run of a forward is in the graph of the first: running statistics move once a step, others never."""

    def cached(m: Any, h: Tensor) -> Tensor:
        if m.table is None:
            m.table = torch.linspace(0.5, 1.0, 8)
        return m.norm(h * m.shift) * m.table

    torch.manual_seed(0)
    module = Net(cached)
    module.table = None
    module.register_buffer("shift", torch.rand(8))
    graph = ss.capture(module, (torch.randn(4, 8),), optimizer=torch.optim.SGD(module.parameters(), lr=1e-2))
    written = [op.inputs[0].tensor for op in graph.ops if op.is_write]
    assert written == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    result = ss.compile(graph, "data_parallel", "local:2").verify()
    assert (result["equal"], result["reference"]) == (True, "eager"), result["first_difference"]


def test_an_instance_norm_moves_its_statistics() -> None:
    torch.manual_seed(0)
    module = Net(lambda m, h: m.instance(h[..., None] * torch.linspace(-1, 1, 5)).mean(-1))
    graph = ss.capture(module, (torch.randn(4, 8),), optimizer=torch.optim.SGD(module.parameters(), lr=1e-2))
    result = ss.compile(graph, "data_parallel", "local:2").verify()
    assert (result["equal"], result["reference"]) == (True, "eager"), result["first_difference"]


def view(module: nn.Module, tensor: Tensor, kind: str) -> nn.Module:
    if kind == "buffer":
        module.register_buffer("shared", tensor)
    elif kind == "parameter":
        module.shared = nn.Parameter(tensor)
    else:
        module.shared = [tensor] if kind == "list" else tensor
    return module


@pytest.mark.parametrize("kind", ["attribute", "list", "buffer", "parameter"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_memory_that_a_trained_parameter_shares_is_refused(kind: str, device: str) -> None:
    with torch.device(device):
        module = Net(lambda m, h: h)
    view(module, module.first.weight.data[:2], kind)
    with pytest.raises(CaptureError, match=r"shared of Net shares memory with parameter first\.weight, which training"):
        capture(module, (torch.rand(4, 8),))


def test_memory_of_what_is_not_trained_or_apart_is_shared_freely() -> None:
    module = Net(lambda m, h: h + m.shared)
    module.first.weight.requires_grad_(False)
    view(module, module.first.weight.data[0], "attribute")
    assert capture(module, (torch.rand(4, 8),))
    flat = torch.zeros(16)
    other = SimpleNamespace(halves=[nn.Parameter(flat[:8]), nn.Parameter(flat[8:])])
    module = Net(lambda m, h: h * m.one + m.two)
    module.one, module.two = other.halves
    assert capture(module, (torch.rand(4, 8),))


def test_rows_scaled_by_their_frequency_are_refused() -> None:
    table = nn.Embedding(10, 4, scale_grad_by_freq=True)
    module = nn.Sequential(table)
    module.forward = lambda ids: table(ids).pow(2).sum()  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"looks rows up with scale_grad_by_freq=True, which is not supported"):
        capture(module, (torch.randint(0, 10, (4, 3)),))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).pow(2).sum()


def test_sparse_gradients_are_dense_and_equal() -> None:
    module = Rows()
    graph = ss.capture(module, (torch.randint(0, 10, (4, 3)),), optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    result = ss.compile(graph, "data_parallel", "local:2").verify()
    assert (result["equal"], result["reference"]) == (True, "eager"), result["first_difference"]


@pytest.mark.parametrize("when", ["pre", "post"])
def test_a_hook_of_the_optimizer_is_refused(when: str) -> None:
    module = Net(lambda m, h: h)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    getattr(optimizer, f"register_step_{when}_hook")(lambda *_: None)
    with pytest.raises(CaptureError, match="this SGD has hooks around its step, which a plan would not run"):
        ss.capture(module, (torch.rand(4, 8),), optimizer=optimizer)


def test_a_name_that_export_itself_uses_is_said() -> None:
    module = Net(lambda m, h: h + m.code)
    module.register_buffer("code", torch.ones(8))
    with pytest.raises(CaptureError, match=r"of a name that torch\.export has a use for; give it another name"):
        capture(module, (torch.rand(4, 8),))
