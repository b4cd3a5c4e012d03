"""What cannot be captured ends with one sentence: the user's line, and what to write instead."""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import superscaler as ss
from superscaler.errors import CaptureError
from superscaler.frontend.capture import capture


class Wrong(nn.Module):
    """Runs one wrong function of itself, the input and a hidden layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        # Of the frames of an operator, torch records those of functions with this name.
        code = function.__code__.replace(co_name="forward")
        self.function = types.FunctionType(code, function.__globals__, "forward", None, function.__closure__)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.calls = 0
        self.seen: list[Tensor] = []
        self.cached: Tensor | None = None

    def forward(self, x: Tensor, extra: Any = None) -> object:
        return self.function(self, x, self.linear(x), extra)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


# The wrong thing is on the second line of each function.
def branch(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    if x.sum() > 0:
        return y.sum()
    return y.mean()


def item(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return y.sum() * x[0, 0].item()


def size(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return y.sum() + torch.zeros(int(extra.max())).sum()


def mask(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return y[x > 0].sum()


def nonzero(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return y.flatten()[torch.nonzero(x.flatten())].sum()


def casts_a_module(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    m.linear = m.linear.to(x.dtype)
    return m.linear(x).sum()


def with_numpy(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return y.sum() + float(np.tanh(x.numpy()).sum())


def device(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return (y + torch.ones(4, device="meta")).sum()


def random(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return (y * torch.poisson(torch.full((4,), 0.5))).sum()


def multinomial(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return y.sum() + torch.multinomial(torch.ones(4), 2).sum()


def cond(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sum, torch.mean, (y,))


def complex_numbers(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return torch.fft.fft(y).abs().sum()


def sparse(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return torch.sparse.mm(y.to_sparse(), torch.ones(4, 4)).sum()


def counter(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    m.calls += 1
    return y.sum() * m.calls


def memory(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    m.cached = y.detach() if m.cached is None else y.detach() + m.cached
    return (y * m.cached).sum()


def in_place(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    x.add_(1)
    return (x * y).sum()


def weight_in_place(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    m.linear.weight.detach().add_(1)
    return y.sum()


def gradient(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return torch.autograd.grad(y.sum(), m.linear.weight, create_graph=True)[0].square().sum()


def backward(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    y.sum().backward()
    return y.sum()


def hook(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    y.register_hook(lambda g: 2 * g)
    return y.sum()


def own_backward(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return Rounded.apply(y).sum()


def mixed_dtypes(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return torch.nn.functional.linear(y.double(), m.linear.weight).sum()


def attribute(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    return y.summ()


def missing_file(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
    Path("/no/such/file").read_text()
    return y.sum()


LINES = {
    branch: r"takes a Python value out of a tensor, and what runs depends on it; select with torch\.where",
    item: r"runs aten\.item\.default, which takes a Python number out of a tensor; keep it a tensor",
    size: r"a tensor as a size or an index; keep a fixed shape|takes a Python value out of a tensor",
    mask: r"runs aten\.index\.Tensor, whose result has as many elements as the data says; keep a fixed shape",
    nonzero: r"runs aten\.nonzero\.default, whose result has as many elements as the data says",
    casts_a_module: r"casts or moves a module, which changes its parameters; do it once before the step",
    with_numpy: r"calls numpy on a tensor, which no graph sees; use torch's own function",
    device: r"mixes tensors of two devices; create tensors with device=x\.device .* cpu and meta",
    random: r"draws random numbers by aten\.poisson\.default",
    multinomial: r"draws random numbers by aten\.multinomial\.default",
    cond: r"runs cond, which chooses at run time what is computed; compute both branches",
    complex_numbers: r"has fft_fft in complex numbers, which are not supported; compute with real ones",
    sparse: r"runs aten\.to_sparse\.default, whose result is sparse; use dense",
    counter: r"changes self\.calls in every call, which the captured step would not; pass such state in as an input",
    memory: r"changes self\.cached in every call",
    in_place: r"changes 1 parameters or inputs in place: x;",
    weight_in_place: r"changes 1 parameters or inputs in place: linear\.weight;",
    gradient: r"computes gradients inside the forward; return the loss only",
    backward: r"computes gradients inside the forward; return the loss only",
    hook: r"registers a gradient hook, which the captured step would not run",
    own_backward: r"uses Rounded, whose own backward is not its derivative and would not run; write it in",
    mixed_dtypes: r"multiplies tensors of float32 and float64 \(aten\.linear\.default\); torch wants one dtype",
    attribute: r"AttributeError: .*summ'",
    missing_file: r"FileNotFoundError: .*Run the module once on these arguments",
}


class Squared(torch.autograd.Function):
    """Its own backward is the derivative of its forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return scale * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2.0 * ctx.scale * x * gradient, None


