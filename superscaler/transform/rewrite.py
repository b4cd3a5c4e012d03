"""The algorithms of `op_trans` that replace ops by others, and the common rules of all such algorithms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Protocol, runtime_checkable

from superscaler.errors import NoneOfThese, TransformError, some
from superscaler.ir.graph import Graph
from superscaler.ir.grid import Grid
from superscaler.ir.journal import Entry
from superscaler.ir.model import Model, Op, Operand, PTensor
from superscaler.ir.names import first, unique
from superscaler.ir.op import Index, Ref
from superscaler.ir.orders import Group, changed
from superscaler.ir.parts import Parts
from superscaler.specs.arguments import checked_class

# The most older versions of a weight: more than any pipeline has stages.
MOST_VERSIONS = 1024


@runtime_checkable
class Rewrite(Protocol):
    """An algorithm that replaces whole ops: a name for the journal, and the model with others in the place of `ops`."""

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model: ...


@checked_class
@dataclass(frozen=True, slots=True)
class Stale:
    """Read the weights of ops as they were `updates` updates ago, in all their readers; updates change the newest ones.

    y = f(x, w)  ->  y = f(x, w~2); d(w) += d.f(d(y)); w~2 = w~1; w~1 = w; w = update(w, d(w)) w(t+1) = update(w(t),
    gradient by w at (each weight v as v(t - n of v))), v(-1) = v(-2) = ... = v(0)

    With 1 for all weights this is PipeDream-2BW, with p - 1 - s for stage s of p it is PipeDream. The forward and the
    backward of a step read one version. The steps are not those of the model: `verify` compares them with this
    recurrence on one device, and says by how much they are stale.
    """

    updates: int = 1

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model:
        if self.updates < 1:
            raise TransformError(f"Stale({self.updates!r}) is no number of updates; give 1 or more, or leave it out.")
        if self.updates > MOST_VERSIONS:
            raise TransformError(
                f"Stale({self.updates}) keeps {self.updates} older versions of each weight; "
                f"choose at most {MOST_VERSIONS}."
            )
        if model.iterations > 1:
            raise TransformError("Stale and unroll exclude each other; leave one out.")
        updates = {op.inputs[0].tensor: op for op in model.ops if op.is_update}
        read = dict.fromkeys(o.tensor for op in ops if op.is_forward for o in op.inputs if o.tensor in updates)
        if not read:
            raise TransformError(
                f"Stale({self.updates}): none of {len(ops)} ops ({some([op.name for op in ops], 3)}) reads the newest "
                "version of a trained weight; give forward ops that do."
            )
        ages = [(n, age) for n in read for age in range(1, self.updates + 1)]
        older = [replace(model.tensors[n], name=version(n, age), kind="buffer", origin=n) for n, age in ages]
        names = {n: version(n, self.updates) for n in read}

        def stale(op: Op) -> Op:
            inputs = tuple(replace(o, tensor=names.get(o.tensor, o.tensor)) for o in op.inputs)
            return replace(op, inputs=inputs) if op.is_forward else op

        writes = (write_op(updates[n], n, age) for n, age in ages)
        return model.with_ops((*map(stale, model.ops), *writes), older)


def version(weight: str, age: int) -> str:
    """Return the name of a weight as it was some updates ago.

    >>> version("head.weight", 2), version("head.weight", 0)
    ('head.weight~2', 'head.weight')
    """
    return f"{weight}~{age}" if age else weight


def write_op(update: Op, weight: str, age: int) -> Op:
    """Return the op that sets an older version of a weight to the next younger one, before the younger one changes."""
    older, younger = (replace(update.inputs[0], tensor=version(weight, of)) for of in (age, age - 1))
    name = f"write.{older.tensor}"
    made = replace(update, name=name, target="ss.write", args=(Ref(0), Ref(1)), kwargs=(), group=0)
    return replace(made, inputs=(older, younger), outputs=(older,))


@dataclass(frozen=True, slots=True)
class Regather:
    """Gather weights and activations a second time for the backward, instead of keeping them from the forward on:
    ZeRO-3 without a second forward, Megatron's sequence parallelism.

    y = f(x, w); d(x), d(w) += d.f(d(y))  ->  y = f(x, w), keep x; regather w; d(x), d(w) += d.f(d(y), w)

    All ops of one `op_trans` are one region. Weights are regathered if an op reads them directly, and activations if a
    part reads more of them than any part makes. Casts of these are kept, and so are sums. What is
    cast before it is gathered (`gather_halves`) is regathered like a weight. Ops of an earlier region leave it: a block
    that ZeRO-3 gathers again is one region with the activations that sequence parallelism gathers again.
    """

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model:
        chosen = [op for op in ops if op.is_forward and not op.from_data]
        wrong = next((op for op in chosen if op.region or op.split), None)
        if wrong is not None:
            state = "recomputed" if wrong.region else "split"
            raise TransformError(f"Regather of {wrong.name}, which is {state} already; leave it out of one of them.")
        return _marked(model, chosen, "Regather", "regather")


@dataclass(frozen=True, slots=True)
class SplitBackward:
    """Split the backward of ops into I, the gradients of activations, and W, those of weights.

    d(x), d(w) = d.f(d(y))  ->  I: d(x) = d.f(d(y)), keep what W needs; W: d(w) = d.f(kept)

    The backward of all ops of one `op_trans` on a device is one I and one W, if nothing is communicated between. W runs
    directly after its I, unless `select(kind="W")` orders it otherwise; `select(kind="B")` is both. A part with
    gradients of activations only, or of weights only, makes them all in one half.
    """

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model:
        if taken := next((op for op in ops if op.split or op.regather), None):
            twice = " and Regather are asked for" if taken.regather else " is asked for twice"
            raise TransformError(f"SplitBackward of {taken.name}{twice}; leave it out of one of them.")
        names = {op.name for op in ops if op.is_forward}
        chosen = [op for op in model.ops if op.name in names or op.origin in names]
        return _marked(model, chosen, "SplitBackward", "split")


@checked_class
@dataclass(frozen=True, slots=True)
class Insert:
    """Let ops read copies of activations or weights, which a plan can place elsewhere.

    z = g(y); d(y) += d.g(d(z))  ->  y.c = identity(y); z = g(y.c); d(y) += d.g(d(z))

    `tensor`: the activation, or the weight, to copy; by default all activations that the ops of one `op_trans` read
    from outside, except those made of data alone. All of these ops read one copy; the gradient bypasses it. An uncut,
    unplaced copy has the portions and the devices of its first reader. A copy is sent to a reader on another device as
    late as possible. That of a weight is made once a step, and gathered as a weight is.
    """

    tensor: str = ""

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model:
        makers = model.producers
        weights = {self.tensor} if first(self.tensor) in {tensor.name for tensor in model.parameters()} else set()
        names = {op.name for op in ops if op.is_forward}
        # Recomputed ops read the copy of a weight, too.
        readers = names | {op.name for op in model.ops if weights and op.origin in names}
        inside = {o.tensor for op in ops for o in op.outputs}
        read = dict.fromkeys(o.tensor for op in ops if op.name in readers for o in op.inputs)
        free = (t for t in read if t in makers and t not in inside and not makers[t][0].from_data)
        wanted = [t for t in read if t == self.tensor and (t in makers or t in weights)] if self.tensor else list(free)
        if not wanted and not self.tensor:
            raise NoneOfThese("Insert needs ops that read activations from outside; none of these do.")
        if not wanted:
            raise NoneOfThese(
                f"Insert needs ops that read the activation or the weight '{self.tensor}'; none of these do. Inputs "
                "are everywhere."
            )
        taken = {*model.tensors, *(op.name for op in model.ops)}
        copies = {
            t: replace(model.tensors[t], name=unique(f"{t}.c", taken), origin=model.origin(t), kind="activation")
            for t in wanted
        }
        before, after = dict[str, list[Op]](), dict[str, list[Op]]()
        for tensor, copied in copies.items():
            reader = next(op for op in model.ops if op.name in readers and any(o.tensor == tensor for o in op.inputs))
            maker = reader if tensor in weights else makers[tensor][0]
            made = replace(copy_op(tensor, copied, maker), from_weights=tensor in weights or maker.from_weights)
            (before if tensor in weights else after).setdefault(maker.name, []).append(made)

        def reading(op: Op) -> Op:
            inputs = (replace(o, tensor=copies[o.tensor].name) if o.tensor in copies else o for o in op.inputs)
            return replace(op, inputs=tuple(inputs)) if op.name in readers else op

        own = ((*before.get(op.name, ()), reading(op), *after.get(op.name, ())) for op in model.ops)
        return model.with_ops(chain.from_iterable(own), copies.values())


def copy_op(tensor: str, copied: PTensor, maker: Op) -> Op:
    """Return the op that copies a tensor made by `maker`."""
    indices = tuple(Index(size, f, "spatial") for size, f in zip(copied.extents, copied.factors, strict=True))
    read, made = (Operand(name, tuple(range(len(indices)))) for name in (tensor, copied.name))
    op = Op(copied.name, "ss.identity", (Ref(0),), (), (read,), (made,), indices, module=maker.module)
    return replace(op, from_data=maker.from_data, from_weights=maker.from_weights, iteration=maker.iteration)


def _marked(model: Model, chosen: Sequence[Op], algorithm: str, field: str) -> Model:
    """Return the model with one new name, after the first op, in a field of all chosen ones."""
    if not any(op.has_mirror for op in chosen):
        raise NoneOfThese(f"{algorithm} needs ops that have a backward; none of these do.")
    region = unique(chosen[0].name, {getattr(op.asked, field) for op in model.ops})
    marked = {op.name: op.asking(**{field: region}) for op in chosen}
    return model.with_ops(marked.get(op.name, op) for op in model.ops)


def rewrite(graph: Graph, regions: Sequence[Sequence[Op]], algorithm: Rewrite, where: str) -> list[Parts]:
    """Apply an algorithm that replaces ops to one region after the other. Returns the parts of the new ops.

    If op `old` is gone, an op named `old.word` gets the parts of `old`, cut on the same factors.
    """
    before = after = graph.model
    try:
        for ops in regions:
            after = _in_turns(after, algorithm, ops)
    except TransformError as error:
        raise TransformError(f"op_trans at {where}: {error}") from None
    wrong = _wrong(before, after)
    if wrong:
        raise TransformError(f"op_trans at {where}: {type(algorithm).__name__} {wrong}")
    known, kept = {op.name for op in before.ops}, {op.name for op in after.ops}
    made = [op for op in after.ops if op.name not in known]
    places = {
        op.name: [m for m in made if m.name.startswith(f"{op.name}.")] for op in before.ops if op.name not in kept
    }
    if recomputed := next((name for name in places if graph.op(name).region), ""):
        raise TransformError(
            f"op_trans at {where}: {algorithm} of {recomputed} comes after its Recompute; do it before that."
        )
    _take_over(graph, places)
    graph.rewrite(after)
    names = (name for ops in regions for name in sorted({op.name for op in ops}))
    graph.journal += [Entry("op_trans", name, str(algorithm), where) for name in names]
    return [graph.parts(op) for op in made]


def _in_turns(model: Model, algorithm: Rewrite, ops: Sequence[Op]) -> Model:
    """Return the model with ops replaced, those of each iteration by themselves. Raises NoneOfThese if there is nothing
    to do in any of the iterations.
    """
    names, turns = {op.name for op in ops}, sorted({op.iteration for op in ops})
    idle = list[NoneOfThese]()
    for turn in turns:
        try:
            model = algorithm.rewrite(model, tuple(o for o in model.ops if o.name in names and o.iteration == turn))
        except NoneOfThese as error:
            idle.append(error)
    if len(idle) == len(turns) > 0:
        given = some([op.name for op in ops], 3)
        raise NoneOfThese(f"{idle[0]} These are {given}; give other ops, or leave this op_trans out.")
    return model


def _take_over(graph: Graph, places: Mapping[str, Sequence[Op]]) -> None:
    """Give ops the parts, and the place in orders, of the ops that they replace."""
    for name, ops in places.items():
        old, grid = graph.op(name), graph.grids[name]
        graph.grids |= {op.name: _cut_alike(grid, old, op) for op in ops}
        graph.policy = graph.policy.inherited({op.name: name for op in ops}, {})

    def renamed(group: Group) -> Group:
        members = [
            (op.name, at) for n, at in group.members for op in places.get(n, ()) if group.kind == "F" or op.has_mirror
        ]
        return replace(group, members=(*(m for m in group.members if m[0] not in places), *members))

    if places:
        graph.orders = changed(graph.orders, renamed)


def _cut_alike(grid: Grid, old: Op, op: Op) -> Grid:
    """Return the grid of an op with the cuts of another one on the same factors, replicated if it lacks them."""
    at = [None if a.index is None else op.find(old.indices[a.index].factor) for a in grid.axes]
    pairs = zip(grid.axes, at, strict=True)
    axes = (
        replace(a, index=i, sizes=a.sizes if i is not None else (1,) * len(a.sizes), partial_inputs=())
        for a, i in pairs
    )
    children = {cell: _cut_alike(child, old, op) for cell, child in grid.children.items()}
    return Grid(tuple(axes), grid.devices, children, grid.replaced_at)


def _wrong(before: Model, after: Model) -> str:
    """Return the violation of a model made by an algorithm, and the remedy; '' if there is none."""
    if not isinstance(after, Model):
        return f"gives {after!r}; its method rewrite must return a Model."
    known = {op.name: op for op in before.ops}
    made = {name for name, tensor in after.tensors.items() if tensor.kind != "activation"}
    names = [op.name for op in after.ops]
    twice = next((name for name in names if names.count(name) > 1), "") if len(set(names)) < len(names) else ""
    if twice:
        return f"makes two ops named {twice}; give each a name of its own."
    # Ops and tensors that the algorithm left as they were.
    kept = {n for n, t in before.tensors.items() if after.tensors.get(n) is t}
    for op in after.ops:
        is_same = known.get(op.name) is op
        for operand in (*op.inputs, *op.outputs):
            if is_same and operand.tensor in kept:
                continue
            extents = after.tensors[operand.tensor].extents if operand.tensor in after.tensors else None
            sizes = [None if i is None else op.indices[i].size if i < len(op.indices) else -1 for i in operand.slots]
            if extents is None or len(sizes) != len(extents):
                return (
                    f"lets {op.name} have {operand.tensor} as {operand.slots} of its indices; it has slots {extents}."
                )
            if any(s not in (None, e) for s, e in zip(sizes, extents, strict=True)):
                return f"lets {op.name} have {operand.tensor} of {extents} as indices of {sizes}; make these equal."
        if not is_same and op.is_forward and (added := _added(op)):
            factor, tensor = added
            return (
                f"lets {op.name} be cut along {factor}, which {tensor} lacks, so that its parts would be added; mark "
                "the index frozen, or summed."
            )
        missing = [o.tensor for o in op.inputs if o.tensor not in made]
        if missing:
            return f"lets {op.name} read {missing[0]} before it is made; put its producer first."
        double = [o.tensor for o in op.outputs if o.tensor in made and op.is_forward]
        if double:
            return f"lets {op.name} make {double[0]}, which is made already; give it a tensor of its own."
        made.update(o.tensor for o in op.outputs)
    updates = ([op for op in model.ops if not op.is_forward and op.name in known] for model in (before, after))
    if (after.loss and after.loss not in made) or next(updates) != next(updates):
        return "changes the updates, or loses the loss; only forward ops may change."
    more = (op for op in after.ops if not op.is_forward and op.name not in known)
    wrong = next((op.name for op in more if not op.is_write or op.inputs[0].tensor in before.tensors), "")
    if wrong:
        return f"adds the update {wrong}; only older versions of weights may be set."
    return ""


def _added(op: Op) -> tuple[str, str] | None:
    """Return a factor along which an op may be cut, and a result that lacks it, whose parts would be added."""
    # What follows another index is cut with it.
    spatial = [(n, index.factor) for n, index in enumerate(op.indices) if index.mark == "spatial" and not index.follows]
    return next(((factor, o.tensor) for o in op.outputs for n, factor in spatial if n not in o.slots), None)
