"""Recomputation: the algorithms of `op_trans` that choose the recomputed ops, and nested regions."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

from superscaler.errors import NoneOfThese, TransformError
from superscaler.groups import group_by
from superscaler.ir.graph import Graph
from superscaler.ir.journal import Entry
from superscaler.ir.model import Model, Op, Operand
from superscaler.ir.names import unique
from superscaler.specs.arguments import checked_class


@checked_class
@dataclass(frozen=True, slots=True)
class Recompute:
    """Recompute ops in the backward instead of keeping the tensors that it needs.

    y = f(x); d(x) += d.f(d(y))  ->  y = f(x), no tape; y.r = f(x); d(x) += d.f.r(d(y))

    All ops of one `op_trans` are one region: recomputed ops read recomputed values, so only the region's inputs are
    kept. They run when the backward reaches the region (`select(kind="R")` orders them otherwise), on the parts of
    their ops. Weights and values inside are communicated a second time; random numbers are those of the ops. With
    `copies`, copies among the ops are recomputed, too; those that another region recomputes always are. What is
    recomputed is gathered again for that: it leaves its region of `Regather`.

    Regions nest, in any depth. The outer region is recomputed without a tape for the inner one. The inner one is
    recomputed once more, from values of the outer, when its own backward comes:

    y.r = f(x); d(x) += d.f.r(d(y))  ->  y.r = f(x), no tape; y.r.r = f(x); d(x) += d.f.r.r(d(y))
    """

    copies: bool = field(default=False, repr=False)

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model:
        names = {op.origin or op.name for op in ops if self.copies or op.region or not op.is_copy}
        chosen = _needed(model, [op for op in model.ops if op.name in names])
        if not chosen:
            raise NoneOfThese("Recompute needs ops that have a backward; none of these do.")
        return with_twins(model, chosen)


@dataclass(frozen=True, slots=True)
class Save:
    """Keep the tensors that the backward of ops needs, although the model wraps them in `torch.utils.checkpoint`.

    Without it, the ops of each such region (`op.checkpoint`) are recomputed together after the plan has run, unless the
    plan recomputes some of them itself.
    """

    def rewrite(self, model: Model, ops: tuple[Op, ...]) -> Model:
        recomputed = next((op for op in ops if op.region), None)
        if recomputed is not None:
            raise TransformError(f"Save of {recomputed.name} comes after its Recompute; leave it out of one of them.")
        if not any(op.checkpoint for op in ops):
            raise NoneOfThese("Save needs ops that the model wraps in torch.utils.checkpoint; none of these are.")
        names = {op.name for op in ops}
        kept = (op.asking(checkpoint="") if op.name in names else op for op in model.ops)
        return model.with_ops(kept)


def recompute_checkpoints(graph: Graph) -> None:
    """Recompute the model's own checkpointed regions, except where the plan says otherwise."""
    model, names = graph.model, list[str]()
    for ops in group_by((op for op in graph.forward_ops if op.checkpoint), lambda op: op.checkpoint).values():
        if not any(op.region for op in ops) and (needed := _needed(model, ops)):
            model = with_twins(model, needed)
            names += [op.name for op in needed]
    if names:
        graph.rewrite(model)
        graph.journal += [Entry("op_trans", name, "Recompute()", "the model's own checkpoint") for name in names]


def keep_slices(graph: Graph) -> None:
    """Let recomputed ops read the first values, not recomputed ones, of tensors that slices read of each other, as keys
    and values of causal attention in a pipeline of slices.

    Slices run forward in order and back in reverse, so an earlier slice is recomputed after the later one reads it.
    """
    model = graph.model
    first = {o.tensor: model.origin(o.tensor) for op in model.ops if op.origin for o in op.outputs}

    def kept(op: Op, operand: Operand) -> Operand:
        ends = {op.indices[i].until for i in operand.slots if i is not None} - {None}
        is_cut = any(axis.is_microbatch and axis.index in ends for axis in graph.grids[op.origin].axes)
        return replace(operand, tensor=first.get(operand.tensor, operand.tensor)) if is_cut else operand

    def changed(op: Op) -> Op:
        return replace(op, inputs=tuple(kept(op, o) for o in op.inputs)) if op.origin else op

    if first:
        graph.rewrite(model.with_ops(map(changed, model.ops)))


