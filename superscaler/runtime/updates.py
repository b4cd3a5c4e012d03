"""The updates of weights and buffers on a rank: torch's optimizer, with clipping, loss scaling and averages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from superscaler.comm.communicator import Communicator
from superscaler.runtime.optimizer import at_once, average, changes_gradients, laid_out, optimizer_of
from superscaler.runtime.saved_tensors import Copies
from superscaler.runtime.scaling import Scaler, scale
from superscaler.runtime.tapes import in_dtypes

Pairs = Sequence[tuple[str, Tensor]]
Groups = Sequence[Mapping[str, Any]]
Chosen = tuple[str, Groups, bool] | tuple[str, Groups, bool, float]


class Updates:
    """The optimizer of a rank, and what a step does with the gradients of its weights.

    `table`: the entries of its weights in plan.json. `chosen`: the optimizer's name and the options of its groups, and
    whether it updates float32 copies of 16-bit weights; maybe also how far fused updates may be from plain ones.
    """

    def __init__(
        self,
        communicator: Communicator,
        copies: Copies,
        table: Sequence[Mapping[str, Any]],
        weights: Mapping[str, Tensor],
        chosen: Chosen,
    ) -> None:
        self.communicator, self.weights = communicator, weights
        self.optimizer = optimizer_of(table, weights, *chosen)
        self.scaler: Scaler | None = None
        self.clip: float | None = None
        # The decay of averages of weights; None: the next update drops them.
        self.ema: float | None = None
        self.last_norm: float | None = None
        self.keep_gradients = False
        self.gradients: dict[str, Tensor] = {}
        # Calls of `apply` and `set` that wait until the step is known to be finite; None: nothing waits.
        self.held: list[tuple[Callable[[Pairs], None], Pairs]] | None = None
        self._copies = copies
        self._counted = [w["name"] for w in table if w["counted"]]
        self._early: list[tuple[str, Tensor]] = []

    def update(self, pairs: Pairs, early: bool) -> None:
        """Give each weight its gradient and run the optimizer. Gradients are clipped to `clip` by their global norm.

        With a scaler they are divided by the loss scale first; if one is not finite, no rank changes a weight. Clipping
        and scaling need the gradients of all weights, so an `early` update then waits for the last one.
        """
        if early and (self.held is not None or self.clip is not None or self.scaler is not None):
            self._early += pairs
            return
        pairs, self._early = [*self._early, *pairs], []
        self._do(self.apply, pairs)

    def write(self, pairs: Pairs) -> None:
        """Set buffers to their new values."""
        self._do(self.set, pairs)

    def _do(self, change: Callable[[Pairs], None], pairs: Pairs) -> None:
        if self.held is not None:
            self.held.append((change, pairs))
        else:
            change(pairs)

    def apply(self, pairs: Pairs) -> None:
        """Run the optimizer with gradients by the names of their weights."""
        self._flush()
        gradients = self._gradients(pairs)
        is_finite = self.scaler is None or self._unscale(self.scaler, gradients)
        if self.clip is not None:
            self._clip(self.clip, gradients)
        if self.keep_gradients:
            self.gradients = {**self.gradients, **gradients}
        if self.optimizer is not None and is_finite:
            for some in at_once(self.optimizer, {name: self.weights[name] for name in gradients}):
                kinds = [weight.grad_dtype for weight in some.values()]
                found = in_dtypes([gradients[name] for name in some], kinds)
                if changes_gradients(self.optimizer):
                    found = [gradient.clone() for gradient in found]
                for weight, gradient in zip(some.values(), found, strict=True):
                    weight.grad = laid_out(gradient, weight)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
            average(self.optimizer, [self.weights[name] for name in gradients], self.ema)

    def set(self, pairs: Pairs) -> None:
        """Set buffers, by name, to their new values."""
        self._flush()
        for name, value in pairs:
            self.weights[name].copy_(value.reshape(self.weights[name].shape))

    def _flush(self) -> None:
        """Wait for communication and copies that read weights."""
        self.communicator.flush()
        self._copies.flush()

    def _gradients(self, pairs: Pairs) -> dict[str, Tensor]:
        """Return gradients by weight, in the shapes of the weights and in float32 for float32 copies."""
        weights = [self.weights[name] for name, _ in pairs]
        shaped = [x.reshape(weight.shape) for (_, x), weight in zip(pairs, weights, strict=True)]
        kinds = [torch.promote_types(x.dtype, w.grad_dtype or x.dtype) for x, w in zip(shaped, weights, strict=True)]
        return dict(zip((name for name, _ in pairs), in_dtypes(shaped, kinds), strict=True))

    def _unscale(self, scaler: Scaler, gradients: dict[str, Tensor]) -> bool:
        """Divide the gradients by the loss scale, choose the next; return whether those of all ranks are finite."""
        found = self.communicator.sum_of_all(scaler.unscale(gradients))
        scaler.update(found)
        return not float(found)

    def norm(self, gradients: Mapping[str, Tensor]) -> float:
        """Return the norm of gradients over all ranks, those of replicas once; all ranks call this."""
        device = self.communicator.device
        squares = [gradients[n].double().pow(2).sum().to(device) for n in self._counted if n in gradients]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
        return float(self.communicator.sum_of_all(total).sqrt())

    def _clip(self, limit: float, gradients: dict[str, Tensor]) -> None:
        self.last_norm = self.norm(gradients)
        factor = limit / (self.last_norm + 1e-6)
        # As torch does: a norm of nan makes all gradients nan.
        if not factor >= 1.0:
            scale(gradients, factor)
