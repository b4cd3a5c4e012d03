"""The segments of a program: the kernels and the memory of each, recorded once where calls are equal."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from superscaler.ir.mask import Box, extents
from superscaler.ir.model import Model, Op, Operand
from superscaler.ir.program import Backward, Forward, Function, Instruction, Program, Task, Value
from superscaler.ops.call import ranges
from superscaler.ops.table import PLACED, parts_of
from superscaler.simulate.callables import callables
from superscaler.simulate.recording import Recorder
from superscaler.simulate.works import Call, Kernel, Meta, Segment, Work

__all__ = ["Kernel", "Meta", "Segment", "Segments", "Work"]


Strides = tuple[tuple[int, tuple[int, ...]], ...]


class Segments:
    """The segments of a program. Equal calls are recorded once."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._run = callables(program)
        self._calls: dict[tuple[int, Call], Segment] = {}
        self._known: dict[Hashable, Segment] = {}
        # Functions whose kernels depend on the place of a part.
        functions = enumerate(program.functions)
        self._placed = {n for n, f in functions if any(op.target in PLACED for op in f.ops)}

    def of(self, forward: Forward, backward: Backward | None = None, strides: Strides = ()) -> Segment:
        """Return the segment of a forward and its backward, of two halves the first. `strides`: of inputs, by number,
        that are not contiguous.
        """
        given, first = tuple[bool, ...](), tuple[int, ...]()
        if backward is not None:
            given = tuple(g is not None for g in backward.gradients)
            sums = backward.sums or (None,) * len(backward.outputs)
            made = zip(backward.outputs, sums, strict=True)
            first = tuple(n for n, pair in enumerate(made) if backward.half and pair != (None, None))
        function = self.program.functions[forward.function]
        parts = self._parts(function, forward) if forward.function in self._placed else ()
        key = forward.function, Call(bool(function.grads), given, first, strides, parts)
        if key not in self._calls:
            self._calls[key] = self._segment(*key)
        return self._calls[key]

    def tasks(self, code: Iterable[Instruction]) -> dict[Task, Segment]:
        """Return the segment of each task of a device."""
        forwards, backwards = list[Forward](), dict[Task, Backward]()
        for i in code:
            if isinstance(i, Forward):
                forwards.append(i)
            elif isinstance(i, Backward):
                backwards.setdefault(i.task, i)
        found, strides = dict[Task, Segment](), dict[Value, tuple[int, ...]]()
        for i in forwards:
            own = tuple((n, strides[name]) for n, name in enumerate(i.inputs) if name in strides) if strides else ()
            found[i.task] = segment = self.of(i, backwards.get(i.task), own)
            strides |= {out: some for out, some in zip(i.outputs, segment.strides, strict=True) if some}
        return found

    def _parts(self, function: Function, forward: Forward) -> tuple[Box, ...]:
        placed = (op for op in function.ops if op.target in PLACED)
        pairs = zip(placed, function.boxes_at(forward.at, PLACED), strict=True)
        return tuple(part for op, box in pairs for part in parts_of(op, box, self.program.model.tensors).values())

    def _segment(self, number: int, call: Call) -> Segment:
        metas = tuple(input_metas(self.program.model, self.program.functions[number]))
        run = self._run[number]
        # Functions with the same text have the same name.
        key = run.__name__, metas, call
        if key not in self._known:
            self._known[key] = Recorder().segment(run, metas, call)
        return self._known[key]


def input_metas(model: Model, function: Function) -> Iterator[Meta]:
    """Yield the local shape and the dtype of each input of a function."""
    reader = {number: place for place, number in function.input_of.items()}
    ops = _ops(function)
    for number in range(len(function.inputs)):
        name, k = reader[number]
        yield _local(model, ops[name][0].inputs[k], ops[name][1])


def output_metas(model: Model, function: Function) -> Iterator[Meta]:
    """Yield the local shape and the dtype of each result of a function."""
    made = {o.tensor: _local(model, o, box) for op, box in _ops(function).values() for o in op.outputs}
    yield from (made[name] for name in function.outputs)


def _ops(function: Function) -> dict[str, tuple[Op, Box]]:
    return {op.name: (op, box) for op, box in zip(function.ops, function.boxes, strict=True)}


def _local(model: Model, operand: Operand, box: Box) -> Meta:
    tensor = model.tensors[operand.tensor]
    return tensor.local_shape(extents(ranges(operand, tensor, box))), tensor.dtype
