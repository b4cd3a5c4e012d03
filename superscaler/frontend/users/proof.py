"""Proof of an op's notation: the op is executed in parts, forward and backward, and compared with the whole.

record (one call) -> ops_of (its indices) -> prove (each index and each pair of indices, in 2 and 3 parts)
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations, pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.nn import Buffer

from superscaler.frontend.base.samples import NORMAL, TRIED, Kind
from superscaler.frontend.base.trace import Trace
from superscaler.frontend.infer import infer
from superscaler.frontend.model_builder import Builder
from superscaler.ir.mask import Box, Range
from superscaler.ir.model import Op, Operand, PTensor, TensorKind

# Executes one part of an op: (box, local operands, expected shapes of results) -> results.
Run = Callable[[Box, Sequence[Tensor], Sequence[tuple[int, ...]]], Sequence[Tensor]]
Cut = Mapping[int, tuple[int, ...]]
Tensors = Mapping[str, PTensor]


@dataclass(frozen=True, slots=True)
class Failure:
    """A difference between an op in parts and the whole op: the cut (sizes by index), the tensor, its difference.

    `is_raised`: a part cannot be computed.
    """

    op: Op
    cut: Cut
    tensor: str
    difference: str
    is_raised: bool = False

    def __str__(self) -> str:
        cuts = " and ".join(f"{self.op.indices[i].factor} in {' + '.join(map(str, s))}" for i, s in self.cut.items())
        how = f" cut on {cuts}" if cuts else ""
        return f"{self.op.notation()}{how}: {self.tensor} {self.difference}"


def record(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Trace, dict[str, Tensor]]:
    """Return the trace of one call on tensors x0, x1, ... (in order), and their values by name.

    The call is executed once, for the shapes of its results. A `torch.nn.Buffer` has no gradient.
    """
    trace = Trace(Graph())
    values: dict[str, Tensor] = {}

    def leaf(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(leaf(v) for v in value)
        if not isinstance(value, Tensor):
            return value
        values[f"x{len(values)}"] = value
        kind: TensorKind = "buffer" if isinstance(value, Buffer) else "input"
        return trace.leaf(f"x{len(values) - 1}", kind, value)

    found = function(*args, **kwargs)
    trace.graph.output(())
    with trace.graph.inserting_before(trace.graph.output_node()):
        node = trace.graph.call_function(function, leaf(args), {k: leaf(v) for k, v in kwargs.items()})
    results = trace.name_call(node, "op", {"module": "", "source": ""}, found)
    trace.graph.output_node().args = (results[:1],)
    return trace, values


def ops_of(trace: Trace) -> tuple[list[Op], dict[str, PTensor]]:
    """Return the ops of a trace with the indices that the rules give them, and its tensors."""
    builder = Builder(trace, infer(trace), set())
    return builder.forward(), {node.name: builder.tensor(node) for node in builder.found.dims}


def prove(op: Op, tensors: Tensors, values: Sequence[Tensor], run: Run, kind: Kind = NORMAL) -> Failure | None:
    """Return the first difference between the op in parts and the whole op; None if its notation is true. Raises
    NoGradientError if its backward raises.

    `values`: those of `op.inputs`, floating ones in float64. All floating inputs except buffers have gradients. Each
    index that may be cut is cut in 2 and 3 parts, even and uneven, and each pair of indices in 2 parts each. The marks
    determine how results of parts are joined. The backward of a part gets its piece of a random output gradient;
    gradients of an input are added on the elements that each part reads. In each set of inputs in `op.linear` the op
    must be 0 at 0 and additive. Values of a kind other than NORMAL are cut less.
    """
    job = _Job(op, tensors, values, run)
    cut: Cut = {}
    try:
        expected = job.execute(cut)
        for cut in _cuts(op) if kind is NORMAL else _halves(op):
            found = job.execute(cut)
            for tensor, value in expected.items():
                _compare(tensor, found[tensor], value, kind)
        cut = {}
        for group in op.linear:
            if all(values[k].is_floating_point() for k in group):
                job.superpose(group)
    except _Wrong as wrong:
        return Failure(op, cut, *wrong.args)
    return None


def _cuts(op: Op) -> Iterator[Cut]:
    free = {n: i.size for n, i in enumerate(op.indices) if i.mark != "frozen"}
    for n, size in free.items():
        even = [tuple(size // k + (j < size % k) for j in range(k)) for k in (2, 3)]
        uneven = [(1, size - 1), (size - 1, 1), (1, size - 2, 1)]
        yield from ({n: sizes} for sizes in dict.fromkeys(even + uneven) if min(sizes))
    for a, b in combinations(free, 2):
        yield {a: (1, free[a] - 1), b: (free[b] - free[b] // 2, free[b] // 2)}


def _halves(op: Op) -> Iterator[Cut]:
    """Yield cuts of each index in the middle and after its first element."""
    for n, size in ((n, i.size) for n, i in enumerate(op.indices) if i.mark != "frozen"):
        yield from ({n: sizes} for sizes in dict.fromkeys([(size - size // 2, size // 2), (1, size - 1)]))


class NoGradientError(Exception):
    """The error of an operator's backward."""


class _Wrong(Exception):
    """A wrong tensor of an op in parts, and its fault."""


def _compare(tensor: str, found: Tensor, expected: Tensor, kind: Kind, tolerance: float = 0.0) -> None:
    found, expected = found.detach().double(), expected.detach().double()
    equal = kind.is_close(found, expected, tolerance)
    if not equal.all():
        at = tuple((~equal).nonzero()[0].tolist())
        raise _Wrong(tensor, f"is {found[at].item():.9g} at {list(at)}, of the whole op {expected[at].item():.9g}")


