"""What a rank has after each iteration of a step that is several: its weights change one by one, and once more."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from superscaler.runtime.executor import Pairs, Rank
from superscaler.runtime.step import Step
from superscaler.verify.compare import Result

# Of a weight or buffer: its gradient, its value, and the optimizer's state of it.
Kept = tuple[Tensor | None, Tensor, dict[str, Tensor]]


def run_iterations(step: Step, batch: Mapping[str, Tensor]) -> list[Result]:
    """Return what a rank has after each iteration of one step, all of them on one batch."""
    kept, rank = _Kept(step.state, step.iterations), step.state
    rank.update, rank.write = kept.told(rank.update), kept.told(rank.write)  # type: ignore[method-assign]
    try:
        losses = step([batch] * step.iterations)
    finally:
        del rank.update, rank.write
    unchanged = {name: kept.now(name) for name in rank.weights if not kept.times[name]}
    return [_result(loss.detach(), unchanged | own, step) for loss, own in zip(losses, kept.of, strict=True)]


def _result(loss: Tensor, kept: Mapping[str, Kept], step: Step) -> Result:
    gradients, weights, state = ({name: some[k] for name, some in kept.items()} for k in range(3))
    return Result(loss, gradients, weights, state, step.bytes_moved)  # type: ignore[arg-type]


class _Kept:
    """Copies of what weights and buffers become, by the iteration that changes them: the k-th change is that of k."""

    def __init__(self, rank: Rank, iterations: int) -> None:
        self.rank = rank
        self.times = Counter[str]()
        self.of: list[dict[str, Kept]] = [{} for _ in range(iterations)]

    def now(self, name: str) -> Kept:
        weight, optimizer = self.rank.weights[name], self.rank.optimizer
        state = optimizer.state.get(weight, {}) if optimizer is not None else {}
        tensors = {key: x for key, x in state.items() if isinstance(x, Tensor)}
        return copy.deepcopy((self.rank.gradients.get(name), weight.detach(), tensors))

    def told(self, change: Callable[..., None]) -> Callable[..., None]:
        """Return what changes weights and keeps what they are then."""

        def changing(pairs: Pairs, *more: Any, **options: Any) -> None:
            change(pairs, *more, **options)
            for name, _ in pairs:
                self.of[self.times[name]][name] = self.now(name)
                self.times[name] += 1

        return changing
