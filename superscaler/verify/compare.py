"""Comparison of a plan's tensors with those of one device, step by step and iteration by iteration."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from superscaler.artifact import slots_of
from superscaler.compiler import Compiled
from superscaler.frontend.oracle import Reference, largest, largest_gap
from superscaler.ir.mask import Mask
from superscaler.ir.program import Give, Weight
from superscaler.runtime.executor import Pairs, Rank, put, take
from superscaler.runtime.step import Step
from superscaler.verify.locate import FLOOR, TOLERANCE, Values


@dataclass(frozen=True, slots=True)
class Result:
    """The state of a rank after a step: the loss, its slices of gradients, weights and optimizer state by local name,
    the bytes that it put on links, and its outputs.
    """

    loss: Tensor
    gradients: Mapping[str, Tensor | None]
    weights: Values
    state: Mapping[str, Values]
    moved: int
    outputs: Values = field(default_factory=dict)


# Returns the largest error that a tensor of a kind may have.
Allowed = Callable[[str, str], float]


@dataclass(slots=True)
class Errors:
    """The errors of all steps: the `largest` of each kind, the `worst` tensor, the text of the `first` error above its
    limit, and the error `nearest` to its limit, with that limit.
    """

    largest: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("loss_error", "gradient_error", "parameter_error", "output_error"), 0.0)
    )
    worst: str = ""
    first: str = ""
    nearest: tuple[float, float] = (0.0, TOLERANCE)

    @property
    def is_equal(self) -> bool:
        return not self.first and all(map(math.isfinite, self.largest.values()))

    def add(self, kind: str, error: float, where: str, what: str, allowed: float = TOLERANCE) -> None:
        if not error <= max(self.largest.values()):
            self.worst = where
        if not error <= self.largest[kind]:
            self.largest[kind] = error
        if not error / allowed <= self.nearest[0] / self.nearest[1]:
            self.nearest = error, allowed
        if not error <= allowed and not self.first:
            self.first = f"{what} is off by {error:.2g}"


class Comparison:
    """A comparison of the steps of a plan one by one, each from the weights that the plan has before it.

    A gradient whose true value is zero is noise, and Adam turns noise into steps of any size. So the update of each
    slice is compared with that of torch's own optimizer on the plan's gradient of the slice.
    """

    def __init__(self, exact: Compiled, values: Values, allowed: Allowed = lambda kind, tensor: TOLERANCE) -> None:
        self.exact, self.model, self.allowed = exact, exact.graph.model, allowed
        # Whole tensors; the weights after each step are written into them.
        self.known = {name: value.clone(memory_format=torch.contiguous_format) for name, value in values.items()}
        self.errors = Errors()
        self.steps = 0
        self.groups = {op.inputs[0].tensor: op.group for op in self.model.ops if not (op.is_forward or op.is_write)}
        self.trained = [self._trained_slices(device.weights) for device in exact.program.devices]

    def _trained_slices(self, weights: Sequence[Weight]) -> tuple[dict[str, Tensor], torch.optim.Optimizer | None]:
        """Return slices of a device's trained weights, and torch's optimizer over them."""
        optimizer = self.model.optimizer
        members: list[list[Tensor]] = [[] for _ in optimizer.groups]
        found = {}
        for weight in weights:
            if weight.tensor in self.groups:
                found[str(weight.name)] = self._slice(self.known, weight).clone().requires_grad_()
                members[self.groups[weight.tensor]].append(found[str(weight.name)])
        groups = [{"params": p, **dict(g)} for p, g in zip(members, optimizer.groups, strict=True) if p]
        return found, getattr(torch.optim, optimizer.name)(groups) if groups else None

    def _slice(self, whole: Values, weight: Weight) -> Tensor:
        return take(whole[weight.tensor], slots_of(self.model, weight.tensor), weight.box)

    def add(self, results: Sequence[Result], expected: Reference, noise: tuple[float, float] = (0.0, 0.0)) -> None:
        """Compare the next step, then keep its weights for the step after it. `noise`: see `noise_of`."""
        self.steps += 1
        here = "" if self.steps == 1 else f" in step {self.steps}"
        loss = torch.zeros(()) if expected.loss is None else expected.loss
        for result in results:
            error = relative_error(result.loss.detach(), loss.detach(), loss, max(noise[0], 1e-30))
            text = f"{self.model.loss}, the loss{here or ' of the step'},"
            self._add("loss_error", error, self.model.loss, self.model.loss, text)
        self._gradients(results, expected, here, noise[1])
        self._outputs(results, expected, here)
        self._weights(results, expected, here)
        for rank, weight in self._each():
            piece = results[rank].weights[str(weight.name)]
            put(self.known[weight.tensor], slots_of(self.model, weight.tensor), weight.box, piece)

    def _each(self) -> Iterator[tuple[int, Weight]]:
        for rank, device in enumerate(self.exact.program.devices):
            for weight in device.weights:
                yield rank, weight

    def _gradients(self, results: Sequence[Result], expected: Reference, here: str, noise: float) -> None:
        whole = {n: torch.zeros_like(self.known[n]) if g is None else g for n, g in expected.gradients.items()}
        floor = max(floor_of(whole.values()), noise)
        for rank, weight in self._each():
            if weight.tensor in whole:
                want = self._slice(whole, weight)
                have = results[rank].gradients.get(str(weight.name))
                error = relative_error(
                    torch.zeros_like(want) if have is None else have, want, whole[weight.tensor], floor
                )
                self._found("gradient_error", error, weight, rank, "the gradient of ", here)

    def _outputs(self, results: Sequence[Result], expected: Reference, here: str) -> None:
        for rank, device in enumerate(self.exact.program.devices):
            for i in (i for i in device.instructions if isinstance(i, Give)):
                whole = expected.outputs[i.tensor]
                want = take(whole, slots_of(self.model, i.tensor), i.box)
                text = f"the output {Mask(i.tensor, i.box)} on device {rank}{here}"
                self._add(
                    "output_error",
                    relative_error(results[rank].outputs[i.tensor], want, whole),
                    i.tensor,
                    i.tensor,
                    text,
                )

    def _weights(self, results: Sequence[Result], expected: Reference, here: str) -> None:
        rest = {**self.known, **expected.buffers}
        # A true zero is noise: errors are relative to the largest tensor of the same module.
        near: dict[str, float] = defaultdict(float)
        for name, value in rest.items():
            home = name.rpartition(".")[0]
            near[home] = max(near[home], FLOOR * largest(value))
        placed = set()
        for rank, (slices, optimizer) in enumerate(self.trained):
            for name, weight in ((str(w.name), w) for w in self.exact.program.devices[rank].weights):
                if name in slices:
                    slices[name].data = self._slice(self.known, weight).clone()
                    has_none = expected.gradients.get(weight.tensor) is None
                    given = None if has_none else results[rank].gradients.get(name)
                    slices[name].grad = None if given is None else given.to(slices[name].dtype)
            if optimizer is not None:
                optimizer.step()
            for name, weight in ((str(w.name), w) for w in self.exact.program.devices[rank].weights):
                placed.add(weight.tensor)
                if name in slices:
                    error = relative_error(results[rank].weights[name], slices[name].detach(), slices[name])
                else:
                    error = relative_error(
                        results[rank].weights[name],
                        self._slice(rest, weight),
                        rest[weight.tensor],
                        near[weight.tensor.rpartition(".")[0]],
                    )
                self._found("parameter_error", error, weight, rank, "after its update ", here)
                if name in slices and optimizer is not None:
                    error = _state_error(results[rank].state.get(name, {}), optimizer.state[slices[name]])
                    self._found("parameter_error", error, weight, rank, "the optimizer's state of ", here)
        for name in expected.buffers.keys() - placed:
            self.errors.add("parameter_error", float("inf"), name, f"{name}, a buffer that the module changes{here},")

    def _found(self, kind: str, error: float, weight: Weight, rank: int, what: str, here: str) -> None:
        text = f"{what}{Mask(weight.tensor, weight.box)} on device {rank}{here}"
        self._add(kind, error, weight.tensor, f"{weight.tensor} on device {rank}", text)

    def _add(self, kind: str, error: float, tensor: str, where: str, text: str) -> None:
        self.errors.add(kind, error, where, text, self.allowed(kind, tensor))


def floor_of(gradients: Iterable[Tensor]) -> float:
    """Return the least size to which errors of gradients are relative: some gradients are truly zero."""
    return FLOOR * max(map(largest, gradients), default=1.0)


def relative_error(have: Tensor, want: Tensor, whole: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest element of the whole tensor, or to `floor`."""
    return largest_gap(have, want) / max(largest(whole), floor, 1e-300)