@dataclass(frozen=True, slots=True)
class _Job:
    op: Op
    tensors: Tensors
    values: Sequence[Tensor]
    run: Run

    def execute(self, cut: Cut) -> dict[str, Tensor]:
        """Return the results and the gradients of the inputs, joined from the parts of a cut."""
        ranges: list[list[Range]] = []
        for n, index in enumerate(self.op.indices):
            ends = list(accumulate(cut.get(n, (index.size,)), initial=0))
            ranges.append(list(pairwise(ends)))
        total: dict[str, Tensor] = {}
        for own in product(*ranges):
            untils = (index.until for index in self.op.indices)
            box = tuple(r if until is None else (0, own[until][1]) for r, until in zip(own, untils, strict=True))
            pieces = [self._piece(o, v, box) for o, v in zip(self.op.inputs, self.values, strict=True)]
            results = self._forward(box, pieces)
            self._add("result", self.op.outputs, results, box, total)
            self._add("gradient of operand", self.op.inputs, self._backward(box, pieces, results), box, total)
        return total

    def superpose(self, group: tuple[int, ...]) -> None:
        """Compare f(a + b) with f(a) + f(b), and f(0) with 0, in these inputs together, on the whole op."""
        box = tuple((0, index.size) for index in self.op.indices)

        def outcome(change: Callable[[Tensor], Tensor]) -> list[Tensor]:
            changed = [change(v) if k in group else v for k, v in enumerate(self.values)]
            return self._forward(box, [self._piece(o, v, box) for o, v in zip(self.op.inputs, changed, strict=True)])

        where = f"is not linear in operands {list(group)} together"
        for k, zero in enumerate(outcome(torch.zeros_like)):
            _compare(f"result {k} {where}: at 0 it", zero, torch.zeros_like(zero), NORMAL)
        for size in (1.0, 2.0**20):
            a, b = outcome(lambda v, s=size: v * s), outcome(lambda v, s=size: (v * v - 1) * s)  # type: ignore[misc]
            both = outcome(lambda v, s=size: (v * v + v - 1) * s)  # type: ignore[misc]
            for k, (x, y, z) in enumerate(zip(a, b, both, strict=True)):
                # A cast to fewer bits rounds, and large numbers overflow in it.
                rounding = 4 * torch.finfo(z.dtype).eps if z.is_floating_point() else 0.0
                if size == 1.0 or z.dtype == torch.float64:
                    _compare(f"result {k} {where}: the sum", x + y, z, TRIED, rounding)

    def _forward(self, box: Box, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Execute a part, and compare the shapes of its results with the notation."""
        for piece, operand in zip(pieces, self.op.inputs, strict=True):
            is_buffer = self.tensors[operand.tensor].kind == "buffer"
            piece.requires_grad_(piece.is_floating_point() and not is_buffer)
        shapes = [self._shape(o, box) for o in self.op.outputs]
        try:
            results = list(self.run(box, pieces, shapes))
        except Exception as error:
            # The user's operator may raise any exception.
            raise _Wrong("the part", f"{box} fails: {error}", True) from error
        if (found := [tuple(r.shape) for r in results]) != shapes:
            raise _Wrong("the part", f"{box} gives the shapes {found}, its notation {shapes}")
        return results

    def _backward(self, box: Box, pieces: Sequence[Tensor], results: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradient of each floating operand from a random gradient of the results."""
        chosen, given = [], []
        for k, (operand, result) in enumerate(zip(self.op.outputs, results, strict=True)):
            shape, generator = self.tensors[operand.tensor].shape, torch.Generator().manual_seed(k)
            if result.requires_grad:
                chosen.append(result)
                gradient = torch.randn(shape, generator=generator, dtype=torch.float64)
                given.append(self._piece(operand, gradient, box).to(result.dtype))
        wanted = [piece for piece in pieces if piece.requires_grad]
        if not chosen or not wanted:
            return [None] * len(pieces)
        try:
            found = iter(torch.autograd.grad(chosen, wanted, given, materialize_grads=True))
        except Exception as error:
            # The backward of the user's operator may raise any exception.
            raise NoGradientError(error) from error
        return [next(found) if piece.requires_grad else None for piece in pieces]

    def _add(
        self, what: str, operands: Sequence[Operand], found: Sequence[Tensor | None], box: Box, total: dict[str, Tensor]
    ) -> None:
        for k, (operand, value) in enumerate(zip(operands, found, strict=True)):
            if value is not None:
                tensor, slices = self.tensors[operand.tensor], self._slices(operand, box)
                whole = total.setdefault(f"{what} {k}", torch.zeros(tensor.extents, dtype=value.dtype))
                whole[slices] += value.detach().reshape(whole[slices].shape)

    def _slices(self, operand: Operand, box: Box) -> tuple[slice, ...]:
        extents = self.tensors[operand.tensor].extents
        pairs = zip(operand.slots, extents, strict=True)
        return tuple(slice(0, extent) if i is None else slice(*box[i]) for i, extent in pairs)

    def _shape(self, operand: Operand, box: Box) -> tuple[int, ...]:
        return self.tensors[operand.tensor].local_shape(tuple(s.stop - s.start for s in self._slices(operand, box)))

    def _piece(self, operand: Operand, value: Tensor, box: Box) -> Tensor:
        """Return a copy of a part's box of a tensor."""
        pieces = value.detach().reshape(self.tensors[operand.tensor].extents)[self._slices(operand, box)]
        return pieces.reshape(self._shape(operand, box)).clone()
