"""The kernels of each instruction of a device: those of segments as recorded, and those of the executor itself."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler.ir import program as p
from superscaler.ir.mask import extents
from superscaler.ir.program import Backward, Device, Forward, Instruction, Program, Value
from superscaler.simulate.kernels import Kernel, Meta, Segments, input_metas, output_metas

Kernels = Sequence[Kernel]


class Works:
    """The kernels of the devices of a program. Equal segments are recorded once."""

    def __init__(self, program: Program) -> None:
        self.program, self.segments = program, Segments(program)
        self._metas: dict[int, tuple[list[Meta], list[Meta]]] = {}

    def of(self, device: Device) -> list[Kernels]:
        """Return the kernels of each instruction of a device."""
        # A slice: loops are unrolled once.
        code = device.instructions[:]
        run = _Device(self, device, code)
        return [run.kernels(i) for i in code]

    def metas(self, function: int) -> tuple[list[Meta], list[Meta]]:
        """Return shape and dtype of the inputs and of the outputs of a function."""
        if function not in self._metas:
            model, f = self.program.model, self.program.functions[function]
            self._metas[function] = [*input_metas(model, f)], [*output_metas(model, f)]
        return self._metas[function]


class _Device:
    """A device that runs its instructions in order. `metas`: of the values; `started`: of what communication brings."""

    def __init__(self, works: Works, device: Device, code: Sequence[Instruction]) -> None:
        self.works, self.tensors, self.optimizer = works, works.program.model.tensors, works.program.model.optimizer
        self.metas: dict[Value, Meta] = {p.ONE: ((), "float32")}
        self.started: dict[Value, Meta] = {}
        for weight in device.weights:
            tensor = self.tensors[weight.tensor]
            self.metas[weight.name] = tensor.local_shape(extents(weight.box)), tensor.dtype
        self.forwards = {i.task: i for i in code if isinstance(i, Forward)}
        self.segments = works.segments.tasks(code)

    def kernels(self, i: Instruction) -> Kernels:
        """Return the kernels of an instruction, and note what it makes."""
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
                return (_copied(metas[i.out]),)
            case p.Combine():
                metas[i.out] = i.shape, i.dtype
                return Kernel("fill_.Scalar", (), (metas[i.out],)), *(_added(metas[piece]) for piece in i.pieces)
            case p.Accumulate():
                metas[i.out] = metas[i.into]
                return (_added(metas[i.value]),)
            case p.Collective():
                pairs = zip(i.works, i.ways, strict=True)
                self.started |= {work: (way.shape, i.dtype) for work, way in pairs if work is not None}
                # A bucket is a copy of its tensors; so are the chunks of a slot that is not the first.
                is_copied = len(i.ways) > 1 or max(i.ways[0].take, i.ways[0].give) > 0
                return [_copied(((way.elements,), i.dtype)) for way in i.ways] if is_copied else ()
            case p.Recv():
                self.started[i.work] = i.shape, i.dtype
            case p.Copy():
                self.started[i.work] = metas[i.source]
            case p.Wait():
                metas[i.out] = i.shape, self.started[i.work][1]
            case p.Update():
                return self._update(i)
        return ()

    def _backward(self, i: Backward) -> Kernels:
        segment, forward = self.segments[i.task], self.forwards[i.task]
        kernels = segment.backward[-1 if i.half == "weight" else 0].kernels if segment.backward else ()
        function, (inputs, *_) = self.works.program.functions[forward.function], self.works.metas(forward.function)
        made = [(inputs[n][0], "float32" if n in function.wide else inputs[n][1]) for n in function.grads]
        self.metas |= {out: meta for out, meta in zip(i.outputs, made, strict=True) if out is not None}
        totals = [(total, meta) for total, meta in zip(i.sums, made, strict=False) if total is not None]
        added = [_added(meta) if total in self.metas else _copied(meta) for total, meta in totals]
        self.metas |= dict(totals)
        return (*kernels, *added)

    def _update(self, i: p.Update) -> Kernels:
        weights = [self.metas[name] for name in i.weights]
        # Halves are updated as their float32 copies.
        updated = tuple((s, "float32") if self.optimizer.has_copy(d) else (s, d) for s, d in weights)
        pairs = zip(updated, (self.metas[name] for name in i.gradients), strict=True)
        casts = [_copied(meta) for meta, gradient in pairs if meta[1] != gradient[1]]
        casts += [_copied(meta) for meta, weight in zip(updated, weights, strict=True) if meta != weight]
        buffers = [_copied(self.metas[name]) for name in i.buffers]
        name = self.optimizer.name.lower()
        states = updated * (2 if name.startswith("adam") else 1)
        fused = [Kernel(f"_fused_{name}_", (*updated, *updated, *states), (*updated, *states))] if weights else []
        return (*casts, *fused, *buffers)


def _copied(meta: Meta) -> Kernel:
    return Kernel("copy_", (meta,), (meta,))


def _added(meta: Meta) -> Kernel:
    return Kernel("add_.Tensor", (meta, meta), (meta,))
