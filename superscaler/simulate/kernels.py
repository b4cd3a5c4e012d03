"""The kernels and the memory of a program. Segments are recorded once for equal calls; other instructions of a device,
and the work of the executor itself, are computed.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from functools import cache

import numpy as np

from superscaler.ir import program as p
from superscaler.ir.cohorts import Cohort
from superscaler.ir.grid import Ints
from superscaler.ir.mask import Box, extents
from superscaler.ir.model import Model, Op, Operand
from superscaler.ir.program import Backward, Device, Forward, Function, Instruction, Offload, Program, Task, Value
from superscaler.ops.call import ranges
from superscaler.ops.table import PLACED, parts_of
from superscaler.runtime.optimizer import is_listed
from superscaler.simulate.recording import Recorder, callables
from superscaler.simulate.storages import Buffers, buffers
from superscaler.simulate.works import Call, Kernel, Meta, Segment, Work

__all__ = ["Kernel", "Kernels", "Meta", "Segment", "Segments", "Work", "Works"]

Kernels = Sequence[Kernel]
# Operators that leave out what no query of a part sees.
_BY_PLACE = frozenset({"ss.attention_block", "ss.attention_gradient"})
# The steps of torch.optim.Muon by default.
_NEWTON_SCHULZ = 5
# The kernels of Adam over lists, the first for AdamW only: tensors like the weights that each reads and makes.
_LISTED = (("mul_", 1, 1), ("lerp_", 2, 1), ("mul_", 1, 1), ("addcmul_", 2, 1), ("sqrt", 1, 1), ("div_", 1, 1),
           ("add_", 1, 1), ("addcdiv_", 3, 1))  # fmt: skip
Strides = tuple[tuple[int, tuple[int, ...]], ...]


class Segments:
    """The segments of a program. Equal calls are recorded once. `on_gpu`: with the temporary tensors of a GPU."""

    def __init__(self, program: Program, on_gpu: bool = False) -> None:
        self.program, self.on_gpu = program, on_gpu
        self._run = callables(program)
        self._calls: dict[Hashable, Segment] = {}
        self._tasks: dict[int, dict[Task, Segment]] = {}
        self._moved: dict[int, dict[Task, int]] = {}
        self._known: dict[Hashable, Segment] = {}
        # Functions that get the place of a part, and whether their kernels depend on it.
        targets = ({op.target for op in f.ops} for f in program.functions)
        self._placed = {n: not _BY_PLACE.isdisjoint(own) for n, own in enumerate(targets) if own & PLACED}

    def of(
        self, forward: Forward, backward: Backward | None = None, strides: Strides = (), added: Iterable[int] = ()
    ) -> Segment:
        """Return the segment of a forward and its backward, or of the first half of a split one. `strides`: of
        non-contiguous inputs, by number; `added`: the aliases whose gradients are added to sums, in both halves.
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
        key = forward.function, given, first, strides, parts, tuple(sorted(added))
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
        calls = {(i.function, i.at): n for n, i in enumerate(cohort.code[:]) if isinstance(i, Forward)}
        moved = [(f, cohort.data(n, "at").tolist()) for (f, _), n in calls.items() if self._placed.get(f)]
        found = []
        for row in range(len(cohort)):
            parts = tuple(part for f, at in moved for part in self._parts(functions[f], at[row], _BY_PLACE))
            found.append(numbers.setdefault(parts, len(numbers)))
        firsts = [cohort.devices[found.index(n)] for n in numbers.values()]
        return [self.program.devices[int(rank)] for rank in firsts], np.array(found)

    def tasks(self, device: Device) -> dict[Task, Segment]:
        """Return the segment of each task of a device."""
        if device.rank not in self._tasks:
            self._tasks[device.rank] = self._found(device.instructions[:])
        return self._tasks[device.rank]

    def moved(self, device: Device) -> dict[Task, int]:
        """Return the bytes of each tape that goes to the host, without weights and what stays."""
        if device.rank not in self._moved:
            found, code = self.tasks(device), device.instructions[:]
            forwards = {i.task: i for i in code if isinstance(i, Forward)}
            rest = {weight.name for weight in device.weights}
            self._moved[device.rank] = {
                i.task: _moved_bytes(found[i.task], forwards[i.task], rest.union(i.alive))
                for i in code
                if isinstance(i, Offload)
            }
        return self._moved[device.rank]

    def _found(self, code: Iterable[Instruction]) -> dict[Task, Segment]:
        forwards, backwards, added = list[Forward](), dict[Task, Backward](), dict[Task, set[int]]()
        for i in code:
            if isinstance(i, Forward):
                forwards.append(i)
            elif isinstance(i, Backward):
                backwards.setdefault(i.task, i)
                added.setdefault(i.task, set()).update(n for n, total in enumerate(i.sums) if total is not None)
        found, strides = dict[Task, Segment](), dict[Value, tuple[int, ...]]()
        for i in forwards:
            own = tuple((n, strides[name]) for n, name in enumerate(i.inputs) if name in strides) if strides else ()
            found[i.task] = segment = self.of(i, backwards.get(i.task), own, added.get(i.task, ()))
            strides |= {out: some for out, some in zip(i.outputs, segment.strides, strict=True) if some}
        return found

    def _parts(self, function: Function, at: Sequence[int], targets: Container[str] = PLACED) -> tuple[Box, ...]:
        placed = (op for op in function.ops if op.target in targets)
        pairs = zip(placed, function.boxes_at(at, targets), strict=True)
        return tuple(part for op, box in pairs for part in parts_of(op, box, self.program.model.tensors).values())

    def _segment(self, number: int, call: Call) -> Segment:
        metas = tuple(input_metas(self.program.model, self.program.functions[number]))
        run = self._run[number]
        # Functions with the same text have the same name.
        key = run.__name__, metas, call
        if key not in self._known:
            self._known[key] = Recorder(self.on_gpu).segment(run, metas, call)
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


