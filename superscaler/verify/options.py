"""Steps under the options of a step that change gradients: clipped below their norm, and with a scaled loss."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite

import torch

from superscaler.frontend.base.oracle import Reference, dense
from superscaler.replaced import replaced
from superscaler.runtime.scaling import Scaler
from superscaler.runtime.step import Step

# The largest norm of a clipped step, as a part of the norm of the step before.
_PART = 0.01
# In float64 a loss is scaled without rounding by a power of two.
_SCALE = 1024.0


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a step: "clip", with the largest norm, or "loss_scale", with the scale."""

    name: str
    value: float

    def __str__(self) -> str:
        return f"a step with {self.name.replace('_', ' ')} {self.value:.4g}"

    @property
    def clip(self) -> float | None:
        return self.value if self.name == "clip" else None

    @contextmanager
    def on(self, step: Step) -> Iterator[None]:
        """Scale the loss in the block, if this is the loss scale."""
        scaler = torch.amp.GradScaler("cpu", init_scale=self.value) if self.name == "loss_scale" else None
        own = Scaler(scaler.state_dict(), step.state.device) if scaler else step.state.updates.scaler
        with replaced((step.state.updates, "scaler", own)):
            yield

    def of(self, expected: Reference, trained: Collection[str]) -> Reference:
        """Return a step on one device under this option, given it without, and the names of its trained tensors."""
        if self.clip is None:
            return expected
        found = {name: None if g is None else dense(g, g) for name, g in expected.gradients.items()}
        squares = [g.double().pow(2).sum() for name, g in found.items() if g is not None and name in trained]
        factor = self.clip / (float(sum(squares, torch.zeros(())).sqrt()) + 1e-6)
        clipped = {name: None if g is None else g * min(factor, 1.0) for name, g in found.items()}
        return expected._replace(gradients=clipped)


def options_of(step: Step) -> Iterator[Option]:
    """Yield the options to run, after a step whose gradients were kept; none if the plan refuses them."""
    if step.iterations > 1 or not step.trains:
        return
    updates = step.state.updates
    norm = float(updates.norm(updates.gradients))
    yield Option("clip", _PART * norm if norm and isfinite(norm) else 1.0)
    yield Option("loss_scale", _SCALE)
