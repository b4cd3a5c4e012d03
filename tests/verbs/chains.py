"""A small graph that is written by hand."""

from __future__ import annotations

from superscaler.ir.graph import Graph
from superscaler.ir.model import Factor, Model, Op, Operand, Optimizer, PTensor
from superscaler.ir.op import Index, Ref


def chain(length: int = 3, size: int = 8) -> Graph:
    """x -> tanh -> tanh ... -> sum, with a factor `batch` and a factor `hidden`; each tanh adds a weight."""
    factors = {"batch": Factor("batch", size), "hidden": Factor("hidden", 6)}
    slots, extents = (("batch",), ("hidden",)), (size, 6)
    tensors = {"x": PTensor("x", (size, 6), "float64", "input", slots, extents)}
    tensors["w"] = PTensor("w", (6,), "float64", "parameter", (("hidden",),), (6,), True)
    both = (Index(size, "batch", "spatial"), Index(6, "hidden", "spatial"))
    ops = []
    last = "x"
    for k in range(length):
        tensors[f"h{k}"] = PTensor(f"h{k}", (size, 6), "float64", "activation", slots, extents, True)
        inputs = (Operand(last, (0, 1)), Operand("w", (1,)))
        ops.append(
            Op(f"mul{k}", "aten.mul.Tensor", (Ref(0), Ref(1)), (), inputs, (Operand(f"h{k}", (0, 1)),), both,
               has_mirror=True, module=f"blocks.{k}", flops=1)
        )  # fmt: skip
        last = f"h{k}"
    tensors["loss"] = PTensor("loss", (), "float64", "activation", (), (), True)
    summed = (Index(size, "batch", "summed"), Index(6, "hidden", "summed"))
    read, made = (Operand(last, (0, 1)),), (Operand("loss", ()),)
    ops.append(Op("sum", "aten.sum.default", (Ref(0),), (), read, made, summed, has_mirror=True))
    weight = (Operand("w", (0,)),)
    ops.append(Op("update.w", "ss.SGD", (), (), weight, weight, (Index(6, "hidden", "spatial"),), kind="optimizer"))
    return Graph(Model(tensors, tuple(ops), factors, ("x",), "loss", Optimizer("SGD", ((("lr", 0.1),),)), {}, {}))