def _needed(model: Model, ops: Sequence[Op]) -> list[Op]:
    """Return the ops that have a mirror, recomputed or not, and the makers of their inputs."""
    twins = {op.name: model.twins.get(op.name, ()) for op in ops}
    mirrored = {op.name for op in ops if op.has_mirror or any(twin.has_mirror for twin in twins[op.name])}
    read = {o.tensor for own in twins.values() for twin in own for o in twin.inputs}
    found = list[Op]()
    for op in reversed([op for op in ops if op.is_forward and not op.from_data]):
        if op.name in mirrored or any(o.tensor in read for o in op.outputs):
            read.update(o.tensor for o in op.inputs)
            found.append(op)
    return found[::-1]


def with_twins(model: Model, ops: Sequence[Op]) -> Model:
    """Return the model with a recomputed op for each op of a region, which reads values of its own region.

    A nested region recomputes the outer region's recomputed ops. A region inside reads the new values.
    """
    names = {op.name: op for op in ops}.keys()
    recomputed = [op for op in model.ops if op.origin]
    around, inside = _neighbours(recomputed, names)
    versions = ((op, *(twin for twin in model.twins.get(op.name, ()) if twin.region in around)) for op in ops)
    bases = {some[-1].name: some[0] for some in versions}
    region = unique(next(iter(bases)), {op.asked.region for op in model.ops})
    taken, taken_by_ops = {*model.tensors}, {op.name for op in model.ops}
    forward, updates = model.forward_ops, [op for op in model.ops if not op.is_forward]
    originals = [op for op in forward if op.name in bases]
    made = [o.tensor for op in originals for o in op.outputs]
    tensors = {t: replace(model.tensors[t], name=unique(f"{t}.r", taken), origin=model.origin(t)) for t in made}

    def renamed(operands: Sequence[Operand]) -> tuple[Operand, ...]:
        return tuple(replace(o, tensor=tensors[o.tensor].name) if o.tensor in tensors else o for o in operands)

    def twin(op: Op) -> Op:
        return replace(
            op,
            name=unique(f"{op.name}.r", taken_by_ops),
            origin=bases[op.name].name,
            asked=replace(op.asked, region=region, regather=""),
            inputs=renamed(op.inputs),
            outputs=renamed(op.outputs),
        )

    def changed(op: Op) -> Op:
        if op.origin and op.region in inside:
            return replace(op, inputs=renamed(op.inputs))
        if op.name in names:
            is_innermost = not any(t.region in inside for t in model.twins.get(op.name, ()))
            op = op.asking(regather="", **({"region": region} if is_innermost else {}))
        return replace(op, has_mirror=False) if op.name in bases else op

    at = next((n for n, op in enumerate(forward) if op.origin and op.region in inside), len(forward))
    twins = map(twin, originals)
    everything = (*map(changed, forward[:at]), *twins, *map(changed, forward[at:]), *updates)
    return model.with_ops(everything, tensors.values())


def _neighbours(recomputed: Sequence[Op], names: Set[str]) -> tuple[set[str], set[str]]:
    """Return the regions around a new one, and those inside it. Raises TransformError for a partial overlap."""
    members: dict[str, dict[str, None]] = {}
    for op in recomputed:
        members.setdefault(op.region, {})[op.origin] = None
    met = {region: own.keys() for region, own in members.items() if not own.keys().isdisjoint(names)}
    for own in met.values():
        both = next(name for name in names if name in own)
        if own == names:
            raise TransformError(f"Recompute of {both} is asked for twice; leave it out of one of them.")
        if not (own < names or own > names):
            more, less = (next(n for n in one if n not in other) for one, other in ((names, own), (own, names)))
            raise TransformError(
                f"Recompute of {both} and {more}, but {both} is recomputed with {less} already; "
                "choose regions of which one is inside the other."
            )
    around = {region for region, own in met.items() if own > names}
    return around, met.keys() - around
