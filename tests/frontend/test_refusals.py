"""What cannot be captured ends with one sentence: the user's line, and what to write instead."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from superscaler.errors import CaptureError
from superscaler.frontend.capture import capture
from tests.helpers.graphs import assert_equal, step_of


class Wrong(nn.Module):
    """Runs one wrong function of itself, the input and a hidden layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
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


# The line of a forward that is wrong, with the module m, its input x, its layer's result y and another input, and what
# is said of it.
LINES = {
    "y = y if x.sum() > 0 else -y":
        r"takes a Python value out of a tensor, and what runs depends on it; select with torch\.where",
    "y = torch.cov(y)": r"compares the values of tensors, as .* torch\.cov .*; .* a covariance of rows is x @ x\.T /",
    "y = torch.corrcoef(y)": r"compares the values of tensors, as .* torch\.corrcoef do",
    "y = torch.nn.functional.gaussian_nll_loss(y, y * 0.5, y.exp())":
        r"calls gaussian_nll_loss, which looks at the values of its variances; write its formula: \(0\.5 \* \(var",
    "y = y * x[0, 0].item()": r"runs aten\.item\.default, which takes a Python number out of a tensor",
    "y = y * x[0][x.argmax()]": r"out of a tensor; keep it a tensor .*table\[k\[None\]\] in place of table\[k\]",
    "y = y + torch.zeros(int(extra.max())).sum()":
        r"a tensor as a size or an index; keep a fixed shape|takes a Python value out of a tensor",
    "y = y[x > 0]":
        r"picks elements by a mask .* as x\[mask\] does, whose result has as many .*; keep a fixed shape: use torch",
    "y = torch.masked_select(y, x > 0)": r"picks elements by a mask \(torch\.masked_select\), whose result has as many",
    "y = y[torch.nonzero(x[:, 0])[:, 0]]": r"asks where elements are not 0 \(torch\.nonzero, ",
    "y = torch.nn.utils.rnn.pack_padded_sequence(y[None], extra[:1]).data":
        r"packs sequences by their lengths, .*; run the layer on the padded sequences, with labels to ignore",
    "m.linear = m.linear.to(x.dtype)":
        r"casts or moves a module, which changes its parameters; do it once before the step",
    "y = y + float(np.tanh(x.numpy()).sum())": r"calls numpy on a tensor, which no graph sees; use torch's own",
    "y = y + torch.ones(4, device='meta')":
        r"mixes tensors of two devices; create tensors with device=x\.device .* cpu and meta",
    "y = y * torch.poisson(torch.full((4,), 0.5))": r"draws random numbers by aten\.poisson\.default",
    "y = y * torch.native_dropout(y, 0.5, True)[1]":
        r"reads result 1 of aten\.native_dropout\.default, which is not captured; for a mask, apply dropout",
    "y = y.t().as_strided((4, 3), (3, 1))":
        r"calls as_strided on a tensor whose elements do not lie in order, .*; give it x\.contiguous\(\)",
    "y = y[:2].as_strided((3, 4), (4, 1))": r"calls as_strided on a tensor whose elements .*, or reads beyond it",
    "y = y[:2].as_strided((2, 4), (4, 1), 4)": r"calls as_strided on a tensor whose elements do not lie in order",
    "y = y * y.view(torch.int32)": r"reads the bits of floating-point numbers as another dtype",
    "y = torch.cond(x.sum() > 0, torch.sum, torch.mean, (y,))":
        r"runs cond, which chooses at run time what is computed; compute both branches",
    "y = torch.fft.fft(y).abs()": r"has fft_fft in complex numbers, which are not supported; compute with real ones",
    "y = torch.sparse.mm(y.to_sparse(), torch.ones(4, 4))":
        r"runs aten\.to_sparse\.default, whose result is sparse; use dense",
    "m.calls += 1":
        r"changes self\.calls in every call, which the captured step would not; pass such state in as an input",
    "m.cached = y.detach() if m.cached is None else y.detach() + m.cached": r"changes self\.cached in every call",
    "x.add_(1)": r"changes 1 parameters or inputs in place: x;",
    "m.linear.weight.detach().add_(1)": r"changes 1 parameters or inputs in place: linear\.weight;",
    "y = torch.autograd.grad(y.sum(), m.linear.weight, create_graph=True)[0]":
        r"computes gradients inside the forward, as of forces .*; write these gradients as operators, or",
    "y.sum().backward()": r"runs a backward inside the forward; return the loss only: the captured step has its own",
    "y.register_hook(lambda g: 2 * g)": r"registers a gradient hook, which the captured step would not run",
    "y = Rounded.apply(y)": r"uses Rounded, whose own backward is not its derivative and would not run; write it in",
    "y = torch.nn.functional.linear(y.double(), m.linear.weight)":
        r"multiplies tensors of float32 and float64 \(aten\.linear\.default\); torch wants one dtype",
    "y = y.summ()": r"AttributeError: .*summ'",
    "Path('/no/such/file').read_text()": r"FileNotFoundError: .*Run the module once on these arguments",
}  # fmt: skip