def _state_error(have: Values, want: Mapping[str, object]) -> float:
    """Return the largest error of the optimizer's state of a slice."""
    tensors = {name: x for name, x in want.items() if isinstance(x, Tensor)}
    if have.keys() != tensors.keys():
        return float("inf")
    return max((relative_error(have[name], x, x) for name, x in tensors.items()), default=0.0)


# The gradient, the value and the optimizer's state of a weight or buffer.
Kept = tuple[Tensor | None, Tensor, dict[str, Tensor]]


def run_iterations(step: Step, batch: Mapping[str, Tensor]) -> list[Result]:
    """Return the state of a rank after each iteration of one step, all of them on one batch."""
    kept, rank = _Kept(step.state, step.iterations), step.state
    rank.update, rank.write = kept.keeping(rank.update), kept.keeping(rank.write)  # type: ignore[method-assign]
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
    """Copies of weights and buffers after each change; change k belongs to iteration k."""

    def __init__(self, rank: Rank, iterations: int) -> None:
        self.rank = rank
        self.times = Counter[str]()
        self.of: list[dict[str, Kept]] = [{} for _ in range(iterations)]

    def now(self, name: str) -> Kept:
        weight, optimizer = self.rank.weights[name], self.rank.optimizer
        state = optimizer.state.get(weight, {}) if optimizer is not None else {}
        tensors = {key: x for key, x in state.items() if isinstance(x, Tensor)}
        return copy.deepcopy((self.rank.gradients.get(name), weight.detach(), tensors))

    def keeping(self, change: Callable[..., None]) -> Callable[..., None]:
        """Return a function that calls `change` and then keeps copies of the changed weights."""

        def changing(pairs: Pairs, *more: Any, **options: Any) -> None:
            change(pairs, *more, **options)
            for name, _ in pairs:
                self.of[self.times[name]][name] = self.now(name)
                self.times[name] += 1

        return changing
