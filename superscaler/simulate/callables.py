"""Functions of a program as Python functions, without a plan around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from torch import Tensor

from superscaler.emit.segments import draws_of, emit_segments
from superscaler.ir.mask import Box
from superscaler.ir.model import Op
from superscaler.ir.program import Function, Program
from superscaler.ops.table import RANDOM, parts_of
from superscaler.runtime import functional
from superscaler.runtime.step import modules


def callables(program: Program, device: str = "cpu", step: int = 0) -> list[Callable[..., tuple[Tensor, ...]]]:
    """Return the functions of a program as they are emitted, with the random numbers of a step, on a device."""
    text, names = emit_segments(program)
    code = modules({"segments.py": text})["segments"]

    def bound(function: Function, name: str) -> Callable[..., tuple[Tensor, ...]]:
        boxes = [box for op, box in zip(function.ops, function.boxes, strict=True) if op.target in RANDOM]
        draws = draws_of(program.model, function, boxes)

        def random(k: int) -> Tensor:
            d = draws[k]
            return functional.draw(0, step, d.op, d.box, d.extents, device).reshape(d.shape)

        pairs = zip(function.ops, function.boxes, strict=True)
        own = [part for op, box in pairs for part in parts_of(op, box, program.model.tensors).values()]
        extra = {"random": random} if draws else {}
        run = getattr(code, name)

        # With its name, and the gradients that it needs. `parts`: of another place than the first.
        @wraps(run)
        def called(*inputs: Tensor, parts: tuple[Box, ...] = tuple(own)) -> tuple[Tensor, ...]:
            made: tuple[Tensor, ...] = run(*inputs, **extra, **({"parts": parts} if parts else {}))
            return made

        return called

    return list(map(bound, program.functions, names))


def alone(op: Op) -> Function:
    """Return a function of one whole op."""
    names, made = tuple(o.tensor for o in op.inputs), tuple(o.tensor for o in op.outputs)
    box = tuple((0, i.size) for i in op.indices)
    return Function((op,), (box,), names, {(op.name, k): k for k in range(len(names))}, made, "")
