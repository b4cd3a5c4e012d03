"""Models made of a model: several iterations of it, and the model without what a plan added."""

from collections.abc import Mapping
from dataclasses import replace

from superscaler.errors import TransformError
from superscaler.ir.model import Model, Op, Operand, PTensor
from superscaler.ir.names import first, later
from superscaler.ir.op import Asked, Index, Ref

# The most copies of the model in one step.
MOST = 1024
# The fields of an op with names of ops of its iteration.


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
        read, made = side(op.inputs, k), side(op.outputs, k if op.is_forward else (k + 1) % count)
        origin, asked = op.origin and later(op.origin, k), op.asked.renamed(lambda own: later(own, k))
        op = replace(op, name=later(op.name, k), origin=origin, asked=asked, iteration=k)
        return replace(op, inputs=read, outputs=made)

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
    return [
        (count < 2, f"{count} is no number of iterations; give 2 or more."),
        (count > MOST, f"{count} iterations make {count} copies of the model; choose at most {MOST}."),
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


def resized(model: Model, sizes: Mapping[str, int]) -> Model:
    """Return the model with other sizes of factors."""
    tensors = {}
    for name, tensor in model.tensors.items():
        extents = tuple(sizes.get(f, e) for f, e in zip(tensor.factors, tensor.extents, strict=True))
        tensors[name] = replace(tensor, extents=extents, shape=tensor.local_shape(extents))
    ops = tuple(
        replace(op, indices=tuple(replace(i, size=sizes.get(i.factor, i.size)) for i in op.indices)) for op in model.ops
    )
    renewed = {name: replace(f, size=sizes.get(name, f.size)) for name, f in model.factors.items()}
    return replace(model, tensors=tensors, ops=ops, factors=renewed)


def with_rest(model: Model, weight: str) -> Model:
    """Return the model with an `ss.rest` op for a frozen weight. The weight rests where the op's parts are."""
    tensor = model.tensors[weight]
    indices = tuple(Index(size, f, "spatial") for size, f in zip(tensor.extents, tensor.factors, strict=True))
    own, module = (Operand(weight, tuple(range(len(indices)))),), weight.rpartition(".")[0]
    op = Op(f"rest.{weight}", "ss.rest", (Ref(0),), (), own, own, indices, "optimizer", module=module)
    return model.with_ops((*model.ops, op))


def unread_twins(model: Model) -> frozenset[str]:
    """Return the recomputed tensors whose values no gradient depends on: only sums, and recomputed ops without a
    backward, read them, and no other op reads what these make.
    """
    uses, found = model.uses, set[str]()
    for op in reversed(model.ops):
        for output in op.outputs if op.origin else ():
            readers = [reader for reader, _ in uses[output.tensor]]
            # The gradients of these depend on no value that they read.
            need_none = all(r.is_sum or (r.origin and not r.has_mirror) for r in readers)
            if need_none and all(found.issuperset(o.tensor for o in r.outputs) for r in readers):
                found.add(output.tensor)
    return frozenset(found)


def without_twins(model: Model) -> Model:
    """Return the model without recomputed ops, copies, split backwards, older versions of weights and parts at rest."""
    mirrored, versions = {op.origin or op.name for op in model.ops if op.has_mirror}, model.versions

    def plain(op: Op) -> Op:
        inputs = op.inputs
        if any(model.tensors[o.tensor].origin for o in inputs):
            inputs = tuple(replace(o, tensor=model.origin(o.tensor)) for o in inputs)
        has_mirror = op.name in mirrored
        return replace(op, asked=Asked(), has_mirror=has_mirror, inputs=inputs)

    kept = (op for op in model.ops if not (op.origin or op.is_copy or op.is_rest))
    kept = (op for op in kept if not (op.is_write and op.inputs[0].tensor in versions))
    ops = tuple(map(plain, kept))
    return replace(model, tensors={n: t for n, t in model.tensors.items() if not t.origin}, ops=ops)


def once(model: Model) -> Model:
    """Return the model of the first of its iterations."""
    if model.iterations == 1:
        return model
    own = (op for op in model.ops if not op.iteration)
    ops = tuple(op if op.is_forward else replace(op, outputs=op.inputs[:1]) for op in own)
    made = {o.tensor for op in model.forward_ops if op.iteration for o in op.outputs}
    tensors = {name: t for name, t in model.tensors.items() if first(name) == name and name not in made}
    inputs = tuple(name for name in model.inputs if name in tensors)
    return replace(model, tensors=tensors, ops=ops, inputs=inputs, iterations=1)


def without_sources(model: Model) -> Model:
    """Return the model without source lines of its operators."""
    return model.with_ops(replace(op, source="") for op in model.ops)


def renamed(model: Model, old: str, new: str) -> Model:
    """Return the model with a factor renamed."""

    def name(factor: str) -> str:
        return new if factor == old else factor

    tensors = {n: replace(t, slots=tuple(tuple(map(name, dim)) for dim in t.slots)) for n, t in model.tensors.items()}
    indices = [tuple(replace(i, factor=name(i.factor)) for i in op.indices) for op in model.ops]
    passes = [tuple(sorted((name(f), group) for f, group in op.passes)) for op in model.ops]
    ops = tuple(replace(op, indices=i, passes=p) for op, i, p in zip(model.ops, indices, passes, strict=True))
    factors = {name(f): replace(factor, name=name(f)) for f, factor in model.factors.items()}
    return replace(model, tensors=tensors, ops=ops, factors=factors)
