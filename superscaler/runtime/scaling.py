"""Gradients multiplied by a scalar: those of a scaled loss divided by its scale, those of a large norm clipped."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def scale(gradients: dict[str, Tensor], factor: Tensor) -> None:
    """Multiply gradients by a scalar, halves in float32: in place, but for those whose memory another one has a part
    of.
    """
    shared = _shared(gradients)
    for name, gradient in gradients.items():
        own = factor.to(gradient.device, torch.promote_types(gradient.dtype, torch.float32))
        is_own = name not in shared and gradient.is_contiguous()
        if own.dtype == gradient.dtype:
            gradients[name] = gradient.mul_(own) if is_own else gradient * own
        else:
            product = gradient.to(own.dtype) * own
            gradients[name] = gradient.copy_(product) if is_own else product.to(gradient.dtype)


def _shared(tensors: Mapping[str, Tensor]) -> set[str]:
    """Return the names of tensors whose ranges of memory overlap with that of another one.

    >>> whole = torch.zeros(6, 4)
    >>> sorted(_shared({"whole": whole, "rows": whole[4:], "other": torch.zeros(4), "none": whole[:0]}))
    ['rows', 'whole']
    >>> _shared({"first": whole[:3], "second": whole[3:]})
    set()
    """
    found, first, end = set[str](), "", 0
    for start, stop, name in sorted((*_range(x), name) for name, x in tensors.items() if x.numel()):
        if start < end:
            found |= {first, name}
        else:
            first = name
        end = max(end, stop)
    return found


def _range(x: Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor, and behind its last one."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


class Scaler:
    """A loss scale that is halved or doubled depending on the gradients. `state`: a GradScaler's."""

    def __init__(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.device = device
        self.load_state_dict(state)

    def unscale(self, gradients: dict[str, Tensor]) -> Tensor:
        """Divide the gradients by the scale (see `scale`); return a float32 scalar, 1 if any is not finite."""
        finite = [g.isfinite().all().to(self.device) for g in gradients.values()]
        inverse = self.scale.double().reciprocal()
        scale(gradients, inverse)
        return (~torch.stack(finite).all()).float() if finite else torch.zeros_like(self.scale)

    def update(self, found: Tensor) -> None:
        """Choose the next scale. `found`: above 0 if a gradient of any rank was not finite."""
        factors = self._options["growth_factor"], self._options["backoff_factor"]
        torch._amp_update_scale_(self.scale, self._tracker, found, *factors, self._options["growth_interval"])

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Return the tensors of the state."""
        return self.scale, self._tracker

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of `GradScaler.state_dict`."""
        return {**self._options, "scale": self.scale.item(), "_growth_tracker": self._tracker.item()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._options = dict(state)
        self.scale = torch.tensor(state["scale"], dtype=torch.float32, device=self.device)
        self._tracker = torch.tensor(state["_growth_tracker"], dtype=torch.int32, device=self.device)
