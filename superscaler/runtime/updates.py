"""The updates of weights and buffers on a rank: torch's optimizer, with clipping, loss scaling and averages."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from superscaler.comm.communicator import Communicator
from superscaler.runtime.optimizer import at_once, average, changes_gradients, laid_out, optimizer_of, skipping
from superscaler.runtime.replayable.reads import number
from superscaler.runtime.saved_tensors import Copies
from superscaler.runtime.scaling import Scaler, scale
from superscaler.runtime.tapes import in_dtypes

Pairs = Sequence[tuple[str, Tensor]]
Held = list[tuple[Callable[[Pairs], None], Pairs]]
Groups = Sequence[Mapping[str, Any]]
Chosen = tuple[str, Groups, bool] | tuple[str, Groups, bool, float] | tuple[str, Groups, bool, float, bool]


class Updates:
    """The optimizer of a rank, and what a step does with the gradients of its weights.

    `table`: the entries of its weights in plan.json. `chosen`: the optimizer's name and the options of its groups, and
    whether it updates float32 copies of 16-bit weights; maybe also how far fused updates may be from plain ones, and
    whether updates are recorded.
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
        # A scalar where gradients were clipped by their own norm.
        self.last_norm: Tensor | float | None = None
        # Whether the update is recorded, to be replayed: then no number is read, and none decides what runs.
        self.is_recorded = False
        # Whether an update was left out because a gradient was not finite.
        self.has_skipped = False
        self.keep_gradients = False
        self.gradients: dict[str, Tensor] = {}
        # Calls of `apply` and `set` that wait until the step is known to be finite; None: nothing waits.
        self.held: Held | None = None
        self._copies = copies
        self._counted = [w["name"] for w in table if w["counted"]]
        self._early: list[tuple[str, Tensor]] = []

    def holding(self, run: Callable[[], Tensor]) -> tuple[Tensor, Held]:
        """Return the result of a run without its updates, and these."""
        self.held = []
        try:
            made = run()
        finally:
            held, self.held = self.held, None
        return made, held

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
        found = None if self.scaler is None else self._unscale(self.scaler, gradients)
        if self.clip is not None:
            self._clip(self.clip, gradients)
        if self.keep_gradients:
            self.gradients = {**self.gradients, **gradients}
        self.has_skipped = found is not None and not self.is_recorded and number(found) > 0
        if self.optimizer is not None and not self.has_skipped:
            self._step(self.optimizer, gradients, found if self.is_recorded else None)

    def _step(self, optimizer: torch.optim.Optimizer, gradients: Mapping[str, Tensor], found: Tensor | None) -> None:
        """Update weights. `found`: 1 if they stay as they are, which the kernels of the optimizer read."""
        with skipping(optimizer, found):
            for some in at_once(optimizer, {name: self.weights[name] for name in gradients}):
                kinds = [weight.grad_dtype for weight in some.values()]
                own = in_dtypes([gradients[name] for name in some], kinds)
                if changes_gradients(optimizer):
                    own = [gradient.clone() for gradient in own]
                for weight, gradient in zip(some.values(), own, strict=True):
                    weight.grad = laid_out(gradient, weight)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        average(optimizer, [self.weights[name] for name in gradients], self.ema, found)

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

    def _unscale(self, scaler: Scaler, gradients: dict[str, Tensor]) -> Tensor:
        """Divide the gradients by the loss scale, choose the next; return 1 if one is not finite on any rank, or 0."""
        found = self.communicator.sum_of_all(scaler.unscale(gradients)).clamp(max=1.0)
        scaler.update(found)
        return found

    def norm(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of gradients over all ranks, those of replicas once; all ranks call this."""
        device = self.communicator.device
        squares = [gradients[n].double().pow(2).sum().to(device) for n in self._counted if n in gradients]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
        return self.communicator.sum_of_all(total).sqrt()

    def _clip(self, limit: float, gradients: dict[str, Tensor]) -> None:
        self.last_norm = norm = self.norm(gradients)
        # As torch does: a norm of nan makes all gradients nan.
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        # A CPU reads the number at once; a GPU would be waited for.
        if self.is_recorded or norm.is_cuda or number(factor) != 1.0:
            scale(gradients, factor)