class Works:
    """The kernels of the devices of a program. Equal segments are recorded once. `on_gpu`: the updates are those of a
    GPU.
    """

    def __init__(self, program: Program, on_gpu: bool = False) -> None:
        self.program, self.segments, self.on_gpu = program, Segments(program, on_gpu), on_gpu
        self._metas: dict[int, tuple[list[Meta], list[Meta]]] = {}
        # Equal kernels are one object, priced once: of backwards by their additions to sums, of buckets.
        self._backwards: dict[tuple[object, ...], Kernels] = {}
        self._buckets: dict[Hashable, tuple[object, tuple[Kernels, list[Kernels]]]] = {}

    def of(self, device: Device) -> list[Kernels]:
        """Return the kernels of each instruction of a device."""
        # A slice: loops are unrolled once.
        code = device.instructions[:]
        run = _Device(self, device, code)
        return [run.kernels(i) for i in code]

    def backward(self, work: Kernels, added: tuple[tuple[Meta, Meta, bool], ...]) -> Kernels:
        """Return the kernels of a backward and of its sums (gradient, sum, whether the sum exists already)."""
        key = id(work), added
        if key not in self._backwards:
            sums = (_added(total, own) if is_old else _copied(total, own) for own, total, is_old in added)
            self._backwards[key] = *work, *(k for some in sums for k in some)
        return self._backwards[key]

    def bucket(self, i: p.Collective, rank: int) -> tuple[Kernels, list[Kernels]]:
        """Return the copies into the buffer of a collective, and for each of its results the work after the wait."""
        key = id(i.ways), i.kind, i.group
        if key not in self._buckets:
            # With the ways: an object that is freed gives its number to another one.
            self._buckets[key] = i.ways, _moved(i, buffers(i, i.group.index(rank)))
        return self._buckets[key][1]

    def metas(self, function: int) -> tuple[list[Meta], list[Meta]]:
        """Return shape and dtype of the inputs and of the outputs of a function."""
        if function not in self._metas:
            model, f = self.program.model, self.program.functions[function]
            self._metas[function] = [*input_metas(model, f)], [*output_metas(model, f)]
        return self._metas[function]


