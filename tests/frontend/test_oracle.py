"""The oracle runs the exported program; it must be the model, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from superscaler.frontend.capture import capture
from superscaler.frontend.oracle import reference_step
from tests.frontend.examples import gpt2, llama, tokens


@pytest.mark.parametrize("build", [gpt2, llama], ids=["gpt2", "llama"])
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