def test_a_function_whose_backward_is_its_derivative_is_captured() -> None:
    module, x = Wrong(lambda m, x, y, e: Squared.apply(y, 3.0).sum()), torch.rand(4, 4)
    plan = ss.compile(
        ss.capture(module, (x,), optimizer=torch.optim.SGD(module.parameters(), lr=1e-2)), "data_parallel", "local:2"
    )
    assert plan.verify()["equal"]
    assert plan.verify()["loss"] == pytest.approx(float(module(x).detach()), rel=1e-5)  # type: ignore[attr-defined]


def test_a_refused_branch_prints_no_graph(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError):
        capture(Wrong(branch), (torch.rand(3, 4),))
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("function", LINES, ids=lambda f: f.__name__)
def test_a_wrong_line_is_named(function: Callable[..., Any]) -> None:
    line = inspect.getsourcelines(function)[1] + 1
    with pytest.raises(CaptureError) as raised:
        capture(Wrong(function), (torch.rand(3, 4), torch.tensor([1, 2])))
    message = str(raised.value)
    assert f"test_refusals.py:{line}" in message
    assert message.count("\n") == 0
    assert re.search(LINES[function], message), message


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda m, x, y, e: y, r"\(Wrong\.forward\) returns a loss of shape \(3, 4\) and dtype float32; it must be a"),
        (lambda m, x, y, e: {"logits": y}, r"returns dict without a loss; it must return a scalar loss, or"),
        (lambda m, x, y, e: None, r"returns NoneType without a loss"),
        (lambda m, x, y, e: y.sum().long(), r"shape \(\) and dtype int64"),
        (lambda m, x, y, e: y.detach().sum(), r"depends on none of the 4 parameters"),
        (lambda m, x, y, e: [m.seen.append(y), y.sum()][1], r"\(Wrong\.forward\) changes self\.seen in every call"),
        (
            lambda m, x, y, e: [e.append(1), y.sum()][1],
            r"\(Wrong\.forward\) changes the lists or dicts among its inputs",
        ),
    ],
)
def test_a_wrong_result_or_effect_is_said_of_the_forward(result: Callable[..., Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message) as raised:
        capture(Wrong(result), (torch.rand(3, 4), []))
    assert "loss depends" in str(raised.value) or "test_refusals.py:" in str(raised.value)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (torch.rand(3, 4), r"args is a Tensor and kwargs a dict, but a tuple and a dict are needed; write args=\(x,\)"),
        ((np.ones((3, 4)),), r"is given an input of type numpy\.ndarray; give tensors \(torch\.as_tensor"),
        ((torch.rand(3, 4), {1, 2}), r"is given an input of type set; give tensors"),
        ((torch.rand(3, 4).to_sparse(),), r"an example input of shape \(3, 4\) is sparse"),
        ((torch.rand(0, 4),), r"an example input has shape \(0, 4\)"),
    ],
)
def test_a_wrong_input_is_said(args: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Wrong(lambda m, x, y, e: y.sum()), args)


def test_hooks_on_gradients_are_refused() -> None:
    module = Wrong(lambda m, x, y, e: y.sum())
    handle = module.linear.weight.register_hook(lambda g: 2 * g)
    with pytest.raises(
        CaptureError, match=r"1 gradient hooks would be lost, the first that of parameter linear\.weight"
    ):
        capture(module, (torch.rand(3, 4),))
    handle.remove()
    module.linear.register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match=r"the first that of module linear"):
        capture(module, (torch.rand(3, 4),))


def test_an_attribute_that_settles_is_no_state() -> None:
    """A cache that is filled once, and a size that is noted, are the same in every later call."""

    def settling(m: Wrong, x: Tensor, y: Tensor, extra: Any) -> Tensor:
        m.calls = x.shape[0]
        if m.cached is None:
            m.cached = torch.arange(4.0)
        return (y * m.cached).sum()

    module = Wrong(settling)
    ops = [op.target for op in capture(module, (torch.rand(3, 4),)).model.ops if op.is_forward]
    assert ops == ["aten.linear.default", "aten.add.Tensor", "aten.mul.Tensor", "aten.sum.default"]


def test_torch_is_left_as_it_was() -> None:
    before = [torch.Tensor.register_hook, nn.Module.__setattr__, torch.autograd._engine_run_backward]
    with pytest.raises(CaptureError):
        capture(Wrong(hook), (torch.rand(3, 4),))
    assert [torch.Tensor.register_hook, nn.Module.__setattr__, torch.autograd._engine_run_backward] == before
    x = torch.rand(3, requires_grad=True)
    (Rounded.apply(x) + checkpoint(torch.tanh, x, use_reentrant=True)).sum().backward()
    assert x.grad is not None