class _Device:
    """A device that runs its instructions in order. `metas`: of the values; `started`: results of communication, and
    `after`: the work on these after their wait.
    """

    def __init__(self, works: Works, device: Device, code: Sequence[Instruction]) -> None:
        self.works, self.tensors, self.optimizer = works, works.program.model.tensors, works.program.model.optimizer
        self.metas: dict[Value, Meta] = {p.ONE: ((), "float32")}
        self.started: dict[Value, Meta] = {}
        self.rank, self.after = device.rank, dict[Value, Kernels]()
        for weight in device.weights:
            tensor = self.tensors[weight.tensor]
            self.metas[weight.name] = tensor.local_shape(extents(weight.box)), tensor.dtype
        # The optimizer of each weight, and its kernels.
        ways = [
            "foreach" if works.on_gpu and is_listed(self.optimizer.name, dict(group)) else "fused"
            for group in self.optimizer.groups
        ]
        trained = [w for w in device.weights if w.trained]
        self.kinds = {
            w.name: (self.optimizer.kind(w.group).lower(), "host" if w.host else ways[w.group]) for w in trained
        }
        self.forwards = {i.task: i for i in code if isinstance(i, Forward)}
        self.segments = works.segments.tasks(device)

    def kernels(self, i: Instruction) -> Kernels:
        """Return the kernels of an instruction, and record its results."""
        metas = self.metas
        match i:
            case p.Load():
                metas[i.out] = self.tensors[i.tensor].local_shape(extents(i.box)), self.tensors[i.tensor].dtype
            case Forward():
                metas.update(zip(i.outputs, self.works.metas(i.function)[1], strict=True))
                return self.segments[i.task].forward.kernels
            case Backward():
                return self._backward(i)
            case p.Slice():
                metas[i.out] = i.shape, metas[i.source][1]
                return _copied(metas[i.out])
            case p.Combine():
                metas[i.out] = i.shape, i.dtype
                pieces = (k for piece in i.pieces for k in _added(metas[piece]))
                return Kernel("fill_.Scalar", (), (metas[i.out] if i.pieces else ((), i.dtype),)), *pieces
            case p.Accumulate():
                metas[i.out] = metas[i.into]
                return _added(metas[i.value])
            case p.Collective():
                pairs = zip(i.works, i.ways, strict=True)
                self.started |= {work: (way.shape, i.wide or i.dtype) for work, way in pairs if work is not None}
                before, after = self.works.bucket(i, self.rank)
                self.after |= {
                    work: some for work, some in zip(i.works, after, strict=True) if work is not None and some
                }
                return before
            case p.Recv():
                self.started[i.work] = i.shape, i.dtype
            case p.Copy():
                self.started[i.work] = metas[i.source]
            case p.Wait():
                metas[i.out] = i.shape, self.started[i.work][1]
                return self.after.pop(i.work, ())
            case p.Update():
                return self._update(i)
        return ()

    def _backward(self, i: Backward) -> Kernels:
        segment, forward = self.segments[i.task], self.forwards[i.task]
        kernels = segment.backward[-1 if i.half == "weight" else 0].kernels if segment.backward else ()
        function, (inputs, *_) = self.works.program.functions[forward.function], self.works.metas(forward.function)
        made = [(inputs[n][0], "float32" if n in function.wide else inputs[n][1]) for n in function.grads]
        self.metas |= {out: meta for out, meta in zip(i.outputs, made, strict=True) if out is not None}
        totals = [(n, total) for n, total in enumerate(i.sums) if total is not None]
        added = tuple((inputs[function.grads[n]], made[n], total in self.metas) for n, total in totals)
        self.metas |= {total: made[n] for n, total in totals}
        return self.works.backward(kernels, added)

    def _update(self, i: p.Update) -> Kernels:
        weights = [self.metas[name] for name in i.weights]
        # Halves are updated as their float32 copies.
        updated = tuple((s, "float32") if self.optimizer.has_copy(d) else (s, d) for s, d in weights)
        pairs = zip(updated, (self.metas[name] for name in i.gradients), strict=True)
        casts = [meta for meta, gradient in pairs if meta[1] != gradient[1]]
        casts += [meta for meta, weight in zip(updated, weights, strict=True) if meta != weight]
        copies = [k for meta in (*casts, *(self.metas[name] for name in i.buffers)) for k in _copied(meta)]
        owned: dict[tuple[str, str], tuple[Meta, ...]] = {}
        for name, meta in zip(i.weights, updated, strict=True):
            owned[self.kinds[name]] = *owned.get(self.kinds[name], ()), meta
        products = (
            k for (kind, _), metas in owned.items() if kind == "muon" for s, _ in metas for k in _orthogonal(*s)
        )
        updates = (k for kind, metas in owned.items() for k in _updates(*kind, metas))
        return (*copies, *updates, *products)


