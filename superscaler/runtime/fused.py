"""Whether torch's fused update of weights is the plain one on this machine, found by running both."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

# More elements than the vector of any kernel, and a rate at which an update is visible.
_SHAPE, _RATE = (3, 43), 0.05
# Relative to the largest element: the same float32 operations in another order.
ROUNDING = 4 * torch.finfo(torch.float32).eps


def is_plain(name: str, options: Mapping[str, Any], weights: Iterable[Tensor]) -> bool:
    """Return whether fused updates of all weights equal the plain ones, to the last digits of float32."""
    text = json.dumps({**options, "lr": _RATE}, sort_keys=True)
    kinds = {(x.dtype, x.device, x.is_contiguous()) for x in weights}
    return all(_agrees(name, text, *kind) for kind in kinds)


@cache
def _agrees(name: str, options: str, dtype: torch.dtype, device: torch.device, is_contiguous: bool) -> bool:
    """Compare two updates of a weight. Torch 2.13 does not update vectors of half precision (SGD, CPU)."""
    given = json.loads(options)
    try:
        fused, plain = (_updated(name, {**given, "fused": k}, dtype, device, is_contiguous) for k in (True, None))
    except (RuntimeError, TypeError):
        # Torch has no such kernel.
        return False
    return all(float((a - b).abs().max()) <= ROUNDING * float(b.abs().max()) for a, b in zip(fused, plain, strict=True))


def _updated(
    name: str, options: Mapping[str, Any], dtype: torch.dtype, device: torch.device, is_contiguous: bool
) -> list[Tensor]:
    """Return a weight and the optimizer's states of it after two updates, in float64."""
    draw = torch.Generator().manual_seed(0)

    def drawn() -> Tensor:
        x = torch.randn(_SHAPE, generator=draw, dtype=torch.float64).to(device, dtype)
        return x if is_contiguous else x.t().contiguous().t()

    weight = drawn().requires_grad_()
    optimizer = getattr(torch.optim, name)([weight], **options)
    for _ in range(2):
        weight.grad = drawn()
        optimizer.step()
    states = [x for x in optimizer.state[weight].values() if isinstance(x, Tensor)]
    return [x.detach().double().cpu() for x in (weight, *states)]
