"""Effects of a forward: those that a captured step would lose or freeze are refused by name, what happens once is
settled, and what changes in place without gradients is part of the step.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks, register_optimizer_step_post_hook

import superscaler as ss
from superscaler.errors import CaptureError
from superscaler.frontend.capture import capture
from tests.frontend.examples import Net
from tests.helpers.graphs import assert_equal, step_of

COUNTED = [0]


class Tally:
    def __init__(self) -> None:
        self.calls = 0


def plain(m: Any, h: Tensor) -> Tensor:
    return h


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


def helping(m: Any, h: Tensor) -> Tensor:
    return h * bumped()


def bumped() -> int:
    KEPT["a"]["calls"] += 1
    return KEPT["a"]["calls"]


def late(m: Any, h: Tensor) -> Tensor:
    """Counts, and does something else after some calls only."""
    m.calls = m.calls + 1
    return h if m.calls < 9 else h * 2


def closure() -> Callable[[Any, Tensor], Tensor]:
    calls = 0

    def between(m: Any, h: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return h * calls

    return between


def default(m: Any, h: Tensor, calls: list[int] = [0]) -> Tensor:  # noqa: B006
    calls[0] += 1
    return h * calls[0]


def setting(m: Any, h: Tensor) -> Tensor:
    torch.default_generator.set_state(STATE)
    return h * torch.rand_like(h)


def reseeding(m: Any, h: Tensor) -> Tensor:
    torch.default_generator.manual_seed(1)
    return h * torch.rand_like(h)


def counting_array(m: Any, h: Tensor) -> Tensor:
    m.array[0] += 1
    return h * float(m.array[0])


def adding(m: Any, h: Tensor) -> Tensor:
    m.plain.add_(1)
    return h * m.plain


KEPT = {"a": {"calls": 0}}
STATE = torch.get_rng_state()
NUMBERS, RANDOM = itertools.chain([1.0], itertools.count(2)), np.random.default_rng(0)
HERE = r"test_effects\.py:\d+"
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "object": (object_count, r"examples\.py:\d+ \(Net\.forward\) changes self\.tally\.calls in every call"),
    "switch": (freezing, f"{HERE} switches requires_grad of a parameter, but a captured step trains what"),
    "seed": (seeding, f"{HERE} sets the state of torch's random numbers, but a captured step draws its own"),
    "fork": (forking, f"{HERE} sets the state of torch's random numbers"),
    "saved": (hooking, f"{HERE} sets hooks on the tensors that backward reads, which the captured step"),
    "default generator": (
        reseeding,
        "sets the state of torch's random numbers, but a captured step draws its own; seed",
    ),
    "its state": (setting, "sets the state of torch's random numbers, but a captured step draws its own; seed them"),
    "array": (counting_array, r"\(Net\.forward\) changes self\.array in every call, which the captured step would not"),
    "function of a function": (helping, "changes KEPT in every call"),
    "a later call": (late, f"{HERE} changes self.calls in every call"),
    "closure": (closure(), "changes calls in every call"),
    "default": (default, "changes calls in every call"),
    "iterator": (lambda m, h: h * next(NUMBERS), "changes NUMBERS in every call"),
    "generator": (lambda m, h: h * float(RANDOM.random()), "changes RANDOM in every call"),
    "plain tensor": (adding, r"changes a tensor in place that is an attribute of a module, .* self\.register_buffer\("),
    "python": (lambda m, h: h * random.random(), "draws random numbers of Python, but a captured step would have the"),
    "numpy": (lambda m, h: h * float(np.random.rand()), "draws random numbers of numpy"),
    "name": (
        lambda m, h: h * m.code[h[0] > 0].sum(),
        r"of a name that torch\.export has a use for; give it another name",
    ),
}


@pytest.mark.parametrize(("between", "message"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_frozen_or_lost_is_refused(between: Callable[[Any, Tensor], Tensor], message: str) -> None:
    module = Net(between, tally=Tally(), calls=0, array=np.zeros(2), plain=torch.ones(8))
    if "name" in message:
        module.register_buffer("code", torch.ones(8))
    with pytest.raises(CaptureError, match=message):
        capture(module, (torch.rand(4, 8),))


@pytest.mark.parametrize("between", [lambda m, h: h + m.code, lambda m, h: (h * 1).add_(m.code)], ids=["add", "add_"])
def test_a_name_that_torch_has_a_use_for_is_captured_in_one_trace(between: Callable[[Any, Tensor], Tensor]) -> None:
    module = Net(between)
    module.register_buffer("code", torch.ones(8))
    assert_equal(step_of(module, torch.rand(4, 8)))


class Global(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        COUNTED[0] += 1
        return (super().forward(x) * COUNTED[0]).sum()


def test_a_counter_outside_of_the_module_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"\(Global\.forward\) changes COUNTED in every call"):
        capture(Global(8, 8), (torch.rand(4, 8),))
    kept, module = {"calls": 0}, Net(plain)
    module.first.register_forward_hook(lambda *_: kept.update(calls=kept["calls"] + 1))
    with pytest.raises(CaptureError, match=r"changes kept in every call"):
        capture(module, (torch.rand(4, 8),))


def once(m: Any, h: Tensor) -> Tensor:
    """Sets a switch, so that the second run of a forward is like no first one."""
    m.is_ready = True
    return m.norm(h)


def cached(m: Any, h: Tensor) -> Tensor:
    """Sets a tensor, so that the first run of a forward has what the second has not."""
    if m.kept is None:
        m.kept = torch.linspace(0.5, 1.0, 8)
    return m.norm(h * m.table) * m.kept


@pytest.mark.parametrize("between", [once, cached], ids=lambda between: between.__name__)
def test_what_is_set_once_settles_without_the_effects_of_two_runs(between: Callable[[Any, Tensor], Tensor]) -> None:
    """Running statistics move once a step, and other buffers never."""
    graph = step_of(Net(between, is_ready=False, kept=None), torch.randn(4, 8))
    written = [op.inputs[0].tensor for op in graph.ops if op.is_write]
    assert written == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert_equal(graph)


def codebook(m: Any, h: Tensor) -> Tensor:
    chosen = F.one_hot(torch.cdist(h, m.book).argmin(1), 4).to(h.dtype)
    with torch.no_grad():
        m.seen[:4].mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        m.book.lerp_(chosen.T @ h / (m.seen[:4, None] + 1), 0.1)
    near = chosen @ m.book
    return h + (near - h).detach() + (near - h).pow(2)


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
        m.seen.mul_(m.first.bias)
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


def moves_statistics(m: Any, h: Tensor) -> Tensor:
    return m.instance(h[..., None] * torch.linspace(-1, 1, 5)).mean(-1)


@pytest.mark.parametrize(
    "between",
    [codebook, nested, parts, inside_and_outside, past_a_gradient, moves_statistics],
    ids=lambda between: between.__name__,
)
def test_what_moves_in_place_is_that_of_the_module(between: Callable[[Any, Tensor], Tensor]) -> None:
    """Weights and buffers after two steps: capture compares in the module's dtype, verify in float64."""
    instance = nn.InstanceNorm1d(8, affine=True, track_running_stats=True)
    graph = step_of(Net(between, instance=instance), torch.randn(6, 8))
    assert graph.captured.checked.startswith("2 steps are those of the module")
    assert assert_equal(graph, "single", 1)["parameter_error"] <= 1e-12


