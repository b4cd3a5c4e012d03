"""The state of a rank after each step of a plan, to be compared."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from superscaler.replaced import replaced
from superscaler.runtime.executor import Rank
from superscaler.runtime.step import Step
from superscaler.verify.locate import Values
from superscaler.verify.options import Option, options_of

# Compared steps; a plan that reads weights of n updates ago takes n more.
STEPS = 2


@dataclass(frozen=True, slots=True)
class Result:
    """The state of a rank after a step, by local names; `moved`: the bytes that it put on links; `option`: of the step,
    if it had one.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    weights: Values
    state: Mapping[str, Values]
    moved: int
    outputs: Values = field(default_factory=dict)
    option: Option | None = None


# The gradient, the value and the optimizer's state of a weight or buffer.
Kept = tuple[Tensor | None, Tensor, dict[str, Tensor]]


def run_steps(step: Step, batch: Mapping[str, Tensor], count: int = STEPS, with_options: bool = False) -> list[Result]:
    """Return the state of a rank after each iteration of `count` steps, all of them on one batch; then after a step
    under each option.
    """
    step.state.updates.keep_gradients = True
    found = [result for _ in range(count) for result in _run_step(step, batch)]
    for option in options_of(step) if with_options else ():
        with option.on(step):
            found += [replace(result, option=option) for result in _run_step(step, batch, option.clip)]
    return found


def _run_step(step: Step, batch: Mapping[str, Tensor], clip: float | None = None) -> Iterator[Result]:
    """Yield the state of a rank after each iteration of a step."""
    kept, rank = _Kept(step.state, step.iterations), step.state
    with replaced((rank, "update", kept.keeping(rank.update)), (rank, "write", kept.keeping(rank.write))):
        made = step([batch] * step.iterations if step.iterations > 1 else batch, clip=clip)
    losses = made.detach().reshape(-1) if step.trains else torch.zeros(1)
    last = {name: kept.now(name) for name in rank.weights}
    for loss, changed in zip(losses, [*kept.of, {}], strict=True):
        gradients, weights, state = ({n: some[k] for n, some in {**last, **changed}.items()} for k in range(3))
        outputs = {name: _kept(x) for name, x in rank.outputs.items()}
        yield Result(_kept(loss), gradients, weights, state, step.bytes_moved, outputs)  # type: ignore[arg-type]


def _kept(x: Tensor) -> Tensor:
    """Return a copy on the CPU."""
    return x.detach().to("cpu", copy=True)


class _Kept:
    """Copies of weights and buffers after each change but the last; change k belongs to iteration k."""

    def __init__(self, rank: Rank, iterations: int) -> None:
        self.rank = rank
        self.times = Counter[str]()
        self.of: list[dict[str, Kept]] = [{} for _ in range(iterations - 1)]

    def now(self, name: str) -> Kept:
        weight, optimizer = self.rank.weights[name], self.rank.updates.optimizer
        state = optimizer.state.get(weight, {}) if optimizer is not None else {}
        tensors = {key: _kept(x) for key, x in state.items() if isinstance(x, Tensor)}
        gradient = self.rank.updates.gradients.get(name)
        return None if gradient is None else _kept(gradient), _kept(weight), tensors

    def keeping(self, change: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls `change` and then copies the changed weights."""

        def changing(weights: Sequence[Tensor] = (), *more: Any, **options: Any) -> None:
            change(weights, *more, **options)
            for name in map(self.rank.name_of, weights):
                if self.times[name] < len(self.of):
                    self.of[self.times[name]][name] = self.now(name)
                self.times[name] += 1

        return changing