def _moved_bytes(segment: Segment, i: Forward, stays: Container[Value]) -> int:
    ends = (*enumerate(i.inputs), *zip(segment.results, i.outputs, strict=True))
    left = segment.tapes[0].held.difference(number for number, name in ends if name in stays)
    return segment.tapes[0].bytes + sum(segment.sizes[number] for number in left)


def _updates(kind: str, way: str, weights: tuple[Meta, ...]) -> Iterator[Kernel]:
    """Yield the update of weights by an optimizer: one kernel, also on the host, or those of torch's lists for Adam."""
    if way == "foreach":
        for name, read, made in _LISTED[kind != "adamw" :]:
            yield Kernel(f"_foreach_{name}", weights * read, weights * made)
        return
    states = weights * (2 if kind.startswith("adam") else 1)
    yield Kernel(f"_{way}_{kind}_", (*weights, *weights, *states), (*weights, *states))


def _moved(i: p.Collective, found: Buffers) -> tuple[Kernels, list[Kernels]]:
    """Return the copies into the buffer of a collective, and the work on each result, as `comm/buckets.py` has them."""
    # A bucket is a copy of its tensors; so are chunks that do not lie one after the other.
    is_read = i.kind.endswith("gather") and not found.shared
    first = i.ways[0]
    is_plain = len(i.ways) == 1 and first.leads(first.take if first.give < 0 else first.give)
    into = () if is_read or is_plain else tuple(k for way in i.ways for k in _copied(((way.elements,), i.dtype)))
    after = [_copied((way.shape, i.dtype)) if found.made else () for way in i.ways]
    if i.wide and i.kind == "reduce_scatter":
        # The first wait adds the chunks of all results.
        chunk = (sum(way.elements for way in i.ways) // len(i.group),)
        after[0] = _summed((chunk, i.wide), (chunk, i.dtype), len(i.group))
    return into, after


@cache
def _summed(total: Meta, part: Meta, count: int) -> Kernels:
    return (*_copied(total, part), *(k for _ in range(count - 1) for k in _added(total, part)))


@cache
def _orthogonal(rows: int, columns: int) -> Kernels:
    """Return the products of torch's Muon for a matrix: Newton-Schulz in bfloat16, by its smaller side."""
    n, k = sorted((rows, columns))
    wide, tall, square = ((n, k), "bfloat16"), ((k, n), "bfloat16"), ((n, n), "bfloat16")
    step = (
        Kernel("mm", (wide, tall), (square,)),
        Kernel("addmm", (square, square, square), (square,)),
        Kernel("addmm", (wide, square, wide), (wide,)),
    )
    return step * _NEWTON_SCHULZ


@cache
def _copied(meta: Meta, source: Meta | None = None) -> Kernels:
    return (Kernel("copy_", (source or meta,), (meta,)),)


@cache
def _added(meta: Meta, value: Meta | None = None) -> Kernels:
    return (Kernel("add_.Tensor", (meta, value or meta), (meta,)),)
