"""Steps in the dtype that is trained: what is wrong there and right in float64 is found, and rounding is allowed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import superscaler as ss
from superscaler.runtime import optimizer
from superscaler.runtime.compiled.in_parts import InParts
from superscaler.runtime.updates import Pairs, Updates
from tests.helpers.graphs import step_of
from tests.helpers.sweeps import slow


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 48), nn.LayerNorm(48), nn.Linear(48, 8, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        # A scalar has a dim to sum along, too.
        return nn.functional.cross_entropy(self.last(self.norm(self.first(x).tanh())), y).sum(0)


def fused_halves(patch: pytest.MonkeyPatch) -> None:
    """Torch's fused SGD of halves is wrong on the CPU."""
    patch.setattr(optimizer, "is_plain", lambda *_: True)


def rounded_gradients(patch: pytest.MonkeyPatch) -> None:
    """A gradient in float32 has lost the digits that bfloat16 has not."""
    apply = Updates.apply

    def changed(self: Updates, pairs: Pairs) -> None:
        apply(self, [(name, g.bfloat16().float() if g.dtype == torch.float32 else g) for name, g in pairs])

    patch.setattr(Updates, "apply", changed)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """Nothing is wrong."""


@pytest.mark.parametrize(
    ("plan", "dtype", "fault", "where"),
    [
        *slow(("data_parallel", torch.float32, nothing, "")),
        ("tensor_parallel", torch.bfloat16, nothing, ""),
        ("data_parallel", torch.bfloat16, fused_halves, "in bfloat16, after its update first.weight"),
        ("tensor_parallel", torch.float32, rounded_gradients, "in float32, the gradient of "),
    ],
)
def test_faults_of_one_dtype_are_found(
    plan: str,
    dtype: torch.dtype,
    fault: Callable[[pytest.MonkeyPatch], None],
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = step_of(Three().to(dtype), torch.randn(8, 16, dtype=dtype), torch.arange(8), check=False)
    fault(monkeypatch)
    found = ss.compile(graph, plan, "local:2").verify()
    assert found["parameter_error"] < 1e-12
    assert found["trained_dtype"] == str(dtype).removeprefix("torch.")
    assert found["first_difference"][: len(where) or None] == where
    assert found["equal"] == (not where) == (found["trained_error"] <= found["trained_allowed"])


class Canceling(Three):
    """Three losses that cancel but for a small difference: a plan adds them up on each device, and torch whole ones."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.last(self.norm(self.first(x)).tanh())
        return h.square().sum() - 2 * (h * h.detach()).sum() + h.detach().square().sum() * 1.0001


@pytest.mark.parametrize("seed", [3, *slow(6)])
def test_rounding_of_losses_that_cancel_is_no_difference(seed: int) -> None:
    torch.manual_seed(seed)
    found = ss.compile(
        step_of(Canceling(), torch.randn(4096, 16), torch.arange(8), check=False), "data_parallel", "local:4"
    ).verify()
    assert found["equal"], found
    assert found["trained_allowed"] < 1e-2


def test_a_forward_derivative_is_computed_with_other_rounding() -> None:
    layer, x = nn.Linear(6, 6), torch.randn(8, 6)
    with InParts(2):
        _, tangent = torch.func.jvp(lambda rows: layer(rows).tanh(), (x,), (torch.ones_like(x),))
    assert tangent.isfinite().all()


def test_rounding_is_measured_of_a_module_that_copies_infinite_numbers() -> None:
    mask = torch.full((16, 16), -torch.inf).triu(1)
    with InParts(2):
        assert torch.equal(torch.cat([mask, mask.clone()]), torch.cat([mask] * 2))
