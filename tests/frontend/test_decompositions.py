"""Decompositions are plain torch functions: on tensors with data they give what the operator gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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
    (_ATEN.huber_loss.default, (X, X * 2, 1, 0.5)),
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
