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
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

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


def seeding(m: Any, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h * torch.rand_like(h)


def forking(m: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return h * torch.rand_like(h)


def hooking(m: Any, h: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x):
        return h.exp()


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
    "switch": (
        freezing,
        r"test_effects\.py:\d+ switches requires_grad of a parameter, but a captured step trains what",
    ),
    "seed": (
        seeding,
        r"test_effects\.py:\d+ sets the state of torch's random numbers, but a captured step draws its own",
    ),
    "fork": (forking, r"test_effects\.py:\d+ sets the state of torch's random numbers"),
    "saved": (hooking, r"test_effects\.py:\d+ sets hooks on the tensors that backward reads, which the captured step"),
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


class Sgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> None: ...


def hooked(when: str) -> Callable[[Any, Any], Any]:
    return lambda module, optimizer: getattr(optimizer, f"register_step_{when}_hook")(lambda *_: None)


def accumulating(module: Any, optimizer: Any) -> None:
    module.first.weight.register_post_accumulate_grad_hook(lambda p: None)


def replaced(module: Any, optimizer: Any) -> None:
    optimizer.step = lambda: None


# What is done to a module and its optimizer before they are captured, and what capture says of it.
AROUND = {
    "pre": (hooked("pre"), r"this SGD has hooks around the step \(.*test_effects\.py:\d+\), which a plan would"),
    "post": (hooked("post"), r"this SGD has hooks around the step \(.*test_effects\.py:\d+\), which a plan would"),
    "all pre": (
        lambda m, o: register_optimizer_step_pre_hook(lambda *_: None), r"all optimizers have hooks around the step",
    ),
    "all post": (
        lambda m, o: register_optimizer_step_post_hook(lambda *_: None), r"all optimizers have hooks around the step",
    ),
    "accumulated": (accumulating, r"1 gradient hooks would be lost, .* parameter first\.weight \(.*py:\d+"),
    "step": (replaced, r"the step of this SGD is replaced \(.*test_effects\.py:\d+\), which a plan would not run"),
    "class": (lambda m, o: Sgd(m.parameters()), r"Sgd is a class of its own over torch's SGD \(.*py:\d+\), whose"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), AROUND.values(), ids=AROUND)
def test_what_is_around_gradients_and_updates_is_refused(change: Callable[[Any, Any], Any], message: str) -> None:
    module = Net(lambda m, h: h)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    made = change(module, optimizer)
    try:
        with pytest.raises(CaptureError, match=message):
            ss.capture(module, (torch.rand(4, 8),), optimizer=made if isinstance(made, Sgd) else optimizer)
    finally:
        for table in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
            table.clear()


def test_a_schedule_of_the_learning_rate_is_no_change_of_the_step() -> None:
    module = Net(lambda m, h: h)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert ss.capture(module, (torch.rand(4, 8),), optimizer=optimizer)


class Scaled(nn.Linear):
    def __call__(self, x: Tensor, scale: float = 3.0) -> dict[str, Tensor]:
        return {"loss": super().__call__(x).mean() * scale}


def with_hooks() -> nn.Module:
    module = Net(lambda m, h: h)
    module.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    module.register_forward_hook(lambda m, args, out: out * 2)
    return module


@pytest.mark.parametrize("build", [lambda: Scaled(8, 8), with_hooks], ids=["call", "hooks"])
def test_what_a_call_does_around_its_forward_is_captured(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    module = build()
    kind, names = type(module), set(vars(module))
    graph = ss.capture(module, (torch.randn(4, 8),), optimizer=torch.optim.SGD(module.parameters(), lr=1e-2))
    result = ss.compile(graph, "single", "local:1").verify()
    assert (result["equal"], result["reference"]) == (True, "eager"), result["first_difference"]
    assert (type(module), set(vars(module))) == (kind, names)


def test_a_name_that_export_itself_uses_is_said() -> None:
    module = Net(lambda m, h: h + m.code)
    module.register_buffer("code", torch.ones(8))
    with pytest.raises(CaptureError, match=r"of a name that torch\.export has a use for; give it another name"):
        capture(module, (torch.rand(4, 8),))