class Centred(nn.Module):
    """Runs a function that sets its buffer to a new value, or does something else to it."""

    def __init__(self, change: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.change, self.linear = change, nn.Linear(8, 8)
        self.register_buffer("center", torch.ones(8))
        self.register_buffer("other", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        before, h = self.center, self.linear(x)
        self.change(self, h.detach() * 0.1 + self.center * 0.9)
        return (h - self.center).pow(2).mean() + before.sum()


def swap(m: Any, new: Tensor) -> None:
    m.center, m.other = m.other, new.mean(0)


def forget(m: Any, new: Tensor) -> None:
    with torch.no_grad():
        m.center.copy_(new.mean(0))


SET: dict[str, Callable[[Any, Tensor], None]] = {
    "attribute": lambda m, new: setattr(m, "center", new.mean(0)),
    "table": lambda m, new: m._buffers.update(center=new.mean(0)),
    "registered": lambda m, new: m.register_buffer("center", new.mean(0)),
    "passing": lambda m, new: m.register_buffer("center", new.mean(0), persistent=False),
    "constant": lambda m, new: setattr(m, "center", torch.full((8,), 2.0)),
    "weight": lambda m, new: setattr(m, "center", m.linear.weight[0]),
    "swapped": swap,
    "as advised": forget,
}


@pytest.mark.parametrize("is_inside", [False, True], ids=["root", "submodule"])
@pytest.mark.parametrize("change", SET.values(), ids=SET)
def test_a_buffer_that_is_set_has_its_new_value(change: Callable[[Any, Tensor], None], is_inside: bool) -> None:
    """No check of capture is needed for it: those of large models are left out."""
    module = Centred(change)
    graph = step_of(nn.Sequential(module) if is_inside else module, torch.randn(6, 8), check=False)
    written = {op.inputs[0].tensor for op in graph.ops if op.is_write}
    assert f"{'0.' * is_inside}center" in written
    assert_equal(graph, "single", 1)


LINES = {
    "data": (
        lambda m, new: setattr(m.center, "data", new.mean(0)),
        r"reads or sets \.data of a tensor, .* change a bu",
    ),
    "read data": (lambda m, new: m.center.data.mul_(2), r"reads or sets \.data of a tensor, .* read x\.detach\(\)"),
    "shape": (
        lambda m, new: setattr(m, "center", new),
        r"sets buffer .*center of \w+, which has shape \(8,\) .* \(6, 8\)",
    ),
    "dtype": (
        lambda m, new: setattr(m, "center", new.mean(0).double()),
        "sets buffer .* to a tensor of .* dtype float64; a cap",
    ),
    "none": (lambda m, new: setattr(m, "other", None), "sets buffer .*other .* to no tensor; a captured step keeps"),
    "new": (lambda m, new: m.register_buffer("mean", new.mean(0)), r"changes self\..*mean in every call"),
    "parameter": (
        lambda m, new: setattr(m.linear, "weight", nn.Parameter(m.linear.weight * 0.9)),
        r"sets parameter .*linear\.weight of \w+ in the forward, but the optimizer of a captured step has the one",
    ),
}


@pytest.mark.parametrize("is_inside", [False, True], ids=["root", "submodule"])
@pytest.mark.parametrize(("change", "message"), LINES.values(), ids=LINES)
def test_a_tensor_that_cannot_be_set_is_named_with_its_line(change: Any, message: str, is_inside: bool) -> None:
    module = Centred(change)
    with pytest.raises(CaptureError, match=f"{HERE} {message}"):
        step_of(nn.Sequential(module) if is_inside else module, torch.randn(6, 8), check=False)


def view(module: nn.Module, tensor: Tensor, kind: str) -> nn.Module:
    if kind == "buffer":
        module.register_buffer("shared", tensor)
    elif kind == "parameter":
        module.shared = nn.Parameter(tensor)
    else:
        module.shared = [tensor] if kind == "list" else tensor
    return module


@pytest.mark.parametrize(
    ("kind", "device"), [("attribute", "cpu"), ("list", "meta"), ("buffer", "meta"), ("parameter", "cpu")]
)
def test_memory_that_a_trained_parameter_shares_is_refused(kind: str, device: str) -> None:
    with torch.device(device):
        module = Net(plain)
    view(module, module.first.weight.data[:2], kind)
    with pytest.raises(CaptureError, match=r"shared of Net shares memory with parameter first\.weight, which training"):
        capture(module, (torch.rand(4, 8),))


@pytest.mark.parametrize("kind", ["attribute", "list", "buffer", "parameter"])
def test_memory_that_an_array_of_the_module_shares_is_refused(kind: str) -> None:
    """A copy of the module, which capture compares, would have two memories."""
    module = Net(plain, array=np.ones((4, 8), np.float32))
    view(module, torch.from_numpy(module.array)[1:], kind)
    with pytest.raises(
        CaptureError, match=r"^shared of Net shares memory with the array self\.array of numpy, but a capt"
    ):
        capture(module, (torch.rand(4, 8),))


def test_an_array_that_stays_as_it_is_is_captured() -> None:
    module = Net(lambda m, h: h * float(m.array[0]) + torch.from_numpy(m.array), array=np.full(8, 2, np.float32))
    assert_equal(step_of(view(module, torch.tensor(module.array), "buffer"), torch.rand(4, 8)), "single", 1)


def test_memory_of_what_is_not_trained_or_apart_is_shared_freely() -> None:
    module = Net(lambda m, h: h + m.shared)
    module.first.weight.requires_grad_(False)
    assert capture(view(module, module.first.weight.data[0], "attribute"), (torch.rand(4, 8),))
    one, two = torch.zeros(16).split(8)
    module = Net(lambda m, h: h * m.one + m.two, one=nn.Parameter(one), two=nn.Parameter(two))
    assert capture(module, (torch.rand(4, 8),))


class Rows(nn.Module):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, **options)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).pow(2).sum()


