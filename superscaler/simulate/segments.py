"""The segments of a program: each distinct call of a function is recorded once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np

from superscaler.ir.cohorts import Cohort
from superscaler.ir.grid import Ints
from superscaler.ir.mask import Box, extents
from superscaler.ir.model import Model, Op, Operand
from superscaler.ir.program import (
    Backward,
    Device,
    Forward,
    Function,
    Instruction,
    Program,
    Role,
    Task,
    Value,
    calls,
    names,
)  # fmt: skip
from superscaler.ir.running.machine import Domain, Lap, Walk, execute
from superscaler.ir.variants import once, without_twins
from superscaler.ops.call import ranges
from superscaler.ops.table import PLACED, parts_of
from superscaler.runtime.functions.documents import given_packing
from superscaler.runtime.functions.tracing import balanced, is_static
from superscaler.simulate.fusing import RecordedSegments
from superscaler.simulate.rates import GROUPED, flops_of
from superscaler.simulate.recording import Recorder, alone, callables
from superscaler.simulate.repeats.steady import Pace, laps_of
from superscaler.simulate.repeats.steps import Step, steps
from superscaler.simulate.works import Call, Kernel, Meta, Segment, Work
from superscaler.specs.registered import REGISTERED

# Operators that leave out what no query of a part sees.
_BY_PLACE = frozenset({"ss.attention_block", "ss.attention_gradient", "ss.attention_documents"})
# The kernels of ops of all models of this process, but of those that may be registered anew.
_KERNELS: dict[str, Sequence[Kernel]] = {}
# The segments of all programs of this process, and the most of them.
_RECORDED: dict[Hashable, Segment] = {}
_MOST = 4096
Strides = tuple[tuple[int, tuple[int, ...]], ...]
Dtypes = tuple[tuple[int, str], ...]


class Segments:
    """The segments of a program. Equal calls are recorded once. `on_gpu`: as a GPU runs them; `torch_compile`: as
    Inductor compiles them. `balance`: the tokens of experts on the busiest of several devices, by their mean.
    """

    def __init__(
        self,
        program: Program,
        on_gpu: bool = False,
        torch_compile: bool = False,
        cuda_graph: bool = False,
        balance: float = 1.0,
    ) -> None:
        self.program, self.on_gpu, self.torch_compile = program, on_gpu, torch_compile
        self.balance = balance
        # Whether updates are fused where the user leaves it open.
        self.fuses = torch_compile or cuda_graph
        self._run = callables(program, on_gpu=on_gpu)
        self._calls: dict[Hashable, Segment] = {}
        self._tasks: dict[int, tuple[dict[Task, Segment], dict[Task, int]]] = {}
        self._laps: dict[int, list[Lap[Pace]]] = {}
        self._moved: dict[int, dict[Task, int]] = {}
        self._known: dict[Hashable, Segment] = {}
        # Functions that get the place of a part, and whether their kernels depend on it.
        targets = ({op.target for op in f.ops} for f in program.functions)
        self._placed = {n: not _BY_PLACE.isdisjoint(own) for n, own in enumerate(targets) if own & PLACED}

    def of(
        self, forward: Forward, backward: Backward | None = None, strides: Strides = (), added: Iterable[int] = (),
        rounded: Dtypes = (),
    ) -> Segment:  # fmt: skip
        """Return the segment of a forward and its backward, or of the first half of a split one. `strides`: of
        non-contiguous inputs, by number; `added`: the aliases whose gradients are added to sums, in both halves;
        `rounded`: the dtypes of inputs that were rounded before they were gathered.
        """
        given, first = tuple[bool, ...](), tuple[int, ...]()
        if backward is not None:
            given = tuple([g is not None for g in backward.gradients])
            if backward.half:
                sums = backward.sums or (None,) * len(backward.outputs)
                made = zip(backward.outputs, sums, strict=True)
                first = tuple(n for n, pair in enumerate(made) if pair != (None, None))
        function = self.program.functions[forward.function]
        parts = self._parts(function, forward.at) if forward.function in self._placed else ()
        key = forward.function, given, first, strides, parts, tuple(sorted(added)), rounded
        if key not in self._calls:
            self._calls[key] = self._segment(forward.function, Call(bool(function.grads), *key[1:]))
        return self._calls[key]

    def variants(self, cohort: Cohort) -> tuple[list[Device], Ints]:
        """Return devices of a cohort that have kernels of their own, and for each device the number of its equal.

        Of a ring, each device sees other blocks of keys, by its place.
        """
        if not any(self._placed.values()):
            return [cohort.samples[0]], np.zeros(len(cohort), dtype=np.int64)
        functions, numbers = self.program.functions, dict[tuple[Box, ...], int]()
        last = {(i.function, i.at): n for n, i in calls(cohort.code[:])}
        moved = [(f, cohort.data(n, "at").tolist()) for (f, _), n in last.items() if self._placed.get(f)]
        found = []
        for row in range(len(cohort)):
            parts = tuple(part for f, at in moved for part in self._parts(functions[f], at[row], _BY_PLACE))
            found.append(numbers.setdefault(parts, len(numbers)))
        firsts = [cohort.devices[found.index(n)] for n in numbers.values()]
        return [self.program.devices[int(rank)] for rank in firsts], np.array(found)

    def tasks(self, device: Device) -> dict[Task, Segment]:
        """Return the segment of each task of a device."""
        return self._of(device)[0]

    def functions(self, device: Device) -> dict[Task, int]:
        """Return the number of the function of each task of a device."""
        return self._of(device)[1]

    def walk(self, device: Device, domain: Domain[Instruction, Pace]) -> None:
        """Run the code of a device, loops until they repeat."""
        if device.rank not in self._laps:
            self._laps[device.rank] = laps_of(device.instructions, *self._of(device))
        execute([Walk(device.instructions, domain, self._laps[device.rank])])

    def _of(self, device: Device) -> tuple[dict[Task, Segment], dict[Task, int]]:
        if device.rank not in self._tasks:
            self._tasks[device.rank] = self._found(device.instructions)
        return self._tasks[device.rank]

    def moved(self, device: Device) -> dict[Task, int]:
        """Return the bytes of each tape that goes to the host, without weights and what stays."""
        if device.rank not in self._moved:
            found, code = self.tasks(device), device.instructions[:]
            forwards = {i.task: i for _, i in calls(code)}
            rest = {weight.name for weight in device.weights}
            self._moved[device.rank] = {
                i.task: _moved_bytes(found[i.task], forwards[i.task], rest.union(names(i, Role.READ)))
                for i in code
                if i.task is not None and i.to_host
            }
        return self._moved[device.rank]

    def _found(self, code: Sequence[Instruction]) -> tuple[dict[Task, Segment], dict[Task, int]]:
        """Return the segment and the function of each task."""
        forwards = list[tuple[Task, Forward, Step, int]]()
        backwards, added = dict[Task, Backward](), dict[Task, set[int]]()
        # By forward, the dtypes of rounded inputs; those of the handles and the names that hold some now.
        rounded, dtypes = dict[Task, Dtypes](), dict[Value, str]()
        for step, _, turn in steps(code):
            i = step.first
            if i.function >= 0:
                task = step.moved("task", turn)
                forwards.append((task, cast("Forward", i), step, turn))
                if dtypes:
                    given = enumerate(step.moved("inputs", turn))
                    rounded[task] = tuple((n, dtypes[name]) for n, name in given if name in dtypes)
            elif i.rounded:
                dtypes |= {work: i.rounded for work in step.handles_at(turn) if work is not None}
            elif i.whole is not None and dtypes:
                source = step.moved("whole", turn)
                dtypes |= {step.moved("out", turn): dtypes[source]} if source in dtypes else {}
            elif i.is_mirror:
                task, mirror = step.moved("task", turn), cast("Backward", i)
                backwards.setdefault(task, mirror)
                added.setdefault(task, set()).update(n for n, total in enumerate(mirror.sums) if total is not None)
        found, strides = dict[Task, Segment](), dict[Value, tuple[int, ...]]()
        for task, i, step, turn in forwards:
            inputs = step.moved("inputs", turn) if strides else ()
            own = tuple((n, strides[name]) for n, name in enumerate(inputs) if name in strides)
            if i.function in self._placed:
                i = replace(i, at=step.moved("at", turn))
            found[task] = segment = self.of(i, backwards.get(task), own, added.get(task, ()), rounded.get(task, ()))
            if any(segment.strides):
                outputs = zip(step.moved("outputs", turn), segment.strides, strict=True)
                strides |= {out: some for out, some in outputs if some}
        return found, {task: i.function for task, i, *_ in forwards}

    def _parts(self, function: Function, at: Sequence[int], targets: Container[str] = PLACED) -> tuple[Box, ...]:
        placed = (op for op in function.ops if op.target in targets)
        pairs = zip(placed, function.boxes_at(at, targets), strict=True)
        return tuple(part for op, box in pairs for part in parts_of(op, box, self.program.model.tensors).values())

    def _segment(self, number: int, call: Call) -> Segment:
        plain, dtypes = input_metas(self.program.model, self.program.functions[number]), dict(call.rounded)
        metas = tuple((shape, dtypes.get(n, dtype)) for n, (shape, dtype) in enumerate(plain))
        run = self._run[number]
        # Functions with the same text have the same name.
        key = run.__name__, metas, call
        if key not in self._known:
            self._known[key] = recorded(run, metas, call, self.on_gpu, self.torch_compile, self.balance)
        return self._known[key]


def recorded(
    run: Callable[..., Any],
    metas: tuple[Meta, ...],
    call: Call,
    on_gpu: bool = False,
    torch_compile: bool = False,
    balance: float = 1.0,
) -> Segment:
    """Return the segment of a function under a call. Functions of other plans with the same text are not run again."""
    text = run.__dict__["text"]
    key = text, metas, call, on_gpu, torch_compile, given_packing(), is_static(), balance
    if key in _RECORDED:
        return _RECORDED[key]
    recorder = Recorder(on_gpu)
    recorder.compiled = RecordedSegments(recorder) if torch_compile else None
    with balanced(balance):
        found = recorder.segment(run, metas, call)
    if balance > 1 and torch_compile:
        backward = tuple(_busiest(work, balance) for work in found.backward)
        found = replace(found, forward=_busiest(found.forward, balance), backward=backward)
    if len(_RECORDED) >= _MOST:
        _RECORDED.clear()
    # A registered operator may be registered anew.
    return found if text is None else _RECORDED.setdefault(key, found)


def _busiest(work: Work, balance: float) -> Work:
    """Return work in which the groups of a part of all experts have `balance` times as many rows. Compiled code has a
    row for each choice in memory, those of other devices included.
    """

    def busiest(kernel: Kernel) -> Kernel:
        (rows, dtype), *others = kernel.inputs
        return replace(kernel, inputs=(((round(rows[0] * balance), *rows[1:]), dtype), *others))

    def is_part(kernel: Kernel) -> bool:
        weights = kernel.outputs if kernel.name == "grouped_outer" else kernel.inputs[1:]
        return kernel.name in GROUPED and weights[0][0][0] < kernel.inputs[2][0][0]

    return replace(work, kernels=tuple(busiest(k) if is_part(k) else k for k in work.kernels))


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


def _moved_bytes(segment: Segment, i: Forward, stays: Container[Value]) -> int:
    ends = (*enumerate(i.inputs), *zip(segment.results, i.outputs, strict=True))
    left = segment.tapes[0].held.difference(number for number, name in ends if name in stays)
    return segment.tapes[0].bytes + sum(segment.sizes[number] for number in left)


def model_flops(model: Model) -> Counter[str]:
    """Return the operations of a step of a model on one device, without recomputation, by the dtype of the products.

    The backward of a product is two products of the same size; all scores of attention count.
    """
    return count(products(model), flops_of)


def count(kernels: Sequence[tuple[Kernel, int]], operations: Callable[[Kernel], float]) -> Counter[str]:
    """Return the sum of the operations of some kernels, each so many times, by the dtype of their last input."""
    found = Counter[str]()
    for kernel, times in kernels:
        found[kernel.inputs[-1][1]] += round(times * operations(kernel))
    return found


def products(model: Model) -> list[tuple[Kernel, int]]:
    """Return the kernels with products of a model's forward, each with its number in a step, backward included."""
    plain = once(without_twins(model))
    count, example = Counter[str](), dict[str, Op]()
    # What a registered operator runs is in no table.
    for op in (op for op in plain.forward_ops if op.flops or op.target in REGISTERED):
        kinds = [(plain.tensors[o.tensor].shape, plain.tensors[o.tensor].dtype) for o in op.inputs]
        key = str((op.target, op.args, op.kwargs, kinds))
        count[key] += 1
        example.setdefault(key, op)
    known = {key: _KERNELS[key] for key in example if key in _KERNELS} | _recorded(
        plain, {key: op for key, op in example.items() if key not in _KERNELS}
    )
    _KERNELS.update((key, kernels) for key, kernels in known.items() if example[key].target not in REGISTERED)
    times = 3 if model.loss else 1
    return [(kernel, count[key] * times) for key in example for kernel in known[key] if flops_of(kernel)]


def _recorded(model: Model, ops: Mapping[str, Op]) -> dict[str, Sequence[Kernel]]:
    """Return the kernels of the forward of each op."""
    functions = [alone(op) for op in ops.values()]
    runs = callables(Program(model, tuple(functions), ())) if ops else []
    return {
        key: recorded(run, tuple(input_metas(model, function)), Call(tape=False)).forward.kernels
        for key, function, run in zip(ops, functions, runs, strict=True)
    }