def forward_with(line: str, folder: Path) -> Callable[..., Any]:
    """Return a forward of a file, whose second line this is."""
    file = folder / "wrong.py"
    file.write_text(f"def forward(m, x, y, extra):\n    {line}\n    return y.sum()\n")
    scope: dict[str, Any] = {"torch": torch, "np": np, "Path": Path, "Rounded": Rounded}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    return scope["forward"]


@pytest.mark.parametrize("line", LINES)
def test_a_wrong_line_is_named(line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError) as raised:
        capture(Wrong(forward_with(line, tmp_path)), (torch.rand(3, 4), torch.tensor([1, 2])))
    message = str(raised.value)
    assert "wrong.py:2" in message
    assert message.count("\n") == 0
    assert re.search(LINES[line], message), message
    if " if x.sum() > 0" in line:
        assert capfd.readouterr() == ("", ""), "torch prints the graph of a branch"


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "change", [nn.utils.weight_norm, nn.utils.spectral_norm, partial(prune.l1_unstructured, amount=2)]
)
def test_a_weight_that_a_hook_sets_is_refused_with_the_parametrization(change: Callable[..., nn.Module]) -> None:
    module = nn.Sequential(change(nn.Linear(4, 4), name="weight"), nn.Flatten(0))
    with pytest.raises(CaptureError, match=r"^0 has torch\.nn\.utils\..* sets weight in every .* a parametrization:"):
        capture(module, (torch.rand(3, 4),))


def test_a_batch_norm_without_a_momentum_is_refused_in_training_only() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None), nn.Flatten(0))
    with pytest.raises(CaptureError, match=r"^1 is a BatchNorm1d with momentum=None, .* as BatchNorm1d\(\.\.\., mome"):
        capture(module, (torch.rand(3, 4),), is_trained=False, is_kept=True)
    capture(module.eval(), (torch.rand(3, 4),), is_trained=False, is_kept=True)


ADVISED: dict[str, Callable[..., Tensor]] = {
    "select": lambda m, x, y, e: torch.where(x > 0, y, 0).sum(),
    "mean": lambda m, x, y, e: (y.square() * (x > 0)).sum() / (x > 0).sum(),
    "labels": lambda m, x, y, e: nn.functional.cross_entropy(y, torch.where(x[:, 0] > 0.5, 1, -100)),
    "forces": lambda m, x, y, e: (2 * y @ m.linear.weight).square().mean(),
}


@pytest.mark.parametrize("function", ADVISED.values(), ids=ADVISED)
def test_what_refusals_advise_is_captured(function: Callable[..., Tensor]) -> None:
    assert_equal(step_of(Wrong(function), torch.tensor([[0.9, -1.0, 2.0, 0.1], [-0.3, 0.2, -5.0, 0.5]])), "single", 1)


class Turned(torch.autograd.Function):
    """A rotary embedding: its backward gives no gradients of the angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return x * cos + x.flip(-1) * sin

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return gradient * cos + (gradient * sin).flip(-1), None, None


class Projected(torch.autograd.Function):
    """A product with a weight that is not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient @ ctx.saved_tensors[0], None


