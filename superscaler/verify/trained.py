"""Steps in the trained dtypes: a plan may differ from eager steps as much as rounding makes these differ.

A plan splits sums differently from torch, and uses other kernels. The effect is measured by repeated eager steps: with
products and sums in parts, and with other adding operators computed in float64 and rounded up or down at random.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from statistics import median

import torch
from torch import Tensor

from superscaler.compiler import Compiled, finish
from superscaler.frontend.base.oracle import Reference, largest
from superscaler.ir.model import Model
from superscaler.runtime.compiled.in_parts import InParts
from superscaler.runtime.optimizer import ROUNDING
from superscaler.verify.compare import Comparison, Errors, floor_of, relative_error
from superscaler.verify.locate import Values
from superscaler.verify.oracles import Oracle, recurrence, retype
from superscaler.verify.results import Result

# Numbers of parts of sums, a sample of eager rounding each; further samples are taken if a plan exceeds those before.
SAMPLES = (range(2, 3), range(2, 9), range(2, 33))
# Factor by which an error may exceed the largest of a few measured rounding errors.
SPREAD = 4.0


class Noise:
    """The relative differences between steps that differ by rounding only, by tensor."""

    def __init__(self, model: Model) -> None:
        self.model, self.usual = model, 0.0
        self.found: dict[tuple[str, str], float] = defaultdict(float)

    def measure(self, plain: Reference, step: Callable[[], Reference], parts: Iterable[int]) -> None:
        """Repeat a step for each number of parts, and keep the largest differences."""
        first = dict(self._tensors(plain))
        least = floor_of(largest(x) for (kind, _), x in first.items() if kind == "gradient_error")
        for count in parts:
            with InParts(count):
                repeated = step()
            for key, value in self._tensors(repeated):
                floor = least if key[0] == "gradient_error" else 0.0
                error = relative_error(value, first[key], first[key], floor)
                # float16 may overflow in one order of addition only; that allows a plan no error.
                self.found[key] = max(self.found[key], error if isfinite(error) else 0.0)
        self.usual = median([x for (kind, _), x in self.found.items() if kind == "gradient_error"] or [0.0])

    def allowed(self, kind: str, tensor: str) -> float:
        """Return the error that a tensor may have: at least the median, as its own rounding may cancel by chance."""
        if (kind, tensor) not in self.found:
            # An update has no sums: torch's optimizer computes it from the plan's gradient.
            return ROUNDING
        dtype = getattr(torch, self.model.tensors[tensor].dtype)
        # Rounding may change an integer, as the choice between equal scores; only the steps in float64 compare these.
        digits = torch.finfo(dtype).eps if dtype.is_floating_point else inf
        return SPREAD * max(self.found[kind, tensor], self.usual, digits)

    def _tensors(self, step: Reference) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Yield the tensors that rounding changes, by kind of error and name."""
        for (kind, name), x in step.tensors().items():
            yield (f"{'parameter' if kind == 'buffer' else kind}_error", name or self.model.loss), x


def quiet(plan: Compiled) -> Compiled:
    """Return a plan without dropout and loss scale, as the eager steps are."""
    graph = retype(plan.graph, None)
    made = plan if graph.model.ops == plan.graph.model.ops else finish(graph, plan.cluster)
    if not (scaler := dict(graph.model.optimizer.scaler)):
        return made
    optimizer = replace(graph.model.optimizer, scaler=tuple({**scaler, "scale": 1.0}.items()))
    return replace(made, program=replace(made.program, model=replace(made.program.model, optimizer=optimizer)))


def near(own: Compiled, values: Values, results: Sequence[Sequence[Result]], oracle: Oracle) -> Errors:
    """Return the errors of steps, with those among eager steps from the same weights as limits."""
    for parts in SAMPLES:
        noise = Noise(own.graph.model)
        comparison = Comparison(own, values, noise.allowed)
        for number, found in enumerate(zip(*results, strict=True)):
            step = partial(recurrence, oracle, comparison.model, comparison.known, number)
            expected = step()
            noise.measure(expected, step, parts)
            comparison.add(found, expected)
        if comparison.errors.is_equal:
            break
    return comparison.errors
