"""Decompositions are plain torch functions: on tensors with data they give what the operator gives. Backwards that
users wrote: those that differ from the derivative somewhere are found, right ones are believed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from superscaler.frontend.base.samples import is_derivative
from superscaler.frontend.rewrites.decompositions import TABLE

_ATEN = torch.ops.aten
X, W = (torch.linspace(-2, 3, n, dtype=torch.float64).sin().reshape(-1, 4) for n in (24, 16))
B = W[0] + 1
MEAN, VARIANCE, IMAGE = torch.zeros(4).double(), torch.ones(4).double(), X.reshape(2, 4, 3)
CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (_ATEN.linear.default, (X, W, B)),
    (_ATEN.addmm.default, (B, X, W)),
    (_ATEN.slice.Tensor, (X, 0, 1, None, 2)),
    (_ATEN.slice.Tensor, (X, -2, -5, 6, 3)),
    (_ATEN.squeeze.dims, (X[:, :1, None], [-1, 0])),
    (_ATEN.copy.default, (X, B.float())),
    (_ATEN.cat.default, ([X, X[:, :0], X], 1)),
    (_ATEN.index_put.default, (X, [X[:, 0] > 0], B)),
    (_ATEN.rrelu.default, (X, 0.1, 0.4)),
    (_ATEN.rrelu_with_noise_functional.default, (X, X, 0.1, 0.4, False)),
    (_ATEN.huber_loss.default, (X, X * 2, 1, 0.5)),
    (_ATEN.huber_loss.default, (X, X[:, :1], 2)),
    (_ATEN.hinge_embedding_loss.default, (X, X.sign(), 0.1)),
    (_ATEN._native_batch_norm_legit_functional.default, (IMAGE, B, B, MEAN, VARIANCE, True, 0.1, 1e-5)),
    (_ATEN._native_batch_norm_legit_no_training.default, (IMAGE, B, B, MEAN, VARIANCE, 0.1, 1e-5)),
]


@pytest.mark.parametrize(("operator", "args"), CALLS, ids=[str(operator) for operator, _ in CALLS])
def test_a_decomposition_gives_what_its_operator_gives(operator: Any, args: tuple[Any, ...]) -> None:
    found, expected = ([x] if isinstance(x, Tensor) else x for x in (TABLE[str(operator)](*args), operator(*args)))
    for one, other in zip(found, expected, strict=False):
        if one is not None:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("aten.linear.default", (X, W)),
        ("aten.slice.Tensor", (X, 0, 0, None, 4)),
        ("aten.slice.Tensor", (X, 0, 1, 3, 2)),
        ("aten.cat.default", ([X, X],)),
        ("aten.index_put.default", (X, [X > 0], B)),
        ("aten.huber_loss.default", (X, X, 2)),
    ],
)
def test_a_call_without_a_decomposition_stays(target: str, args: tuple[Any, ...]) -> None:
    assert TABLE[target](*args) is NotImplemented


Backward = Callable[..., Tensor]
FLOATS = (torch.randn(4, 6),)
PICKS = (torch.randn(4, 6), torch.tensor([1, 2, 0, 3]))


def times_two(x: Tensor, *_: Any) -> Tensor:
    return x * 2


def above_zero(x: Tensor) -> Tensor:
    """Return x where it is not negative; the gradient at 0 is 1, as that of `clamp` was before torch 2.15."""
    return torch.where(x >= 0, x, 0.0)


def picked(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


def scattered(g: Tensor, x: Tensor, rows: Tensor) -> Tensor:
    return torch.zeros_like(x).index_add(0, rows, g)


def normed(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def of_normed(g: Tensor, x: Tensor) -> Tensor:
    scale = (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return g * scale - x * scale**3 * (g * x).mean(-1, keepdim=True)


# forward, backward (gradient, arguments -> gradient of the first), arguments, whether it is right
CASES: dict[str, tuple[Callable[..., Tensor], Backward, tuple[Any, ...], bool]] = {
    "everywhere": (times_two, lambda g, x: g * 2, FLOATS, True),
    "relu": (above_zero, lambda g, x: g * (x >= 0), FLOATS, True),
    "sigmoid": (torch.sigmoid, lambda g, x: g * x.sigmoid() * (1 - x.sigmoid()), FLOATS, True),
    "norm": (normed, of_normed, FLOATS, True),
    "rows": (picked, scattered, PICKS, True),
    "not at 0": (above_zero, lambda g, x: g * (x > 0), FLOATS, False),
    "not of large numbers": (times_two, lambda g, x: g * 2 * (x.abs() < 1e6), FLOATS, False),
    "not of tiny numbers": (times_two, lambda g, x: g * 2 * (x.abs().max() > 1e-6), FLOATS, False),
    "not in float32": (times_two, lambda g, x: g * (1 if x.dtype == torch.float32 else 2), FLOATS, False),
    "not of whole numbers": (times_two, lambda g, x: g * (1 if bool((x == x.round()).all()) else 2), FLOATS, False),
    "not of large gradients": (times_two, lambda g, x: g.clamp(-100, 100) * 2, FLOATS, False),
    "by the batch": (times_two, lambda g, x: g * 2 / len(x), FLOATS, False),
    "not of other rows than 0": (picked, lambda g, x, rows: scattered(g, x, rows * 0), PICKS, False),
    "not of other integers than 0": (times_two, lambda g, x, n: g * 2 * (n == 0)[:, None], PICKS, False),
}


@pytest.mark.parametrize(("forward", "backward", "args", "is_right"), CASES.values(), ids=CASES)
def test_a_backward_is_compared_on_numbers_of_all_kinds(
    forward: Callable[..., Tensor], backward: Backward, args: tuple[Any, ...], is_right: bool
) -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Tensor:
            ctx.save_for_backward(*args)
            return forward(*args)

        @staticmethod
        def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
            return backward(g, *ctx.saved_tensors), *[None] * (len(args) - 1)

    wanting = (args[0].requires_grad_(), *args[1:])
    assert is_derivative(Own.apply, forward, wanting) == is_right