def test_a_function_without_gradients_of_what_wants_none_is_captured() -> None:
    def turned(m: Any, x: Tensor, y: Tensor, extra: Any) -> Tensor:
        return Projected.apply(Turned.apply(y, m.cos, m.sin), m.frozen).square().mean()

    module = Wrong(turned)
    module.cos, module.sin = nn.Buffer(torch.rand(4)), nn.Buffer(torch.rand(4))
    module.frozen = nn.Parameter(torch.randn(4, 4), requires_grad=False)
    assert_equal(step_of(module, torch.rand(4, 4)), "single", 1)
    module.frozen.requires_grad_()
    with pytest.raises(CaptureError, match="uses Projected, whose own backward is not its derivative"):
        step_of(module, torch.rand(4, 4))


def test_checks_of_values_in_models_of_transformers_are_left_out_for_the_capture(monkeypatch: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.utils.import_utils import torch_compilable_check

    monkeypatch.delenv("TRANSFORMERS_DISABLE_TORCH_CHECK", raising=False)

    def checked(m: Any, x: Tensor, y: Tensor, extra: Any) -> Tensor:
        torch_compilable_check((x > 0).all(), "an input is not above 0")
        return y.square().mean()

    assert transformers.__version__
    assert_equal(step_of(Wrong(checked), torch.rand(4, 4) + 1), "single", 1)
    assert "TRANSFORMERS_DISABLE_TORCH_CHECK" not in os.environ
    with pytest.raises(ValueError, match="not above 0"):
        Wrong(checked)(torch.zeros(4, 4))


@pytest.mark.slow
def test_a_model_of_images_and_text_is_captured() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=28, patch_size=14, projection_dim=32),
        text_config=transformers.LlamaConfig(**sizes, vocab_size=64, use_cache=False, pad_token_id=0),
        image_token_index=63,
        image_seq_length=4,
    )
    ids = torch.randint(1, 60, (2, 16))
    ids[:, 2:6] = 63
    batch = {"input_ids": ids, "pixel_values": torch.randn(2, 3, 28, 28), "labels": ids.where(ids != 63, -100)}
    assert_equal(step_of(transformers.LlavaForConditionalGeneration(config).train(), kwargs=batch))


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
    assert_equal(step_of(Wrong(lambda m, x, y, e: Squared.apply(y, 3.0).sum()), torch.rand(4, 4)))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda m, x, y, e: y, r"\(Wrong\.forward\) returns a loss of shape \(3, 4\) and dtype float32; it must be a"),
        (lambda m, x, y, e: {"logits": y}, r"returns dict without a loss; it must return a scalar loss, a tuple"),
        (lambda m, x, y, e: None, r"returns NoneType without a loss"),
        (lambda m, x, y, e: (y.sum(), y.mean(), y), r"returns tuple without a loss; it must return .*one scalar"),
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


@pytest.mark.parametrize("keys", [("a.b", "a"), (1, "1")])
def test_results_of_one_name_are_refused(keys: tuple[Any, Any]) -> None:
    """A step would return one of them at both places."""
    results = Wrong(lambda m, x, y, e: {keys[0]: y, keys[1]: {"b": 2 * y} if keys[1] == "a" else 2 * y})
    with pytest.raises(CaptureError, match=r"returns two results at (a\.b|1); give them keys that differ as text"):
        capture(results, (torch.rand(3, 4),), is_trained=False, is_kept=True)


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


def test_a_scripted_module_is_refused_by_name() -> None:
    module = Wrong(lambda m, x, y, e: y.sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module.linear = torch.jit.script(module.linear)
    with pytest.raises(CaptureError, match=r"linear is a torch\.jit\.ScriptModule, .* give the module of which torch"):
        capture(module, (torch.rand(3, 4),))


def test_a_buffer_that_changes_under_two_names_is_named() -> None:
    module = Wrong(lambda m, x, y, extra: m.norm(m.again(y)).sum())
    module.again = module.norm
    with pytest.raises(CaptureError, match=r"norm\.running_mean of Wrong, which is also its again\.running_mean, and "):
        step_of(module, torch.randn(4, 4))
    module.norm.eval()
    assert_equal(step_of(module, torch.randn(4, 4)), "single", 1)


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
        capture(Wrong(lambda m, x, y, e: y.register_hook(torch.neg)), (torch.rand(3, 4),))
    assert [torch.Tensor.register_hook, nn.Module.__setattr__, torch.autograd._engine_run_backward] == before
    x = torch.rand(3, requires_grad=True)
    (Rounded.apply(x) + checkpoint(torch.tanh, x, use_reentrant=True)).sum().backward()
    assert x.grad is not None
