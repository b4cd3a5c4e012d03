"""The rounding error of true zeros, as that of a loss that is the divergence of two equal distributions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from superscaler.frontend.oracle import Reference, largest
from superscaler.verify.locate import TOLERANCE, Values

# A value below _TINY may be a true zero. Then the step is repeated with weights changed by _CHANGE (relative), and a
# plan may differ by _TIMES the resulting change.
_TINY, _CHANGE, _TIMES = 1e-9, 1e-12, 100


def noise_of(run: Callable[[Values], Reference], known: Values, expected: Reference) -> tuple[float, float]:
    """Return the least sizes to which errors of the loss and of gradients are relative; 0 unless these are tiny.

    Weights that differ in their last digits change the rounding of a true zero entirely, but hardly change a value that
    is only small: so a small loss is compared like any other.
    """
    is_tiny = [expected.loss is not None and size < _TINY for size in _sizes(expected)]
    if not any(is_tiny):
        return 0.0, 0.0
    moved = [torch.finfo(torch.float64).eps * (size == 0) for size in _sizes(expected)]
    for seed in (0, 1):
        generator, changed = torch.Generator().manual_seed(seed), dict(known)
        for name in expected.gradients:
            noise = torch.randn(known[name].shape, generator=generator, dtype=torch.float64)
            changed[name] = known[name] * (1 + _CHANGE * noise.to(known[name].device))
        moved = list(map(max, moved, _sizes(expected, run(changed))))
    loss, gradient = (_TIMES * size / TOLERANCE * tiny for size, tiny in zip(moved, is_tiny, strict=True))
    return loss, gradient


def _sizes(one: Reference, other: Reference | None = None) -> tuple[float, float]:
    """Return the sizes of the loss and of the largest gradient, or of their differences from another step."""
    gradients = {name: g for name, g in one.gradients.items() if g is not None}
    loss = torch.zeros(()) if one.loss is None else one.loss
    if other is not None:
        others = {name: other.gradients[name] for name in gradients}
        gradients = {name: g if (h := others[name]) is None else g - h for name, g in gradients.items()}
        loss = loss if other.loss is None else loss - other.loss
    return float(loss.abs()), max(map(largest, gradients.values()), default=0.0)
