"""The oracle runs the exported program; it must be the model, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from superscaler.frontend.capture import capture
from superscaler.frontend.oracle import reference_step
from tests.frontend.examples import Block, gpt2, llama, tokens


@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
def test_equals_eager_bit_for_bit(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, batch = build(), tokens()
    captured = capture(module, (), batch)
    loss, gradients, *_ = reference_step(captured, batch, captured.values)
    expected = module(**batch).loss
    expected.backward()
    assert torch.equal(loss, expected)
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


def test_dropout_off_equals_evaluation() -> None:
    torch.manual_seed(0)
    module, batch = gpt2(dropout=0.1), tokens()
    captured = capture(module, (), batch)
    loss, *_ = reference_step(captured, batch, captured.values)
    assert torch.equal(loss, module.eval()(**batch).loss)
    assert not torch.equal(loss, module.train()(**batch).loss)


def test_retypes_casts_and_factories() -> None:
    torch.manual_seed(0)
    module, batch = llama(), tokens()
    captured = capture(module, (), batch)
    loss, gradients, *_ = reference_step(captured, batch, captured.values, torch.float64)
    assert loss.dtype == torch.float64
    assert {g.dtype for g in gradients.values()} == {torch.float64}
    single, *_ = reference_step(captured, batch, captured.values)
    torch.testing.assert_close(loss.float(), single)


def test_meta_capture_runs_on_given_values() -> None:
    torch.manual_seed(0)
    module, batch = gpt2(), tokens()
    with torch.device("meta"):
        captured = capture(gpt2(), (), batch)
    values = {name: p.detach() for name, p in module.named_parameters()}
    loss, gradients, *_ = reference_step(captured, batch, values)
    assert torch.equal(loss, module(**batch).loss)
    assert set(gradients) == set(values)


def test_follows_other_values_and_batches() -> None:
    torch.manual_seed(0)
    module = Block()
    ids, labels = torch.randint(0, 20, (4, 6)), torch.randint(0, 6, (4, 6))
    captured = capture(module, (ids, labels))
    with torch.no_grad():
        module.head.weight.mul_(2)
    values = {**captured.values, "head.weight": module.head.weight.detach()}
    batch = {"ids": ids.flip(0), "labels": labels}
    loss, *_ = reference_step(captured, batch, values)
    assert torch.equal(loss, module(ids.flip(0), labels)["loss"])
