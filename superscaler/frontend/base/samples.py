"""Random operands for checks of the user's functions, and the check of a function's own backward on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from superscaler.frontend.base.oracle import largest

# A function with more elements than this is not compared.
_MOST_ELEMENTS = 1 << 24
_TOLERANCE = 1e-6
Function = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of random numbers: the range of their sizes, their dtype, and the tolerance of results.

    `tolerance` is relative to the largest element of a result, but at least to `unit`; without a `unit`, to each
    element, but at least to 1.
    """

    name: str
    sizes: tuple[float, float] = (1.0, 1.0)
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    unit: float | None = 1.0

    def draw(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return random numbers of this kind."""
        shape = tuple(shape)
        x = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
        uniform = torch.rand(shape, dtype=torch.float64, generator=generator, device="cpu")
        if self.name == "zeros":
            x = x * (uniform < 0.7)
        elif self.name == "integers":
            x = x.mul(8).round()
        else:
            low, high = map(log10, self.sizes)
            x = x * 10 ** (low + (high - low) * uniform)
        return x.to(self.dtype)

    def is_close(self, found: Tensor, expected: Tensor, tolerance: float = 0.0) -> Tensor:
        """Return for each element of a result whether it is near the expected one; `tolerance`: at least."""
        tolerance = max(tolerance, self.tolerance)
        size = 1.0 if self.unit is None else max(self.unit, largest(expected))
        return torch.isclose(found, expected, rtol=tolerance, atol=tolerance * size, equal_nan=True)


NORMAL = Kind("normal", unit=None)
# Normal numbers too, but a result of nan is no error.
TRIED = Kind("normal")
KINDS = (
    NORMAL,
    Kind("zeros"),
    Kind("integers"),
    Kind("large", (1.0, 1e9)),
    Kind("tiny", (1e-9, 1e-9), unit=1e-18),
    Kind("float32", dtype=torch.float32, tolerance=1e-4),
)


def varied(value: Tensor, bound: int, generator: torch.Generator) -> Tensor:
    """Return random numbers of the shape and dtype of a tensor; integers are below `bound`, and not all the same."""
    if value.is_floating_point():
        return NORMAL.draw(value.shape, generator).to(value)
    high = 2 if value.dtype == torch.bool else bound
    drawn = torch.randint(high, value.shape, generator=generator, device="cpu")
    drawn.flatten()[:2] = torch.tensor([0, high - 1])
    return drawn.to(value)


def is_derivative(own: Function, forward: Function, args: Sequence[Any]) -> bool:
    """Return whether a function with its own backward has the gradients that autograd derives from its forward, of the
    arguments that want one.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    if not torch.is_grad_enabled() or not any(a.requires_grad for a in tensors):
        return True
    if sum(a.numel() for a in tensors) > _MOST_ELEMENTS:
        return False
    bounds = sorted({n for a in tensors for n in a.shape if n} | {1, 2}, reverse=True)
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.enable_grad():
        bound = next((n for n in bounds if _runs(forward, _draw(args, NORMAL, n))), 0)
        return bound > 0 and all(_agree(own, forward, _draw(args, kind, bound), kind) for kind in KINDS)


def _draw(args: Sequence[Any], kind: Kind, bound: int) -> list[Any]:
    """Return arguments whose tensors are replaced by random numbers; integers are below `bound`."""
    generator = torch.Generator().manual_seed(0)

    def real(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.is_floating_point():
            return kind.draw(value.shape, generator).requires_grad_(value.requires_grad)
        high = 2 if value.dtype == torch.bool else 1 if kind.name == "zeros" else bound
        return torch.randint(high, value.shape, generator=generator, device="cpu").to(value.dtype)

    return [real(value) for value in args]


def _runs(function: Function, given: Sequence[Any]) -> bool:
    """Return whether a function accepts these arguments: only the function knows its valid integers."""
    try:
        function(*given)
    except Exception:
        # The user's code may raise any exception.
        return False
    return True


def _agree(one: Function, other: Function, given: Sequence[Any], kind: Kind) -> bool:
    """Return whether two functions have the same results and gradients."""
    leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
    try:
        first, second = (_with_gradients(f, given, leaves, kind.sizes[1] ** 0.5) for f in (one, other))
    except Exception:
        # The user's code may raise any exception, in its backward too.
        return False
    if [(x.shape, x.dtype) for x in first] != [(x.shape, x.dtype) for x in second]:
        return False
    return all(kind.is_close(x, y, _TOLERANCE).all() for x, y in zip(first, second, strict=True))


def _with_gradients(function: Function, given: Sequence[Any], leaves: Sequence[Tensor], scale: float) -> list[Tensor]:
    """Return the results of a function, and the gradients of `leaves` for a fixed gradient of each result."""
    outputs = tuple(y for y in pytree.tree_leaves(function(*given)) if isinstance(y, Tensor) and y.requires_grad)
    gradients = [torch.linspace(-scale, scale, y.numel(), dtype=y.dtype, device="cpu").view(y.shape) for y in outputs]
    # During capture, a call of torch.autograd.grad raises an error.
    found = _engine_run_backward(outputs, tuple(gradients), False, False, tuple(leaves), True, accumulate_grad=False)
    made = [*outputs, *(torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True))]
    return [x.detach() for x in made]
