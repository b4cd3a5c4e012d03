"""The loss scale of a rank, kept as `torch.amp.GradScaler` keeps it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Scaler:
    """A loss scale that is halved or doubled depending on the gradients. `state`: a GradScaler's."""

    def __init__(self, state: Mapping[str, Any], device: torch.device) -> None:
        self.device = device
        self.load_state_dict(state)

    def unscale(self, gradients: dict[str, Tensor]) -> Tensor:
        """Divide the gradients by the scale, in place; return a float32 scalar, 1 if any is not finite."""
        finite = [g.isfinite().all().to(self.device) for g in gradients.values()]
        inverse = self.scale.double().reciprocal()
        for name, gradient in gradients.items():
            gradients[name] = gradient * inverse.to(gradient)
        return (~torch.stack(finite).all()).float() if finite else torch.zeros_like(self.scale)

    def update(self, found: Tensor) -> None:
        """Choose the next scale. `found`: above 0 if a gradient of any rank was not finite."""
        factors = self._options["growth_factor"], self._options["backoff_factor"]
        torch._amp_update_scale_(self.scale, self._tracker, found, *factors, self._options["growth_interval"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of `GradScaler.state_dict`."""
        return {**self._options, "scale": self.scale.item(), "_growth_tracker": self._tracker.item()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._options = dict(state)
        self.scale = torch.tensor(state["scale"], dtype=torch.float32, device=self.device)
        self._tracker = torch.tensor(state["_growth_tracker"], dtype=torch.int32, device=self.device)