def test_rows_scaled_by_their_frequency_are_refused_and_sparse_gradients_are_dense() -> None:
    ids = torch.randint(0, 10, (4, 3))
    with pytest.raises(CaptureError, match=r"looks rows up with scale_grad_by_freq=True, which is not supported"):
        capture(Rows(scale_grad_by_freq=True), (ids,))
    assert_equal(step_of(Rows(sparse=True), ids))


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
    "pre": (hooked("pre"), rf"this SGD has hooks around the step \(.*{HERE}\), which a plan would"),
    "post": (hooked("post"), rf"this SGD has hooks around the step \(.*{HERE}\), which a plan would"),
    "all post": (
        lambda m, o: register_optimizer_step_post_hook(lambda *_: None), r"all optimizers have hooks around the step",
    ),
    "accumulated": (accumulating, r"1 gradient hooks would be lost, .* parameter first\.weight \(.*py:\d+"),
    "step": (replaced, r"the step of this SGD is replaced \(.*test_effects\.py:\d+\), which a plan would not run"),
    "class": (lambda m, o: Sgd(m.parameters()), r"Sgd is a class of its own over torch's SGD \(.*py:\d+\), whose"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), AROUND.values(), ids=AROUND)
def test_what_is_around_gradients_and_updates_is_refused(change: Callable[[Any, Any], Any], message: str) -> None:
    module = Net(plain)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    made = change(module, optimizer)
    try:
        with pytest.raises(CaptureError, match=message):
            ss.capture(module, (torch.rand(4, 8),), optimizer=made if isinstance(made, Sgd) else optimizer)
    finally:
        _global_optimizer_post_hooks.clear()


def test_a_schedule_of_the_learning_rate_is_no_change_of_the_step() -> None:
    module = Net(plain)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    assert ss.capture(module, (torch.rand(4, 8),), optimizer=optimizer)


class Scaled(nn.Linear):
    def __call__(self, x: Tensor, scale: float = 3.0) -> dict[str, Tensor]:
        return {"loss": super().__call__(x).mean() * scale}


def with_hooks() -> nn.Module:
    module = Net(plain)
    module.register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    module.register_forward_hook(lambda m, args, out: out * 2)
    return module


@pytest.mark.parametrize("build", [lambda: Scaled(8, 8), with_hooks], ids=["call", "hooks"])
def test_what_a_call_does_around_its_forward_is_captured(build: Callable[[], nn.Module]) -> None:
    module = build()
    kind, names = type(module), set(vars(module))
    assert_equal(step_of(module, torch.randn(4, 8)), "single", 1)
    assert (type(module), set(vars(module))) == (kind, names)
