"""Comparison of a plan's tensors with those of one device, step by step and iteration by iteration."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from superscaler.artifact import slots_of
from superscaler.compiler import Compiled
from superscaler.frontend.base.oracle import Reference, dense, largest, largest_gap
from superscaler.ir.mask import Mask
from superscaler.ir.program import Weight, gives
from superscaler.runtime.executor import put, take
from superscaler.verify.locate import FLOOR, TOLERANCE, Values
from superscaler.verify.results import Result

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
    """A comparison of the steps of a plan one by one, each from the plan's weights before it.

    A gradient whose true value is zero is noise, and Adam turns noise into steps of any size. So the update of each
    slice is compared with that of torch's own optimizer on the plan's gradient of the slice. In mixed precision torch
    updates a float32 copy of the slice; a weight is compared with the plan's own copy, rounded.
    """

    def __init__(self, exact: Compiled, values: Values, allowed: Allowed = lambda kind, tensor: TOLERANCE) -> None:
        self.exact, self.model, self.allowed = exact, exact.graph.model, allowed
        # Whole tensors; the weights after each step are written into them.
        self.known = {name: value.clone(memory_format=torch.contiguous_format) for name, value in values.items()}
        self.errors = Errors()
        # By option: its value, and the largest error of its step.
        self.options: dict[str, dict[str, float]] = {}
        self.steps = 0
        self.updated = {op.inputs[0].tensor for op in self.model.ops if op.is_update}
        self.weights = [exact.program.weights(rank) for rank in range(exact.program.world)]
        self.trained = [self._trained_slices(weights) for weights in self.weights]

    def _trained_slices(self, weights: Sequence[Weight]) -> tuple[dict[str, Tensor], list[torch.optim.Optimizer]]:
        """Return slices of a device's trained weights, or their float32 copies, and the user's optimizers over them.

        These are made as the user made them, by torch alone: by none of the code that makes those of ranks.
        """
        found, by_name = {}, defaultdict[str, list[Tensor]](list)
        for weight in weights:
            if weight.tensor in self.updated:
                piece = self._slice(self.known, weight).clone()
                is_copied = self.model.optimizer.has_copy(self.model.tensors[weight.tensor].dtype)
                found[str(weight.name)] = piece = (piece.float() if is_copied else piece).requires_grad_()
                by_name[self.model.segments.get(weight.tensor, (weight.tensor,))[0]].append(piece)
        made = (given.over(by_name) for given in self.exact.graph.captured.call.optimizers)
        return found, [one for one in made if one is not None]

    def _slice(self, whole: Values, weight: Weight) -> Tensor:
        return take(whole[weight.tensor], slots_of(self.model, weight.tensor), weight.box)

    def add(self, results: Sequence[Result], expected: Reference, noise: tuple[float, float] = (0.0, 0.0)) -> None:
        """Compare the next step, then keep its weights for the step after it. `noise`: see `noise_of`."""
        self.steps += 1
        here, option, self._largest = "" if self.steps == 1 else f" in step {self.steps}", results[0].option, 0.0
        if option is not None:
            here, expected = f" in {option}", option.of(expected, self.updated)
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
        if option is not None:
            self.options[option.name] = {"value": option.value, "error": self._largest}

    def _each(self) -> Iterator[tuple[int, Weight]]:
        for rank, weights in enumerate(self.weights):
            for weight in weights:
                yield rank, weight

    def _gradients(self, results: Sequence[Result], expected: Reference, here: str, noise: float) -> None:
        # The segments of a packed weight are known, not the weight itself.
        whole = {n: dense(g, self.known[n] if g is None else g) for n, g in expected.gradients.items()}
        sizes = {n: largest(g) for n, g in whole.items()}
        floor = max(floor_of(sizes.values()), noise)
        for rank, weight in self._each():
            if weight.tensor in whole:
                want = self._slice(whole, weight)
                have = dense(results[rank].gradients.get(str(weight.name)), want)
                error = relative_error(have, want, sizes[weight.tensor], floor)
                self._found("gradient_error", error, weight, rank, "the gradient of ", here)

    def _outputs(self, results: Sequence[Result], expected: Reference, here: str) -> None:
        has_outputs = any(op.is_output for op in self.model.ops)
        for rank, device in enumerate(self.exact.program.devices if has_outputs else ()):
            for i in gives(device.instructions):
                whole = expected.outputs[i.tensor]
                want = take(whole, slots_of(self.model, i.tensor), i.box)
                text = f"the output {Mask(i.tensor, i.box)} on device {rank}{here}"
                error = relative_error(results[rank].outputs[i.tensor], want, whole)
                self._add("output_error", error, i.tensor, i.tensor, text)

    def _weights(self, results: Sequence[Result], expected: Reference, here: str) -> None:
        rest = {**self.known, **expected.buffers}
        # A true zero is noise: errors are relative to the largest tensor of the same module.
        near: dict[str, float] = defaultdict(float)
        for name, value in rest.items():
            home = name.rpartition(".")[0]
            near[home] = max(near[home], FLOOR * largest(value))
        placed = set()
        for rank, (slices, optimizers) in enumerate(self.trained):
            for name, weight in ((str(w.name), w) for w in self.weights[rank]):
                if name in slices:
                    if slices[name].dtype == self.known[weight.tensor].dtype:
                        slices[name].data = self._slice(self.known, weight).clone()
                    has_none = expected.gradients.get(weight.tensor) is None
                    given = None if has_none else results[rank].gradients.get(name)
                    slices[name].grad = None if given is None else given.to(slices[name].dtype)
            for optimizer in optimizers:
                optimizer.step()
            states = {piece: state for optimizer in optimizers for piece, state in optimizer.state.items()}
            for name, weight in ((str(w.name), w) for w in self.weights[rank]):
                placed.add(weight.tensor)
                state = dict(results[rank].state.get(name, {}))
                if name in slices:
                    want = whole = self._updated(slices[name], state, weight, rank, here)
                    floor = 0.0
                else:
                    want, whole = self._slice(rest, weight), rest[weight.tensor]
                    floor = near[weight.tensor.rpartition(".")[0]]
                error = relative_error(results[rank].weights[name], want, whole, floor)
                self._found("parameter_error", error, weight, rank, "after its update ", here)
                if name in slices:
                    error = _state_error(state, states.get(slices[name], {}))
                    self._found("parameter_error", error, weight, rank, "the optimizer's state of ", here)
        for name in expected.buffers.keys() - placed:
            self._add("parameter_error", float("inf"), name, name, f"{name}, a buffer that the module changes{here},")

    def _updated(self, own: Tensor, state: dict[str, Tensor], weight: Weight, rank: int, here: str) -> Tensor:
        """Return a slice that torch updated. A float32 copy is taken out of `state`, and compared with torch's. Then
        the slice is that copy, rounded, and torch's next step starts from it.
        """
        kept = state.pop("copy", None)
        if kept is None:
            return own.detach()
        error = relative_error(kept, own.detach(), own)
        self._found("parameter_error", error, weight, rank, "after its update the float32 copy of ", here)
        own.data = kept.clone()
        return kept.to(self.known[weight.tensor].dtype)

    def _found(self, kind: str, error: float, weight: Weight, rank: int, what: str, here: str) -> None:
        text = f"{what}{Mask(weight.tensor, weight.box)} on device {rank}{here}"
        self._add(kind, error, weight.tensor, f"{weight.tensor} on device {rank}", text)

    def _add(self, kind: str, error: float, tensor: str, where: str, text: str) -> None:
        if not error <= self._largest:
            self._largest = error
        self.errors.add(kind, error, where, text, self.allowed(kind, tensor))


def floor_of(sizes: Iterable[float]) -> float:
    """Return the least size to which errors of gradients are relative, given the largest element of each: some
    gradients are truly zero.
    """
    return FLOOR * max(sizes, default=1.0)


def relative_error(have: Tensor, want: Tensor, whole: Tensor | float, floor: float = 0.0) -> float:
    """Return the largest difference, relative to the largest element of the whole tensor (or to this, where it is
    known), or to `floor`.
    """
    size = largest(whole) if isinstance(whole, Tensor) else whole
    return largest_gap(have, want) / max(size, floor, 1e-300)


def _state_error(have: Values, want: Mapping[str, object]) -> float:
    """Return the largest error of the optimizer's state of a slice."""
    tensors = {name: x for name, x in want.items() if isinstance(x, Tensor)}
    if have.keys() != tensors.keys():
        return float("inf")
    return max((relative_error(have[name], x, x) for name, x in tensors.items()), default=0.0)


# A value below _TINY may be a true zero, as a loss that is the divergence of two equal distributions. Then the step is
# repeated with weights changed by _CHANGE (relative), and a plan may differ by _TIMES the resulting change.
_TINY, _CHANGE, _TIMES = 1e-9, 1e-12, 100


def noise_of(run: Callable[[Values], Reference], known: Values, expected: Reference) -> tuple[float, float]:
    """Return the least sizes to which errors of the loss and of gradients are relative; 0 unless these are tiny.

    Weights that differ in their last digits change the rounding of a true zero entirely, but hardly change a small
    value. So a small loss is compared like any other.
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
