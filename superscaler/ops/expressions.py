"""One op -> one readable Python expression on local shapes. Concrete sizes of the capture are computed again here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from superscaler.ir.graph import PLACED, Op, Operand, PTensor, Ref
from superscaler.ir.mask import Box, extents

Shape = tuple[int, ...]


def ranges(operand: Operand, tensor: PTensor, box: Box) -> Box:
    """Return which range of each slot of a tensor a part reads or writes."""
    return tuple((0, e) if i is None else box[i] for i, e in zip(operand.slots, tensor.extents, strict=True))


@dataclass(frozen=True, slots=True)
class Local:
    """An op on one part: the box of its indices, and the names and local shapes of its operands."""

    op: Op
    box: Box
    names: Sequence[str]
    shapes: Sequence[Shape]
    results: Sequence[Shape]
    tensors: Mapping[str, PTensor]
    random: str = ""

    def literal(self, value: Any) -> str:
        """Return an argument as source: tensors by name, dtypes as they are, everything else as a literal."""
        if isinstance(value, Ref):
            return self.names[value.operand]
        if isinstance(value, list | tuple):
            return "[" + ", ".join(self.literal(v) for v in value) + "]"
        if isinstance(value, str) and value.startswith("torch."):
            return value
        if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        return repr(value)

    def given(self, position: int, name: str, value: Any) -> Local:
        """Return the same with another value of an argument that the call states."""
        args = tuple(value if k == position else a for k, a in enumerate(self.op.args))
        kwargs = tuple((k, value if k == name else v) for k, v in self.op.kwargs)
        return replace(self, op=replace(self.op, args=args, kwargs=kwargs))

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        if position < len(self.op.args):
            return self.op.args[position]
        return dict(self.op.kwargs).get(name, default)

    def part(self) -> str:
        """Return which range of each slot of the dim that places it this part has, and their sizes; '' for all."""
        operand, dim = PLACED[self.op.target]
        tensor = self.tensors[self.op.inputs[operand].tensor]
        first = sum(len(slots) for slots in tensor.slots[:dim])
        own = slice(first, first + len(tensor.slots[dim]))
        box, extents = ranges(self.op.inputs[operand], tensor, self.box)[own], tensor.extents[own]
        return "" if box == tuple((0, e) for e in extents) else f"{box}, {extents}"

    @property
    def is_summed_in_parts(self) -> bool:
        """Tell whether an index that this op sums over is cut, so that the result is a value part."""
        pairs = zip(self.op.indices, self.box, strict=True)
        return any(i.mark == "summed" and hi - lo < i.size for i, (lo, hi) in pairs)

    @property
    def half(self) -> str:
        """Return the dtype of the result if a sum over the whole operand may be more than it can hold, or nothing."""
        tensor = self.tensors[self.op.outputs[0].tensor]
        return f"torch.{tensor.dtype}" if tensor.wide_dtype != tensor.dtype else ""

    def full_size(self, operand: int, dims: Sequence[int] | None = None) -> int:
        """Return how many elements of the unsplit operand are reduced."""
        shape = self.tensors[self.op.inputs[operand].tensor].shape
        return prod(shape if not dims else [shape[d] for d in dims])


def _call(function: str) -> Callable[[Local], str]:
    return lambda x: f"{function}({_arguments(x)})"


def _arguments(x: Local) -> str:
    positional = [x.literal(a) for a in x.op.args]
    return ", ".join(positional + [f"{k}={x.literal(v)}" for k, v in x.op.kwargs])


def _infix(symbol: str) -> Callable[[Local], str]:
    return lambda x: _aten(x) if x.op.kwargs else f" {symbol} ".join(x.literal(a) for a in x.op.args[:2])


def _method(name: str) -> Callable[[Local], str]:
    return lambda x: f"{x.names[0]}.{name}({', '.join(x.literal(a) for a in x.op.args[1:])})"


def _to_shape(method: str) -> Callable[[Local], str]:
    """A method that is given the shape of its result."""
    return lambda x: f"{x.names[0]}.{method}({_sizes(x.results[0])})"


def _aten(x: Local) -> str:
    return f"torch.ops.{x.op.target}({_arguments(x)})"


def _convolution(x: Local) -> str:
    """Groups are counted again: the channels of a part over those of one group."""
    is_general = "convolution" in x.op.target
    transposed = "transpose" in x.op.target or (is_general and x.op.args[6])
    channels = x.results[0][1] if transposed else x.shapes[0][1]
    return _aten(x.given(8 if is_general else 6, "groups", channels // x.shapes[1][1]))


def _repeat(x: Local) -> str:
    (before, *_), after = x.shapes, x.results[0]
    added = len(after) - len(before)
    times = [*after[:added], *(b // a for a, b in zip(before, after[added:], strict=True))]
    return f"{x.names[0]}.repeat({_sizes(tuple(times))})"


def _sizes(shape: Shape) -> str:
    return ", ".join(map(str, shape)) if shape else "()"


def _split(x: Local) -> str:
    dim = x.argument(2, "dim", 0)
    sizes = [shape[dim] for shape in x.results]
    size = sizes[0] if len(set(sizes)) == 1 else sizes
    return f"torch.split({x.names[0]}, {size}, {dim})"


def _mean(x: Local) -> str:
    dims, keepdim, dtype = x.argument(1, "dim"), bool(x.argument(2, "keepdim", False)), x.argument(9, "dtype")
    where = (f", {list(dims)}, {keepdim}" if dims else "") + (f", dtype={dtype}" if dtype else "")
    if not x.is_summed_in_parts:
        return f"torch.mean({x.names[0]}{where})"
    if half := x.half:
        return f"(torch.sum({x.names[0]}{where}, dtype=torch.float32) / {x.full_size(0, dims)}).to({half})"
    return f"torch.sum({x.names[0]}{where}) / {x.full_size(0, dims)}"


def _mse_loss(x: Local) -> str:
    reduction, (a, b) = ("none", "mean", "sum")[x.argument(2, "reduction", 1)], x.names
    if not x.is_summed_in_parts or reduction != "mean":
        return f'F.mse_loss({a}, {b}, reduction="{reduction}")'
    if half := x.half:
        return f'(F.mse_loss({a}.float(), {b}.float(), reduction="sum") / {x.full_size(0)}).to({half})'
    return f'F.mse_loss({a}, {b}, reduction="sum") / {x.full_size(0)}'


def _to_copy(x: Local) -> str:
    options = dict(x.op.kwargs)
    return f"{x.names[0]}.to({options['dtype']})" if options.get("dtype") else f"{x.names[0]}.clone()"


def _attention(x: Local) -> str:
    mask, dropout = x.argument(3, "attn_mask"), x.argument(4, "dropout_p", 0.0)
    options = [f"attn_mask={x.literal(mask)}"] if mask is not None else []
    options += [f"dropout_p={dropout}"] if dropout else []
    if x.argument(5, "is_causal", False):
        options += [f"attn_mask={_causal_mask(x)}" if x.part() else "is_causal=True"]
    others = [(k, v) for k, v in x.op.kwargs if k in ("scale", "enable_gqa") and v not in (None, False)]
    options += [f"{k}={x.literal(v)}" for k, v in others]
    return f"F.scaled_dot_product_attention({', '.join([*(x.literal(a) for a in x.op.args[:3]), *options])})"


def _causal_mask(x: Local) -> str:
    """torch aligns a causal mask at the first query that it is given: a part of the queries needs its own rows."""
    return f"functional.causal_mask({x.part()}, {x.shapes[1][-2]}, {x.names[0]})"


def _attention_dropout(x: Local) -> str:
    q, k, v, mask, p, causal, scale = map(x.literal, x.op.args)
    if x.op.args[5] and x.part():
        mask, causal = _causal_mask(x), "False"
    return f"functional.attention_dropout({q}, {k}, {v}, {mask}, {p}, {causal}, {scale}, {x.random})"


def _embedding(x: Local) -> str:
    weight, ids = x.literal(x.op.args[0]), x.literal(x.op.args[1])
    padding = x.argument(2, "padding_idx", -1)
    extra = f", padding_idx={padding}" if padding not in (-1, None) else ""
    if part := x.part():
        return f"functional.embedding_part({ids}, {weight}, {part}{extra})"
    return f"F.embedding({ids}, {weight}{extra})"


def _layer_norm(x: Local) -> str:
    given = [x.literal(a) for a in x.op.args[:5]]
    given[1] = x.literal(x.shapes[0][-len(x.op.args[1]) :])
    return f"F.layer_norm({', '.join(given)})"


def _dropout(x: Local) -> str:
    return f"functional.dropout({_arguments(x)}, {x.random})"


def _drawn(x: Local) -> str:
    """A part of a random tensor; the numbers are uniform in [0, 1)."""
    spec = x.tensors[x.op.outputs[0].tensor]
    return f"functional.{x.op.target.removeprefix('ss.')}({x.random}, torch.{spec.dtype})"


def _experts(x: Local) -> str:
    """The experts of a part by their numbers: a range, unless a factor that is not the outer one was cut."""
    slots, gate_up = x.op.inputs[3].slots, x.tensors[x.op.inputs[3].tensor]
    numbers = [0]
    for slot, size in list(zip(slots, gate_up.extents, strict=True))[: len(gate_up.slots[0])]:
        lo, hi = (0, size) if slot is None else x.box[slot]
        numbers = [n * size + k for n in numbers for k in range(lo, hi)]
    span = range(numbers[0], numbers[-1] + 1)
    return f"functional.experts({_arguments(x)}, {span if len(span) == len(numbers) else tuple(numbers)})"


def _count_labels(x: Local) -> str:
    dtype = x.tensors[x.op.outputs[0].tensor].dtype
    return f"functional.count_labels({x.literal(x.op.args[0])}, {x.literal(x.op.args[1])}, torch.{dtype})"


# Called as they are.
TORCH = ("tanh", "rsqrt", "neg", "exp", "log", "sigmoid", "cos", "sin", "mm", "matmul", "bmm", "einsum", "abs", "sqrt",
         "cat", "relu")  # fmt: skip
TABLE: Mapping[str, Callable[[Local], str]] = {
    **{f"aten.{n}.default": _to_shape("reshape") for n in ("view", "_unsafe_view")},
    "aten.expand.default": _to_shape("expand"),
    **{f"aten.{n}.default": _method(n) for n in ("unsqueeze", "permute", "t", "detach")},
    "aten.transpose.int": _method("transpose"),
    "aten.clone.default": lambda x: f"{x.names[0]}.contiguous()",
    "aten.repeat.default": _repeat,
    **{f"aten.{n}.Tensor": _infix(s) for n, s in (("add", "+"), ("sub", "-"), ("mul", "*"), ("div", "/"))},
    **{f"aten.{n}.default": _call(f"torch.{n}") for n in TORCH},
    **{f"aten.{n}.default": _call(f"F.{n}") for n in ("linear", "silu", "gelu")},
    "aten.pow.Tensor_Scalar": _call("torch.pow"),
    **{f"aten.{n}": _split for n in ("split.Tensor", "split_with_sizes.default")},
    **{f"aten.conv{n}d.{kind}": _convolution for n in (1, 2, 3) for kind in ("default", "padding")},
    **{f"aten.conv_transpose{n}d.{kind}": _convolution for n, kind in ((1, "default"), (2, "input"), (3, "input"))},
    "aten.convolution.default": _convolution,
    **{f"aten.mean.{kind}": _mean for kind in ("dim", "default")},
    "aten.mse_loss.default": _mse_loss,
    "aten._to_copy.default": _to_copy,
    "aten.scaled_dot_product_attention.default": _attention,
    "aten.embedding.default": _embedding,
    "aten.layer_norm.default": _layer_norm,
    "ss.count_labels": _count_labels,
    **{f"ss.{n}": _call(f"functional.{n}") for n in ("cross_entropy", "histc", "nll_loss")},
    **{f"ss.{n}": _drawn for n in ("uniform", "normal")},
    "ss.experts": _experts,
    "ss.identity": lambda x: x.names[0],
    "ss.dropout": _dropout,
    "ss.attention_dropout": _attention_dropout,
}


def expression(local: Local) -> str:
    """Return the source of an op on one part; ops without an entry are called by their ATen name."""
    return TABLE.get(local.op.target, _aten)(local)


def draw(op: Op, box: Box, tensors: Mapping[str, PTensor]) -> tuple[Box, tuple[int, ...], Shape]:
    """Return which random numbers a part needs, of its result's shape or of the attention scores': box of extents."""
    scores = op.target == "ss.attention_dropout"
    like = op.inputs[0] if scores else op.outputs[0]
    first = tensors[like.tensor]
    slots = ranges(like, first, box)
    shape, whole = first.local_shape(extents(slots)), first.extents
    if scores:
        keys = tensors[op.inputs[1].tensor].shape[-2]
        width = len(first.slots[-1])
        slots = (*slots[: len(slots) - width], (0, keys))
        whole, shape = (*whole[: len(whole) - width], keys), (*shape[:-1], keys)
    return slots, whole, shape
