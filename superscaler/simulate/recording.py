"""The recorder of segments: the executor runs each once on fake tensors, forward and backward.

A fake tensor has a shape, a dtype and a storage, but no data. So the recorder sees torch's own work: the casts of
autocast, the tensors that autograd keeps, the kernels of the backward. `callables` are the emitted functions of a
program as Python functions, without a plan around them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from math import prod
from types import FrameType, SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from superscaler.emit.segments import draws_of, emit_segments
from superscaler.ir.mask import Box
from superscaler.ir.model import Op
from superscaler.ir.program import Function, Program
from superscaler.ops.table import RANDOM, parts_of
from superscaler.runtime import functional
from superscaler.runtime.compiled.segments import CompiledSegments
from superscaler.runtime.emitted_lines import op_at
from superscaler.runtime.executor import Rank
from superscaler.runtime.load import modules
from superscaler.runtime.saved_tensors import storage_of
from superscaler.simulate.repeats.made import Made, kernel_of, metas_of, tensors_of
from superscaler.simulate.works import Call, Kernel, Meta, Segment, Tape, Work, block
from superscaler.specs.registered import REGISTERED

_DEVICE, _RMS_NORM = torch.ops.prim.device.default, torch.ops.aten.rms_norm.default
Tensors = Sequence[Tensor]
# Random numbers by their number in a segment.
Draw = Callable[[int], Tensor]
# What is recorded of an operator.
KINDS = ("kernels", "memory")
# Operators that only allocate.
_EMPTY = ("empty.memory_format", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_TASK = "s0"
# The bytes of an element of a wide gradient, which is float32.
_WIDE = 4
# In which random numbers are drawn on a CPU.
_BLOCKS = 16


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A recorder of kernels, which also counts the bytes of live storages, `on_gpu` with temporary ones of kernels."""

    def __init__(self, on_gpu: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels: list[Kernel] = []
        self.levels: list[int] = []
        self.alive, self.on_gpu, self.kinds, self.made = 0, on_gpu, frozenset(KINDS), Made()
        # Runs segments as they are compiled; None: they run as they are.
        self.compiled: CompiledSegments | None = None
        # Of storages that are alive: bytes and the op of those without a number, and the numbers of others.
        self.others: dict[int, tuple[int, int]] = {}
        self.numbers: dict[int, int] = {}
        # By number.
        self.sizes: list[int] = []
        self.ended: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # Asked for before most operators.
            return args[0].fake_device
        made, kernel = self.made.of(func, args, kwargs or {})
        if func.namespace != "prim" and self.kinds:
            results, name = tensors_of(made), func.name().partition("::")[2]
            if "kernels" in self.kinds and not func.is_view and name not in _EMPTY:
                self.kernels.append(kernel or kernel_of(func, args, kwargs, made))
            for x in results if "memory" in self.kinds else ():
                # Leaves without memory are one number each.
                self._count(x, 0 if name == "new_empty" else x.untyped_storage().nbytes())
            if self.on_gpu and name == "_softmax_backward_data":
                # Its kernel for GPUs reads the product of both inputs, a temporary tensor (torch, SoftMax.cu).
                self.levels.append(self.alive + block(results[0].nbytes))
        return made

    @contextmanager
    def without(self, *kinds: str) -> Iterator[None]:
        """Record no `kernels`, or no `memory` of their results, in the block."""
        before, self.kinds = self.kinds, self.kinds.difference(kinds)
        try:
            yield
        finally:
            self.kinds = before

    def segment(self, run: Callable[..., tuple[Tensor, ...]], metas: Iterable[Meta], call: Call) -> Segment:
        """Return the segment of a function under a call."""
        # A compiled segment gets the words of its random numbers, and its weights are in memory anyway.
        draws, weights = ([run.__dict__["draws"]], run.__dict__["weights"]) if self.compiled is not None else ([], [])
        device = cast(Any, SimpleNamespace(device=torch.device("cpu")))
        rank = Rank(device, {"weights": [], "draws": draws}, {}, ("SGD", (), False), torch.float32)
        rank.compiled = self.compiled
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            # `Made` has all results; to look for them in torch's own cache, too, takes as long as to make them.
            self.made.mode, mode.cache_enabled = mode, False
            strides, placed = dict(call.strides), partial(run, parts=call.parts) if call.parts else run
            placed.__dict__.update(run.__dict__, __name__=run.__name__)
            inputs = [
                self.made.empty(shape, strides.get(n), getattr(torch, dtype)) for n, (shape, dtype) in enumerate(metas)
            ]
            rank._names = {id(inputs[n]): "" for n in weights}
            # Their numbers are their places.
            list(map(self._number, inputs))
            is_run = self.on_gpu and self.compiled is None
            with self, _Norms(self.kernels) if is_run else nullcontext():
                outputs = rank.forward(_TASK, placed, inputs, call.tape, 0 if any(draws) else None)
            forward = self._work(0, 0, 0)
            results, sizes = tuple(map(self._number, outputs)), tuple(x.nbytes for x in outputs)
            layouts = tuple(() if x.is_contiguous() else x.stride() for x in outputs)
            saved = run.__dict__.get("saved")
            ends = outputs if saved is None else [outputs[k] for k in saved]
            is_given = call.given or (True,) * len(ends)
            given = [torch.empty_like(x) if g else None for x, g in zip(ends, is_given, strict=True)]
            again = [torch.empty_like(inputs[n]) for n in run.__dict__.get("again", ()) if call.tape]
            numbers = [-1 if x is None else self._number(x) for x in given]
            own = {*numbers, *map(self._number, again)}
            del inputs, outputs, ends
            summed = self._narrowed(rank, call)
            tapes, backward, gradients = [self._tape(own)], list[Work](), list[dict[int, int]]()
            elements = dict[int, int]()
            for half in self._halves(rank, call):
                kernels, levels, alive = len(self.kernels), len(self.levels), self.alive
                with self:
                    numbered = half(given, again)
                backward.append(self._work(kernels, levels, alive))
                elements |= {n: _WIDE * x.numel() if n in summed else x.nbytes for n, x in numbered.items()}
                gradients.append({n: self._number(x) for n, x in numbered.items()})
                given, numbered = [], {}
                tapes.append(self._tape(set()))
        return Segment(
            forward,
            tuple(backward),
            tuple(tapes[: max(1, len(backward))]),
            tuple(self.sizes),
            results,
            sizes,
            layouts,
            tuple(numbers),
            tuple(gradients),
            elements,
        )

    def _narrowed(self, rank: Rank, call: Call) -> set[int]:
        """Return the aliases whose gradients are added to wider sums; the backward then does not widen them itself."""
        wide = rank._tapes[_TASK].wide if call.tape else []
        found = {n for n in call.added if wide[n]}
        for n in found:
            wide[n] = False
        return found

    def _halves(self, rank: Rank, call: Call) -> list[Callable[[Any, Any], dict[int, Tensor]]]:
        """Return the backward of the recorded forward as functions: none without a tape, one, or two."""
        if not call.tape:
            return []
        every, first = range(len(rank._tapes[_TASK].wide)), call.first
        if not first:
            return [lambda given, again: dict(zip(every, rank.backward(_TASK, given, again), strict=True))]
        rest = [n for n in every if n not in first]
        return [
            lambda given, again: dict(zip(first, rank.backward_input(_TASK, given, first), strict=True)),
            lambda given, again: dict(zip(rest, rank.backward_weight(_TASK), strict=True)),
        ]

    def _work(self, kernels: int, levels: int, alive: int) -> Work:
        """Return the work since the given numbers of kernels and levels."""
        ended = {n: at - levels for n, at in self.ended.items()}
        self.ended.clear()
        return Work(tuple(self.kernels[kernels:]), tuple(x - alive for x in self.levels[levels:]), ended)

    def _tape(self, own: set[int]) -> Tape:
        """Return the live storages, without the recorder's own tensors."""
        self.ended.clear()
        return Tape(frozenset(self.numbers.values()) - own, tuple(x for x in self.others.values() if x[0]))

    def _number(self, x: Tensor) -> int:
        """Return the number of a tensor's storage, which no longer counts among the others."""
        key = storage_of(x)
        if key not in self.numbers:
            self.numbers[key] = len(self.sizes)
            self.sizes.append(block(x.untyped_storage().nbytes()))
            if key in self.others:
                self.alive -= self.others.pop(key)[0]
            else:
                weakref.finalize(x.untyped_storage(), self._free, key)
        return self.numbers[key]

    def _count(self, x: Tensor, size: int) -> None:
        key = storage_of(x)
        if key not in self.others and key not in self.numbers:
            self.others[key] = block(size), _op(sys._getframe())
            self.alive += self.others[key][0]
            self.levels.append(self.alive)
            weakref.finalize(x.untyped_storage(), self._free, key)

    def _free(self, key: int) -> None:
        if key in self.numbers:
            self.ended[self.numbers.pop(key)] = len(self.levels)
        else:
            self.alive -= self.others.pop(key)[0]


class _Norms(TorchFunctionMode):
    """Norms by the root of the mean square as a GPU runs them: a kernel forward and one backward, which keep the input
    and a number a row. A CPU runs several, and keeps copies in float32; so does a GPU if input and weight differ in
    dtype.
    """

    def __init__(self, kernels: list[Kernel]) -> None:
        super().__init__()
        self.kernels = kernels

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _RMS_NORM:
            x, shape, weight = (*args, None)[:3]
            if weight is None or weight.dtype == x.dtype:
                return _Norm.apply(self.kernels, x, len(shape), weight)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernels: list[Kernel], x: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        rows = *x.shape[:-dims], *(1,) * dims
        out, scale = torch.empty_like(x), torch.empty(rows, dtype=torch.float32, device=x.device)
        kernels.append(Kernel("_fused_rms_norm", metas_of(tensors_of((x, weight))), metas_of([out, scale])))
        ctx.kernels = kernels
        ctx.save_for_backward(x, scale, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, weight = ctx.saved_tensors
        made = [None if tensor is None else torch.empty_like(tensor) for tensor in (x, weight)]
        read = metas_of(tensors_of((gradients, x, scale, weight)))
        ctx.kernels.append(Kernel("_fused_rms_norm_backward", read, metas_of(tensors_of(made))))
        return None, made[0], None, made[1]


def _op(frame: FrameType | None) -> int:
    """Return the number of the running op among the ops of a segment; -1 outside of them."""
    while frame is not None and frame.f_code.co_filename != "segments.py":
        frame = frame.f_back
    number = None if frame is None else op_at(frame, frame.f_globals["__source__"])
    return -1 if number is None else number


def callables(
    program: Program, device: str = "cpu", step: int = 0, on_gpu: bool = False
) -> list[Callable[..., tuple[Tensor, ...]]]:
    """Return the functions of a program as they are emitted, with the random numbers of a step, on a device. `on_gpu`:
    these are drawn at once, as on a GPU; otherwise in 16 blocks, where a CPU may take thousands.
    """
    text, names = emit_segments(program)
    code = modules({"segments.py": text})["segments"]

    def bound(function: Function, name: str) -> Callable[..., tuple[Tensor, ...]]:
        boxes = [box for op, box in zip(function.ops, function.boxes, strict=True) if op.target in RANDOM]
        targets = {op.target for op in function.ops}
        draws = draws_of(program.model, function, boxes)

        def random(k: int) -> Tensor:
            d = draws[k]
            size = prod(d.shape) if on_gpu else max(functional.BLOCK, prod(d.shape) // _BLOCKS)
            return functional.draw(0, step, d.op, d.box, d.extents, device, size).reshape(d.shape)

        pairs = zip(function.ops, function.boxes, strict=True)
        own = [part for op, box in pairs for part in parts_of(op, box, program.model.tensors).values()]
        given = random if draws else None
        run = getattr(code, name)

        # With its name, and the gradients that it needs. `parts`: of another place than the first.
        @wraps(run)
        def called(
            *inputs: Tensor, parts: tuple[Box, ...] = tuple(own), random: Draw | None = given
        ) -> tuple[Tensor, ...]:
            extra = {key: value for key, value in (("parts", parts), ("random", random)) if value}
            made: tuple[Tensor, ...] = run(*inputs, **extra)
            return made

        # What the random numbers are, and the inputs whose memory is there anyway.
        called.__dict__["draws"] = [draw._asdict() for draw in draws]
        called.__dict__["text"] = _text_of(run, draws, own) if REGISTERED.keys().isdisjoint(targets) else None
        tensors = program.model.tensors
        called.__dict__["weights"] = [
            n for n, name in enumerate(function.inputs) if tensors[name].kind in ("parameter", "buffer")
        ]
        return called

    return list(map(bound, program.functions, names))


def _text_of(run: Any, draws: Iterable[Any], parts: Iterable[Box]) -> Hashable:
    """Return the text of a function as a key, equal for equal functions of two programs."""
    code = run.__code__.replace(co_name="", co_qualname="", co_firstlineno=1, co_linetable=b"")
    return code, repr(sorted(vars(run).items())), tuple((d.extents, d.shape) for d in draws), tuple(parts)


def alone(op: Op) -> Function:
    """Return a function of one whole op."""
    names, made = tuple(o.tensor for o in op.inputs), tuple(o.tensor for o in op.outputs)
    box = tuple((0, i.size) for i in op.indices)
    return Function((op,), (box,), names, {(op.name, k): k for k in range(len(names))}, made, "")
