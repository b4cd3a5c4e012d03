"""The seconds of instructions from counts: operations of products, and bytes of other operators. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from superscaler.cluster import Cluster
from superscaler.cluster.devices import DeviceKind, Pair, Speeds
from superscaler.ir.cohorts import Cohort
from superscaler.ir.mask import extents
from superscaler.ir.model import width
from superscaler.ir.program import Backward, Forward, Function, Instruction, Program, Task, Update
from superscaler.ops.call import ranges

# Operators that move nothing.
_VIEWS = "view _unsafe_view reshape t transpose permute expand unsqueeze squeeze slice select split split_with_sizes "
_VIEWS += "chunk unbind narrow detach alias identity"
# An update reads and writes a weight and two states, and reads the gradient.
_UPDATE = 7
# A core of a CPU, for devices about which nothing is known: 50 Gflop/s, 10 GB/s, 2 us for a kernel.
_CORE = Speeds(units=0, products={"float32": (50e9, 50e9)}, memory=(10e9, 10e9))
_GUESSED = (
    "Nothing is known about the speed of {cluster}: its times are those of a core with 50 Gflop/s and 10 GB/s. Measure "
    "it with superscaler doctor --measure --out machine.yaml, and compile with --cluster machine.yaml."
)


def with_speeds(cluster: Cluster) -> tuple[Cluster, list[str]]:
    """Return a cluster whose devices have speeds, and a remark if the speeds were assumed."""
    kind = cluster.device_kind
    if kind is not None and kind.speeds is not None:
        return cluster, []
    kind = DeviceKind("core", 0, {}, _CORE) if kind is None else replace(kind, speeds=_CORE)
    return replace(cluster, device_kind=kind), [_GUESSED.format(cluster=cluster)]


class Counts:
    """The seconds of the instructions of a program on devices of some speeds, by counts.

    An operator takes the longer of its operations and its bytes, a backward twice as long as its forward; slices and
    sums take no time.
    """

    def __init__(self, program: Program, speeds: Speeds) -> None:
        self.program, self.speeds = program, speeds
        self._forwards = list(map(self._function, program.functions))
        self._moved = list(map(self._results, program.functions))
        self._seconds: dict[int, list[float]] = {}

    def seconds(self, cohort: Cohort, at: int) -> float:
        """Return the seconds of an instruction of a cohort."""
        if cohort.number not in self._seconds:
            code = cohort.code[:]
            functions = {i.task: i.function for i in code if isinstance(i, Forward)}
            self._seconds[cohort.number] = [self._instruction(i, functions, cohort) for i in code]
        return self._seconds[cohort.number][at]

    def _instruction(self, i: Instruction, functions: dict[Task, int], cohort: Cohort) -> float:
        match i:
            case Forward():
                return self._forwards[i.function]
            case Backward():
                return self._forwards[functions[i.task]] * (1 if i.half else 2)
            case Update():
                boxes = {w.name: prod(extents(w.box)) for w in cohort.weights}
                return _UPDATE * 4 * sum(boxes[name] for name in i.weights) / _mean(self.speeds.memory)
        return 0.0

    def moved(self, cohort: Cohort, task: Task) -> int:
        """Return the bytes of the results of the operators of a task."""
        function = next(i.function for i in cohort.code if isinstance(i, Forward) and i.task == task)
        return self._moved[function]

    def _results(self, function: Function) -> int:
        tensors = self.program.model.tensors
        pairs = ((o, box) for op, box in zip(function.ops, function.boxes, strict=True) for o in op.outputs)
        made = ((tensors[o.tensor], ranges(o, tensors[o.tensor], box)) for o, box in pairs)
        return sum(prod(extents(box)) * width(tensor.dtype) for tensor, box in made)

    def _function(self, function: Function) -> float:
        each = [self._op(function, k) for k in range(len(function.ops))]
        return max(sum(each), self.speeds.issue * sum(seconds > 0 for seconds in each))

    def _op(self, function: Function, k: int) -> float:
        op, box, tensors = function.ops[k], function.boxes[k], self.program.model.tensors
        if not op.flops and op.target.split(".")[1] in _VIEWS.split():
            return 0.0
        operands = [(o, tensors[o.tensor]) for o in (*op.inputs, *op.outputs)]
        moved = sum(prod(extents(ranges(o, tensor, box))) * width(tensor.dtype) for o, tensor in operands)
        share = prod(extents(box)) / prod(i.size for i in op.indices)
        products = self.speeds.products
        rate = products.get(operands[-1][1].dtype) or next(iter(products.values()))
        return max(op.flops * share / _mean(rate), moved / _mean(self.speeds.memory))


def unit(speeds: Speeds) -> str:
    """Return one line that explains the seconds of `Counts`."""
    rates: Sequence[Pair] = sorted(speeds.products.values(), key=_mean)
    return (
        f"seconds are counts: products at {_mean(rates[-1]) / 1e12:.3g} Tflop/s, bytes of other operators at "
        f"{_mean(speeds.memory) / 1e9:.4g} GB/s, communication by the cluster's links"
    )


def _mean(pair: Pair) -> float:
    return sum(pair) / 2
