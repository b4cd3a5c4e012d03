"""The user's own module as the oracle: what capture gets wrong is found, and what it gets right is no alarm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import superscaler as ss
from superscaler.frontend.base import training
from superscaler.frontend.base.oracle import reference_step
from superscaler.frontend.capture import capture
from superscaler.runtime import optimizer
from superscaler.verify.eager import Eager, _grouped
from tests.frontend.examples import Net, gpt2, llama, tokens
from tests.helpers.graphs import assert_equal, step_of
from tests.helpers.ran import Around, equal
from tests.helpers.sweeps import slow


def verified(module: nn.Module, plan: str = "data_parallel", cluster: str = "local:2") -> dict[str, Any]:
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return ss.compile(ss.capture(module, (torch.randn(4, 8),), optimizer=optimizer), plan, cluster).verify()


def numbers(m: Any, h: Tensor) -> Tensor:
    """Casts, constants of another dtype, a quotient of integers, numbers that are none, the smallest number."""
    return (
        h * (m.table / 3).cos().half().float()
        + (h.bfloat16().float() + h.to(torch.bfloat16).type(torch.float32)) / 2
        + h * (h > 0).long().sum(-1, keepdim=True) / 3
        + torch.zeros(4, 8).index_copy(0, torch.arange(4), h)
        + torch.nan_to_num(h.masked_fill(h > 0, float("nan")))
        + h.masked_fill(h > 0, torch.finfo(h.dtype).min).softmax(-1)
    )


def dropouts(m: Any, h: Tensor) -> Tensor:
    """Of elements, of channels, in place, inside of attention and of its module."""
    fused = F.scaled_dot_product_attention(h[None], h[None], h[None], dropout_p=0.5)[0]
    found = F.dropout(fused, 0.5) + F.dropout(h * 2, 0.5, inplace=True) + m.attention(h[None], h[None], h[None])[0][0]
    return found + F.dropout2d(h[..., None], 0.5)[..., 0] + F.dropout1d(h, 0.5, inplace=True)


def drawn(m: Any, h: Tensor) -> Tensor:
    path = h + m.first(h) * h.new_empty(4, 1).bernoulli_(0.5).div_(0.5)
    return path * torch.rand_like(h) + torch.bernoulli(torch.full((8,), 0.5))


def filled(m: Any, h: Tensor) -> Tensor:
    """Numbers in the dtype of a tensor, and what is written to a view of such ones."""
    written = h.new_full((4, 8), 0.3)
    written.view(-1)[:8] = h[0]
    smooth = F.binary_cross_entropy_with_logits(h, torch.full_like(h, 0.9) - torch.zeros_like(h[0]).add(0.1))
    return written * h + torch.ones_like(h) * 0.7 + h.new_tensor([0.1, 0.2] * 4) * smooth


def counted(m: Any, h: Tensor) -> Tensor:
    """Floats that are made of integers alone."""
    signs = (h > 0).long()
    return h / (signs.sum(-1, keepdim=True) + 2.0) + h @ (signs / 3.0).t() @ h + h * (1 / (signs + 0.7))


RIGHT = {
    "counted": counted,
    "filled": filled,
    "numbers": numbers,
    "dropout": dropouts,
    "random numbers": drawn,
    "slopes that are not drawn": lambda m, h: F.rrelu(F.rrelu(h, 0.1, 0.5).clone(), training=False, inplace=True),
    "a distribution": lambda m, h: h * torch.distributions.Normal(h, h.exp()).log_prob(m.table.sum()),
    "written buffer": lambda m, h: m.norm(h),
}


@pytest.mark.parametrize("between", RIGHT.values(), ids=RIGHT)
def test_a_right_capture_equals_its_module(between: Callable[[Any, Tensor], Tensor]) -> None:
    module = Net(between, attention=nn.MultiheadAttention(8, 2, dropout=0.5))
    assert assert_equal(step_of(module, torch.randn(4, 8)))["note"] == ""


def rounded(m: Any, h: Tensor) -> Tensor:
    """Constants and weights in a product, a sum in float32, what is written to, halves of its own."""
    return (
        F.linear(m.table, m.last.weight * m.norm.weight)
        + h * (m.table[:, None] @ m.table[None]).sum(0)
        + F.layer_norm(h + m.table, (8,), m.table)
        + m.first(torch.zeros(4, 8).add_(m.table).mul_(h))
        + F.linear(m.table.half().float(), m.first.weight, m.first.bias)
    )


def test_layers_with_two_names_keep_their_weights() -> None:
    """One linear is in the module twice, and another one has its weight."""
    first, second, norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
    second.weight = first.weight
    module = Around(
        lambda m, x: m.layers(x).square().mean(), layers=nn.Sequential(first, norm, nn.Tanh(), second, first)
    )
    before = [(x, x.detach().clone()) for x in (*module.parameters(), *module.buffers())]
    assert verified(module)["module_compared"]
    after = [*module.parameters(), *module.buffers()]
    assert all(x is own and torch.equal(x, old) for x, (own, old) in zip(after, before, strict=True))


def test_autocast_rounds_what_is_part_of_the_model() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        result = verified(Net(rounded))
    assert result["reference"] == "eager"
    assert result["equal"], result


@pytest.mark.parametrize("dropout", [F.alpha_dropout, F.feature_alpha_dropout])
def test_what_torch_draws_for_a_dropout_is_left_to_the_export(dropout: Callable[..., Tensor]) -> None:
    result = verified(Net(lambda m, h: dropout(h, 0.5, training=True)))
    assert (result["equal"], result["reference"]) == (True, "export")
    assert result["note"] == f"it draws random numbers by {dropout.__name__}"


def test_rows_of_experts_multiply_as_in_torchs_kernel() -> None:
    x, weights, ends = torch.randn(8, 16), torch.randn(3, 16, 16), torch.tensor([3, 3, 8], dtype=torch.int32)
    torch.testing.assert_close(_grouped(x, weights, offs=ends), F.grouped_mm(x, weights, offs=ends))
    assert _grouped(x, weights, offs=ends - 2).shape == (8, 16)


def test_noise_of_a_true_zero_is_no_error_under_adam() -> None:
    """The bias before a batch norm has no effect: its gradient is rounding, of which AdamW makes whole steps."""
    result = verified(Net(lambda m, h: m.norm(h).relu()))
    assert result["equal"]
    assert result["parameter_error"] <= 1e-15


class Nothing(nn.Linear):
    """Its loss, or all of its gradients, are zero but for rounding."""

    def __init__(self, loss: Callable[[Tensor], Tensor]) -> None:
        super().__init__(8, 4)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(super().forward(x))


@pytest.mark.parametrize(
    "loss",
    [
        lambda y: F.kl_div(y.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
        lambda y: y.softmax(-1).sum(),
        lambda y: (y - y.mean(-1, keepdim=True)).mean(),
        lambda y: (y * 0).sum(),
    ],
)
def test_a_loss_that_is_truly_zero_is_equal(loss: Callable[[Tensor], Tensor]) -> None:
    assert verified(Nothing(loss), "gradient_accumulation:microbatches=2")["equal"]


def test_a_loss_that_is_only_small_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Nothing(lambda y: y.square().mean() * 1e-20)
    assert verified(module)["equal"]
    run = Eager.step

    def wrong(self: Eager, *given: Any) -> Any:
        found = run(self, *given)
        return found._replace(gradients={n: g * (1 + 1e-6) for n, g in found.gradients.items()})

    monkeypatch.setattr(Eager, "step", wrong)
    result = verified(module)
    assert result["gradient_error"] > 5e-7
    assert result["loss_error"] < 1e-12


@pytest.mark.parametrize("size", [1e12, float("inf")])
def test_a_huge_buffer_hides_no_error_and_is_none(size: float) -> None:
    def huge(m: Any, h: Tensor) -> Tensor:
        m.seen.copy_(m.seen * 0 + size)
        return h

    assert verified(Net(huge), "single", "local:1")["equal"]
    module = Net(huge)
    graph = step_of(module, torch.randn(4, 8))
    first = module.first.weight.detach().clone()
    graph.captured.call.module.between = lambda m, h: huge(m, h) * (1 + 1e-7)
    assert not ss.compile(graph, "single", "local:1").verify()["equal"]
    assert torch.equal(module.first.weight, first)


WRONG: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "number": (lambda m, h: h * 1.001, "the loss of the step, is off by"),
    "gradient": (lambda m, h: h.detach() + h - h.detach() * 1.0 + (h - h.detach()) * 0.5, "the gradient of first"),
    "buffer": (lambda m, h: h + 0 * m.seen.add_(1), "seen, a buffer that the module changes, is off"),
}


@pytest.mark.parametrize(("other", "message"), WRONG.values(), ids=WRONG)
def test_what_capture_gets_wrong_is_its_fault(other: Callable[[Any, Tensor], Tensor], message: str) -> None:
    """The module does another thing than what was captured; the plan equals the graph, and it says so."""
    graph = step_of(Net(lambda m, h: h), torch.randn(4, 8))
    plan = ss.compile(graph, "data_parallel", "local:2")
    assert plan.verify()["equal"]
    graph.captured.call.module.between = other
    result = plan.verify()
    assert not result["equal"]
    assert result["first_difference"].startswith("the captured graph is not the module: ")
    assert message in result["first_difference"]
    assert result["first_difference"].endswith("; the plan equals the graph")


def forgotten(patch: pytest.MonkeyPatch) -> None:
    """Capture and the ranks leave out an option that only the constructor reads."""
    patch.setattr(training, "CONSTRUCTED", ())
    patch.setattr(optimizer, "CONSTRUCTED", ())


def of_one_group(patch: pytest.MonkeyPatch) -> None:
    """All parameters have the options of the first group."""
    plain = training._options
    patch.setattr(training, "_options", lambda kind, group: plain(kind, {**group, "lr": 0.1}))


@pytest.mark.parametrize("fault", [None, forgotten, of_one_group])
def test_the_reference_has_the_users_optimizer(
    fault: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault is not None:
        fault(monkeypatch)
    module = Net(lambda m, h: h)
    groups: Any = [{"params": [p], "lr": 0.1 / (k + 1)} for k, p in enumerate(module.parameters())]
    graph = step_of(module, torch.randn(4, 8), optimizer=torch.optim.Adagrad(groups, initial_accumulator_value=0.3))
    found = ss.compile(graph, "data_parallel", "local:2").verify()
    assert found["equal"] == (fault is None)
    assert found["first_difference"].startswith("after its update " if fault else "")


def test_a_module_without_data_is_compared_with_its_export() -> None:
    with torch.device("meta"):
        module = gpt2(layers=1)
    found = equal(step_of(module, kwargs=tokens()), "single", 1).found
    assert found["reference"] == "export"
    assert found["note"] == "the module has no data (it was built on the meta device)"


def test_both_oracles_agree() -> None:
    module = llama().bfloat16()
    captured = step_of(module, kwargs=tokens()).captured
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    wide = {name: value.double() if value.is_floating_point() else value for name, value in captured.values.items()}
    one = Eager(captured, captured.batch).step(wide, lambda name, shape: torch.rand(shape))
    other = reference_step(captured, captured.batch, wide, torch.float64)
    torch.testing.assert_close(one.loss, other.loss, rtol=1e-12, atol=0)
    for name, gradient in other.gradients.items():
        torch.testing.assert_close(one.gradients[name], gradient, rtol=1e-9, atol=1e-12, msg=name)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())
    assert torch.get_default_dtype() == torch.float32


def test_modes_of_submodules_are_those_of_the_capture() -> None:
    module = Net(lambda m, h: m.norm(h))
    module.norm.eval()
    graph = step_of(module, torch.randn(4, 8))
    module.eval()
    module.norm.train()
    assert_equal(graph, "single", 1)
    wrong = replace(graph.captured.call, training=tuple(m.training for m in module.modules()))
    graph.captured = replace(graph.captured, call=wrong)
    assert not ss.compile(graph, "single", "local:1").verify()["equal"]


@pytest.mark.parametrize("build", [gpt2, *slow(llama)], ids=["gpt2", "llama"])
def test_equals_eager_bit_for_bit_and_is_retyped(build: type[nn.Module]) -> None:
    module, batch = build(), tokens()
    captured = capture(module, (), batch)
    loss, gradients, *_ = reference_step(captured, batch, captured.values)
    expected = module(**batch).loss
    expected.backward()
    assert torch.equal(loss, expected)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
    wide, gradients, *_ = reference_step(captured, batch, captured.values, torch.float64)
    assert {wide.dtype, *(g.dtype for g in gradients.values())} == {torch.float64}
    torch.testing.assert_close(wide.float(), loss)


def test_dropout_off_equals_evaluation() -> None:
    module, batch = gpt2(dropout=0.1), tokens()
    captured = capture(module, (), batch)
    loss, *_ = reference_step(captured, batch, captured.values)
    assert torch.equal(loss, module.eval()(**batch).loss)
    assert not torch.equal(loss, module.train()(**batch).loss)


def test_follows_other_values_and_batches_of_a_capture_without_data() -> None:
    module, batch = gpt2(), tokens()
    with torch.device("meta"):
        captured = capture(gpt2(), (), batch)
    batch = {"input_ids": batch["input_ids"].flip(0), "labels": batch["labels"]}
    values = {name: p.detach() for name, p in module.named_parameters()}
    loss, gradients, *_ = reference_step(captured, batch, values)
    assert torch.equal(loss, module(**batch).loss)
    assert set(gradients) == set(values)
