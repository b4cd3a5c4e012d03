"""The oracles of a plan's steps (module, exported program, graph), and the plan retyped to be compared with them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from superscaler.compiler import Compiled
from superscaler.frontend.base.oracle import Draw, Reference, reference_step
from superscaler.ir.graph import Graph
from superscaler.ir.model import Model, Op
from superscaler.ir.names import draw_number
from superscaler.ir.variants import once
from superscaler.ops.table import row_of
from superscaler.runtime import functional
from superscaler.verify.eager import Eager
from superscaler.verify.locate import Values, model_step

# Runs a step of a model on one device: (weights before it, step number) -> results.
Oracle = Callable[[Values, int], Reference]
FLOATS = ("float32", "bfloat16", "float16")


def oracles_of(plan: Compiled, inputs: Values, dtype: torch.dtype | None) -> dict[str, Callable[[], Oracle]]:
    """Return functions that make the oracles of a plan, by name: in float64, or (`dtype` None) in its own dtypes."""
    captured = plan.graph.captured

    def eager() -> Oracle:
        module = Eager(captured, inputs, is_wide=dtype is not None)
        return lambda known, number: module.step(known, draw_of(number))

    def export() -> Oracle:
        return lambda known, number: reference_step(captured, inputs, known, dtype, draw=draw_of(number))

    return {"eager": eager, "export": export, "graph": lambda: graph_step(plan, inputs)}


def graph_step(exact: Compiled, inputs: Values) -> Oracle:
    """Return the oracle that runs the graph on one device."""
    model = once(exact.graph.model)

    def step(known: Values, number: int) -> Reference:
        made, gradients = model_step(exact.graph.model, {**known, **inputs}, number)
        ends = {op.inputs[0].tensor: made[op.inputs[1].tensor] for op in model.ops if op.is_write}
        outputs = {name: value for name, value in ends.items() if model.tensors[name].kind == "output"}
        buffers = {name: value for name, value in ends.items() if name not in outputs}
        found: dict[str, Tensor | None] = {n: g for n, g in gradients.items() if n in known}
        return Reference(made.get(model.loss), found, buffers, outputs)

    return step


def recurrence(oracle: Oracle, model: Model, known: Values, number: int) -> Reference:
    """Return a step with gradients at the oldest weights; then each version takes the value of the next younger one."""
    versions = model.versions
    step = oracle({**known, **{weight: known[version] for version, weight in versions.items()}}, number)
    pairs = ((op.inputs[0].tensor, op.inputs[1].tensor) for op in model.ops if op.is_write)
    aged = {older: known[younger] for older, younger in pairs if older in versions}
    return step._replace(buffers={**step.buffers, **aged})


def draw_of(step: int) -> Draw:
    """Return the function that draws the random numbers of an operator in a step of a plan."""

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        return functional.draw(0, step, draw_number(name), [(0, size) for size in shape], shape, "cpu")

    return draw


def retype(graph: Graph, dtype: str | None) -> Graph:
    """Return the same plan for a model whose floating-point tensors and casts are all of `dtype` (None: unchanged).

    Probabilities of dropout are zero, so that the result can be compared. Communication is chosen by the sizes of the
    original dtypes, so that the compared exchanges are the trained ones.
    """
    return graph.copy(retype_model(graph.model, dtype))


def retype_model(model: Model, dtype: str | None) -> Model:
    tensors = dict(model.tensors)
    for name, tensor in model.tensors.items():
        if dtype is not None and tensor.dtype in FLOATS:
            tensors[name] = replace(tensor, dtype=dtype, trained_as=tensor.trained.dtype)
    ops = tuple(_retyped_op(op, dtype) for op in model.ops)
    return replace(model, tensors=tensors, ops=ops)


def _retyped_op(op: Op, dtype: str | None) -> Op:
    args, kwargs = op.args, op.kwargs
    if (rate := row_of(op.target).rate) is not None:
        args = (*args[:rate], 0.0, *args[rate + 1 :])
    casts = {f"torch.{name}": f"torch.{dtype}" for name in FLOATS if dtype}

    def swap(value: Any) -> Any:
        return casts.get(value, value) if isinstance(value, str) else value

    return replace(op, args=tuple(map(swap, args)), kwargs=tuple((k, swap(v)) for k, v in kwargs))
