"""The arguments of a row's functions: a captured call (`Site`), and an op on one part (`Local`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from superscaler.ir.mask import Box
from superscaler.ir.model import Op, Operand, PTensor
from superscaler.ir.op import Ref
from superscaler.ops.notation import Shape

# An attribute of torch, as a dtype. Any other text is a literal: it may come from a file.
_TORCH = re.compile(r"torch\.\w+\Z")


@dataclass(frozen=True, slots=True)
class Site:
    """One call with the shapes of its tensor operands, in the order of its arguments, and of its results.

    `masks`: the bool operands; as indices they select by position, unlike numbers.
    """

    target: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    ins: tuple[Shape, ...]
    outs: tuple[Shape, ...]
    masks: frozenset[int]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if position < len(self.args) else self.kwargs.get(name, default)

    @property
    def letters(self) -> list[str]:
        """Return a letter for each dim of the first operand."""
        return [f"d{k}" for k in range(len(self.ins[0]))]

    def dims(self, position: int, name: str, default: Any = None) -> list[int]:
        """Return an argument that names dims of the first operand, as non-negative numbers; None names all."""
        rank = len(self.ins[0])
        value = self.argument(position, name, default)
        if value is None or value == []:
            return list(range(rank))
        return [d % max(rank, 1) for d in ([value] if isinstance(value, int) else value)]

    def alike(self, operand: str, result: str | None = None) -> str:
        """Return the notation of a call whose operands have one form, as have the results, or the form `result`."""
        results = [operand if result is None else result] * len(self.outs)
        return f"{', '.join([operand] * len(self.ins))} -> {', '.join(results)}"


def ranges(operand: Operand, tensor: PTensor, box: Box) -> Box:
    """Return the range of each slot of a tensor that a part reads or writes."""
    return tuple((0, e) if i is None else box[i] for i, e in zip(operand.slots, tensor.extents, strict=True))


def ranges_of(op: Op, box: Box, tensors: Mapping[str, PTensor], number: int, dim: int) -> tuple[Box, Shape]:
    """Return the range of each slot of a dim that a part has, and their sizes.

    `number` counts the operands, and the results behind them.
    """
    operand = (*op.inputs, *op.outputs)[number]
    tensor = tensors[operand.tensor]
    first = sum(len(slots) for slots in tensor.slots[:dim])
    own = slice(first, first + len(tensor.slots[dim]))
    return ranges(operand, tensor, box)[own], tensor.extents[own]


@dataclass(frozen=True, slots=True)
class Local:
    """An op on one part: its box, and the names and local shapes of its operands. `parts`: see `Row.placed`."""

    op: Op
    box: Box
    names: Sequence[str]
    shapes: Sequence[Shape]
    results: Sequence[Shape]
    tensors: Mapping[str, PTensor]
    random: str = ""
    parts: Mapping[tuple[int, int], str] = field(default_factory=dict)

    def literal(self, value: Any) -> str:
        """Return an argument as source: tensors by name, dtypes as they are, everything else as a literal."""
        if isinstance(value, Ref):
            return self.names[value.operand]
        if isinstance(value, list | tuple):
            return "[" + ", ".join(self.literal(v) for v in value) + "]"
        if isinstance(value, str) and _TORCH.match(value):
            return value
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return repr(value)

    @property
    def arguments(self) -> str:
        return ", ".join([*map(self.literal, self.op.args), *(f"{k}={self.literal(v)}" for k, v in self.op.kwargs)])

    def given(self, position: int, name: str, value: Any) -> Local:
        """Return the same with another value of an argument that the call states."""
        args = tuple(value if k == position else a for k, a in enumerate(self.op.args))
        kwargs = tuple((k, value if k == name else v) for k, v in self.op.kwargs)
        return replace(self, op=replace(self.op, args=args, kwargs=kwargs))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        return self.op.args[position] if position < len(self.op.args) else dict(self.op.kwargs).get(name, default)

    def part(self, number: int, dim: int) -> str:
        """Return the range of each slot of a dim that this part has, and their sizes, as source; '' for all."""
        if (number, dim) not in self.parts:
            return ""
        return f"{self.parts[number, dim]}, {ranges_of(self.op, self.box, self.tensors, number, dim)[1]}"

    @property
    def is_summed_in_parts(self) -> bool:
        """Return whether this op sums over a cut index, so that the result is a value part."""
        pairs = zip(self.op.indices, self.box, strict=True)
        return any(i.mark == "summed" and hi - lo < i.size for i, (lo, hi) in pairs)

    @property
    def dtype(self) -> str:
        return f"torch.{self.tensors[self.op.outputs[0].tensor].dtype}"

    @property
    def half(self) -> str:
        """Return the dtype of the result if a sum over the whole operand may overflow it, else ''."""
        return self.dtype if f"torch.{self.tensors[self.op.outputs[0].tensor].wide_dtype}" != self.dtype else ""

    def full_size(self, dims: Sequence[int] | None = None) -> int:
        """Return the number of elements of the unsplit first operand that are reduced."""
        shape = self.tensors[self.op.inputs[0].tensor].shape
        return prod(shape if not dims else [shape[d] for d in dims])
