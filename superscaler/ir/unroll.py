"""Several iterations of a model in one graph, each with the weights after the iteration before it."""

from dataclasses import replace
from typing import Any

from superscaler.errors import TransformError
from superscaler.ir.model import Model, Op, Operand, PTensor, later

# The most copies of the model in one step.
MOST = 1024
# The fields of an op with names of ops of its iteration.
_NAMES = ("name", "origin", "region", "checkpoint", "split", "regather")


def unrolled(model: Model, count: int) -> Model:
    """Return the model of `count` iterations: x of iteration k is x+k, and so are its ops.

    y = f(x, w); w = update(w, d(w))
    ->  y = f(x, w); w+1 = update(w, d(w)); y+1 = f(x+1, w+1); w = update(w+1, d(w+1))

    Tensors that no iteration changes (constants, frozen weights) have one name. Raises TransformError for a model that
    trains nothing, returns outputs beside its loss, scales its loss, reads older weights, or is unrolled already.
    """
    why = next((why for is_wrong, why in _refusals(model, count) if is_wrong), "")
    if why:
        raise TransformError(why)
    changed = {op.inputs[0].tensor for op in model.ops if not (op.is_forward or op.is_rest)}
    fixed = {t.name for t in model.tensors.values() if t.kind in ("parameter", "buffer", "constant")} - changed

    def name(tensor: str, k: int) -> str:
        return tensor if tensor in fixed else later(tensor, k)

    def side(operands: tuple[Operand, ...], k: int) -> tuple[Operand, ...]:
        return tuple(replace(o, tensor=name(o.tensor, k)) for o in operands)

    def op_of(op: Op, k: int) -> Op:
        made = side(op.outputs, k if op.is_forward else (k + 1) % count)
        renamed: dict[str, Any] = {field: later(own, k) for field in _NAMES if (own := getattr(op, field))}
        return replace(op, inputs=side(op.inputs, k), outputs=made, iteration=k, **renamed)

    def tensor_of(tensor: PTensor, k: int) -> PTensor:
        kind = "next" if k and tensor.name in changed else tensor.kind
        origin = tensor.origin and name(tensor.origin, k)
        return replace(tensor, name=name(tensor.name, k), kind=kind, origin=origin)

    turns = range(count)
    tensors = {made.name: made for k in turns for t in model.tensors.values() if (made := tensor_of(t, k))}
    forward = (op_of(op, k) for k in turns for op in model.forward_ops)
    # A frozen weight rests in one place during all iterations.
    updates = (op_of(op, k) for k in turns for op in model.ops if not (op.is_forward or (k and op.is_rest)))
    inputs = tuple(later(name, k) for k in turns for name in model.inputs)
    return replace(model, tensors=tensors, ops=(*forward, *updates), inputs=inputs, iterations=count)


def _refusals(model: Model, count: int) -> list[tuple[bool, str]]:
    """Return the reasons against unrolling, each with whether it holds."""
    is_number = isinstance(count, int) and not isinstance(count, bool) and count > 1
    return [
        (not is_number, f"{count!r} is no number of iterations; give 2 or more."),
        (is_number and count > MOST, f"{count} iterations make {count} copies of the model; choose at most {MOST}."),
        (model.iterations > 1, f"the graph has {model.iterations} iterations already; unroll it once."),
        (not model.loss, "nothing is trained, so no iteration depends on the one before; capture an optimizer."),
        (bool(model.result), "the step returns more than its loss; capture it without outputs."),
        (
            bool(model.optimizer.scaler),
            "a GradScaler looks at the gradients of all weights before the first update, so no other iteration could "
            "begin earlier; capture without scaler=, with bf16.",
        ),
        (
            bool(model.versions),
            "weights are read as they were updates ago (Stale), and an update would change them in place while another "
            "iteration needs them; leave one of the two out.",
        ),
    ]
