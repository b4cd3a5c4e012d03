"""Functions of a program as Python functions, without a plan around them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from superscaler.emit.segments import draws_of, emit_segments
from superscaler.ir.model import Model
from superscaler.ir.program import Function, Program
from superscaler.ops.table import RANDOM, parts_of
from superscaler.runtime import functional
from superscaler.runtime.step import modules


def callables(
    model: Model, functions: Sequence[Function], device: str = "cpu", step: int = 0
) -> list[Callable[..., Sequence[Tensor]]]:
    """Return functions of a model as they are emitted, with the random numbers of a step, on a device."""
    text, names = emit_segments(Program(model, tuple(functions), ()))
    code = modules({"segments.py": text})["segments"]

    def bound(function: Function, name: str) -> Callable[..., Sequence[Tensor]]:
        boxes = [box for op, box in zip(function.ops, function.boxes, strict=True) if op.target in RANDOM]
        draws = draws_of(model, function, boxes)

        def random(k: int) -> Tensor:
            d = draws[k]
            return functional.draw(0, step, d.op, d.box, d.extents, device).reshape(d.shape)

        pairs = zip(function.ops, function.boxes, strict=True)
        parts = [part for op, box in pairs for part in parts_of(op, box, model.tensors).values()]
        extra = [random] * bool(draws) + [parts] * bool(parts)
        return lambda *inputs: getattr(code, name)(*inputs, *extra)

    return list(map(bound, functions, names))
