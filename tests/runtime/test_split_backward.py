"""Both halves of a backward together give what autograd gives at once, wherever leaves share nodes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from superscaler.runtime.split_backward import Rest, first_half, second_half

Function = Callable[..., Any]


class Scaled(torch.autograd.Function):
    """A product whose backward is written in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return gradient @ w.T, x.T @ gradient


def chunked(x: Tensor, w: Tensor) -> Tensor:
    a, b = w.chunk(2)
    return F.linear(torch.tanh(F.linear(x, a)), b)


def gated(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b)) * x + torch.where(x > 0, b, x)[:, :4]


def normed(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.tanh(F.batch_norm(F.layer_norm(x, (4,), w, b), None, None, b, w, training=True))


# A function of x and weights, their shapes, and which weights have their gradients in the second half.
CASES: list[tuple[Function, list[tuple[int, ...]], set[int]]] = [
    (F.linear, [(5, 4), (5,)], {1, 2}),
    (gated, [(4, 4), (4,)], {1}),
    (normed, [(4,), (4,)], set()),
    (lambda x, w: torch.tanh(F.linear(torch.tanh(F.linear(x, w)), w)), [(4, 4)], set()),
    (chunked, [(8, 4)], set()),
    (lambda x, w: torch.addmm(w.sum(0), x, w), [(4, 4)], {1}),
    (lambda x, w, u: (F.linear(x, w), u.sum() * 2), [(4, 4), (3,)], {1}),
    (lambda x, w, u: (F.linear(x, w), u.sum() * 2), [(4, 4), (3, 2)], {1, 2}),
    (lambda x, w: (F.linear(x, w), w.sum() * 2), [(4, 4)], set()),
    (lambda x, w, u: torch.split(F.linear(x, w), 2, 1)[1] * 2, [(4, 4), (3,)], {1}),
    (lambda x, w: (x * 1, x), [(4, 4)], set()),
    (lambda x, b: x + b, [(4,)], set()),
    (lambda x, b: x + b, [(3, 4)], {1}),
    (lambda x, w: Scaled.apply(torch.tanh(x), w), [(4, 4)], {1}),
    (lambda x, w, u: Scaled.apply(Scaled.apply(x, w), u), [(4, 4), (4, 4)], {1, 2}),
]


def halves(run: Function, leaves: Sequence[Tensor]) -> tuple[Sequence[Tensor | None], Rest]:
    """Return the gradient of the first leaf by a first half, and what is left; outputs are gone by then."""
    made = run(*leaves)
    given = [(get_gradient_edge(o), torch.full_like(o, k + 1.0)) for k, o in enumerate(_tuple(made))]
    return first_half(given, leaves, [k == 0 for k in range(len(leaves))])


def _tuple(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize(("run", "shapes", "later"), CASES)
def test_halves_give_what_the_whole_gives(run: Function, shapes: list[tuple[int, ...]], later: set[int]) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), *shapes)]
    outputs = _tuple(run(*leaves))
    gradients = [torch.full_like(o, k + 1.0) for k, o in enumerate(outputs)]
    whole = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
    first, rest = halves(run, leaves)
    assert {n for _, own in rest.left for n in own} == later
    second = second_half(rest)
    assert first[1:] == [None] * len(shapes)
    assert second[0] is None
    for a, b in zip(whole, [first[0], *second[1:]], strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, rtol=1e-12, atol=0)


def test_the_second_half_walks_to_weights_only() -> None:
    walked = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            walked.append(1)
            return gradient

    x, w, u = (torch.randn(4, 4, requires_grad=True) for _ in range(3))
    _, rest = halves(lambda x, w, u: F.linear(Seen.apply(F.linear(x, w)), u), [x, w, u])
    assert len(walked) == 1
    second_half(rest)
    assert len(walked) == 1


def test_what_only_the_first_half_needs_is_freed_with_it() -> None:
    saved: dict[str, weakref.ref[Any]] = {}

    def run(x: Tensor, w: Tensor) -> Tensor:
        made = {"tanh": torch.tanh(x)}
        made["sigmoid"] = torch.sigmoid(made["tanh"] * 2)
        saved.update({name: weakref.ref(y.untyped_storage()) for name, y in made.items()})
        return F.linear(made["sigmoid"], w) * 3

    _, rest = halves(run, [torch.randn(4, 4, requires_grad=True) for _ in range(2)])
    assert saved["tanh"]() is None
    assert saved["sigmoid"]() is not None
    second_half(rest)
    del rest
    assert saved["sigmoid"]() is None


def test_a_tape_is_freed_as_the_first_half_walks_over_it() -> None:
    """Also what a norm has saved, whose small gradients are made with it; not what nodes in Python read twice."""
    alive: list[bool] = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            alive.append(saved() is not None and ctx.saved_tensors[0] is not None and ctx.saved_tensors[0] is not None)
            return gradient

    x, w, b = (torch.randn(n, requires_grad=True) for n in (4, 4, 4))
    inner = Seen.apply(x * 1) * 2
    saved = weakref.ref(inner.untyped_storage())
    made = F.layer_norm(inner, (4,), w, b)
    del inner
    first, rest = first_half([(get_gradient_edge(made), torch.ones(4))], [x, w, b], [True, False, False])
    assert alive == [False]
    assert first[0] is not None
    assert all(gradient is not None for gradient in second_half(rest)[1:])


def test_hooks_of_the_user_on_what_is_saved_stay() -> None:
    x, w = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.double(), lambda x: x.float()):
        first, rest = halves(lambda x, w: torch.tanh(F.linear(x, w)), [x, w])
    assert first[0] is not None
    assert second_half(rest)[1] is not None
