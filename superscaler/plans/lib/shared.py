"""Helpers of several plans, written in the verbs: groups of ops, and the factors of tensor parallelism."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from math import gcd, prod

from superscaler.errors import divisors
from superscaler.groups import collect
from superscaler.plans.lib.meshes import at_place
from superscaler.specs.arguments import checked
from superscaler.verbs import Block, Decompose, Graph, InputError, Op, Replicate, Split, op_trans


def layers(graph: Graph) -> list[Block]:
    """Return the trained ones of `inner_blocks`."""
    return [block for block in inner_blocks(graph) if any(op.has_mirror or op.region for op in block.ops)]


def inner_blocks(graph: Graph) -> list[Block]:
    """Return the blocks. If modules that repeat inside one have most of its FLOPs and several products each, return
    those instead: the layers of a stage of Swin.
    """
    found: list[Block] = []
    for block in graph.blocks:
        inside = re.compile(rf"{re.escape(block.path)}\.(.*?\.)?\d+(?=\.|$)")
        inner = collect((own[0], op) for op in block.ops if (own := inside.match(op.module)))
        inner = {path: ops for path, ops in inner.items() if sum(op.flops > 0 for op in ops) > 1}
        is_most = 2 * sum(op.flops for ops in inner.values() for op in ops) > sum(op.flops for op in block.ops)
        found += [Block(path, tuple(ops)) for path, ops in inner.items()] if is_most else [block]
    return found


def stretches(graph: Graph) -> list[tuple[str, list[Op]]]:
    """Return the forward ops in order: those of each layer with its path, and those between layers with none."""
    layer_of = {op.name: layer.path for layer in layers(graph) for op in layer.ops}
    found: dict[tuple[str, int], list[Op]] = {}
    for op in graph.forward_ops:
        path = layer_of.get(op.name, "")
        found.setdefault((path, 0 if path else len({path for path, _ in found})), []).append(op)
    return [(path, ops) for (path, _), ops in found.items()]


def made_for(graph: Graph, core: Iterable[Op], among: Collection[str]) -> list[Op]:
    """Return ops, and those `among` others whose results only these ops read, directly or through each other."""
    uses, inside = graph.model.uses, {op.name for op in core}
    for op in (op for op in reversed(graph.forward_ops) if op.name in among):
        readers = [reader.name for o in op.outputs for reader, _ in uses[o.tensor]]
        if readers and inside.issuperset(readers) and not op.from_data:
            inside.add(op.name)
    return [op for op in graph.forward_ops if op.name in inside]


def attentions(graph: Graph, plan: str) -> list[Op]:
    """Return the ops that compute a whole attention. Raises InputError if there are none."""
    found = [op for op in graph.forward_ops if "attention" in op.target]
    if not found:
        raise InputError(
            f"{plan} needs attention in one op (torch's scaled_dot_product_attention), but this model has none; "
            "choose a plan that cuts other factors."
        )
    return found


def batch_of(graph: Graph) -> int:
    """Return the rows of the batch."""
    batch = graph.factors.get("batch")
    return batch.size if batch else 1


def is_staged(graph: Graph) -> bool:
    """Return whether a pipeline has cut the model into stages."""
    return any(axis.is_stage for op in graph.forward_ops for axis in graph.grids[op.name].axes)


def keys_of(graph: Graph, attention: Op) -> tuple[str, ...]:
    """Return the factors of the positions of an attention's keys."""
    return graph.model.tensors[attention.inputs[1].tensor].slots[-2]


def sequences(graph: Graph, plan: str, count: int, parts: str = "devices") -> list[str]:
    """Return the factors of the tokens that the blocks pass to each other.

    For each block, this is the first factor of its result that is not the batch, is in no weight of the block, and is
    divided by `count`. `parts`: the name of the counted things, for errors.
    """
    found, weights = dict[str, None](), graph.model.weights
    for block in graph.blocks:
        read = [graph.model.tensors[o.tensor] for op in block.ops for o in op.inputs if o.tensor in weights]
        own = {f for tensor in read for f in tensor.factors} | {"batch"}
        given = graph.model.tensors[block.ops[-1].outputs[0].tensor].slots
        tokens = [f for dim in given for f in dim if f not in own]
        fitting = [f for f in tokens if graph.factors[f].size % count == 0]
        if not fitting:
            sizes = ", ".join(f"{f} of {graph.factors[f].size}" for f in tokens) or "nothing but batch and hidden"
            raise InputError(
                f"{plan} over {count} {parts} cuts the tokens that {block.path} gives, which are along {sizes}; choose "
                f"a number of {parts} that divides one of these."
            )
        found.setdefault(fitting[0])
    if not found:
        raise InputError(
            f"{plan} cuts the tokens that repeated blocks give each other, but this model has no such blocks."
        )
    return list(found)


def reads_ahead(graph: Graph, op: Op, factors: Sequence[str]) -> str:
    """Return the tensor that an op reads for all tokens although its part needs only some; '' if there is none.

    Cut along its first factor, an op reads the others whole. It also reads that factor whole at another index, unless
    the rows of its notation end where its own cut ends.
    """
    first = next((i for f in factors if (i := op.find(f)) is not None), None)
    for operand in op.inputs:
        for factor, i in zip(graph.model.tensors[operand.tensor].factors, operand.slots, strict=True):
            if factor in factors and (first is None or i is None or first not in (i, op.indices[i].until)):
                return operand.tensor
    return ""


def along(op: Op, factors: Iterable[str]) -> str:
    """Return the first factor of an op's output, else the first that it sums over; '' if it has none."""
    given = {op.indices[i].factor for o in op.outputs for i in o.slots if i is not None}
    own = [f for f in factors if op.find(f) is not None or f in dict(op.passes)]
    return next((f for f in own if f in given), next(iter(own), ""))


def joined(ops: Iterable[Op]) -> list[list[Op]]:
    """Return ops in groups: ops that read each other's results are in one group."""
    found: dict[int, list[Op]] = {}
    for number, op in enumerate(ops):
        read = {o.tensor for o in op.inputs}
        own = [n for n, group in found.items() if any(o.tensor in read for other in group for o in other.outputs)]
        found[number] = [*itertools.chain(*(found.pop(n) for n in own)), op]
    return list(found.values())


@checked
def decompose_losses(graph: Graph, parts: int, place: int | None = None) -> None:
    """Replace losses over classes by steps, if `tensor_splits` cuts a head on these and no other op needs them whole.
    Then the cut goes on from the head to the loss, and to the look-ups in the head's weight. Call it before
    `tensor_splits`, with the same number of parts. `place`: of the losses in a pipeline; any by default.
    """
    for factor in dict.fromkeys(_outer_factors(graph, parts).values()) if parts > 1 else ():
        whole = at_place(graph, _with(graph, factor)[1], place)
        if whole and all(Decompose.has_steps(op, factor) for op in whole):
            op_trans(graph, whole, Decompose())


@checked
def tensor_splits(
    graph: Graph, parts: int, axis: str = "", in_blocks: bool = True, lookups: bool = False
) -> dict[str, list[Split | Replicate]]:
    """Return the splits of each op, or of those outside the blocks only, under tensor parallelism into `parts` along a
    mesh axis. They are found from the factors.

    A factor of a block is tensor parallel if one weight op of the block makes it and a later one of the same block sums
    over it (or one op with two weights does both: experts), nothing in the block needs it whole, and the block's result
    does not carry it. Grouped-query heads are two such factors, which are cut one after the other. Outside the blocks,
    products with a weight are cut on the weight's own dim, and `lookups` in one on its rows; if no op needs these whole
    (`decompose_losses`), all ops with them are cut.

    Ops of a block that have only some of these factors (keys and values of grouped queries) are replicated along the
    others, and the mirror of each replica reads only the gradients of its own queries. Then the gradients for the
    readers of queries, keys and values are of one kind, and are summed together.
    """
    if parts < 1:
        raise InputError(f"tensor_splits cannot make {parts} parts; choose a number of at least 1.")
    splits = _inner_splits(graph, parts) if in_blocks else {}
    outer = {name: factor for name, factor in _outer_factors(graph, parts, lookups).items() if name not in splits}
    inside = splits.keys() | {op.name for block in inner_blocks(graph) for op in block.ops}
    for factor in dict.fromkeys(outer.values()):
        own, whole = _with(graph, factor)
        is_free = not whole and not any(op.name in inside for op in own)
        splits |= {op.name: [Split(factor, parts)] for op in own if is_free or outer.get(op.name) == factor}
    uses = graph.model.uses
    for op in reversed(graph.forward_ops):
        # Casts and transposes of a weight are cut as what reads them.
        readers = [splits.get(r.name) for o in op.outputs for r, _ in uses[o.tensor]] if op.from_weights else []
        if op.name not in splits and readers and readers[0] and all(cut == readers[0] for cut in readers):
            splits[op.name] = readers[0]
    if parts > 1 and not splits and not in_blocks:
        raise InputError(f"{parts} devices divide nothing outside the blocks of this model; choose pipeline_1f1b.")
    if parts > 1 and not splits:
        raise undivided(graph, parts)
    return {op.name: [_cut(op, s, axis) for s in splits[op.name]] for op in graph.forward_ops if op.name in splits}


def cuts_along(graph: Graph, op: Op, factors: Collection[str]) -> int:
    """Return into how many parts an op is cut along factors."""
    axes = (a for a in graph.grids[op.name].axes if a.index is not None and op.indices[a.index].factor in factors)
    return prod(len(a.sizes) for a in axes)


def undivided(graph: Graph, parts: int, what: str = "") -> InputError:
    """Return the error for a number of parts that divides no factor of tensor parallelism. `what`: the plan, if it is
    another one.
    """
    weights = weights_of(graph)
    sizes = sorted({f"{f} of size {graph.factors[f].size}" for o in _scopes(graph) for f in _candidates(weights, o)})
    shown = ", ".join(sizes[:6]) or "none"
    name = what or f"tensor parallelism into {parts} parts"
    return InputError(
        f"{name} divides no factor of this model: {shown}{'; choose a number that divides one' * bool(sizes)}."
    )


def weights_of(graph: Graph) -> set[str]:
    """Return the weights, and the tensors that are made from these alone."""
    return graph.model.weights | graph.model.from_weights


def _scopes(graph: Graph) -> list[tuple[Op, ...]]:
    return [block.ops for block in inner_blocks(graph)] + [graph.forward_ops]


def _inner_splits(graph: Graph, parts: int, what: str = "", done: int = 1) -> dict[str, list[Split]]:
    """Return the splits of the ops of each block, then of those outside of all, which count as one block."""
    splits: dict[str, list[Split]] = {}
    weights = weights_of(graph)
    for scope in _scopes(graph):
        ops = tuple(op for op in scope if op.name not in splits)
        for chain in _chains(ops, _candidates(weights, ops), parts, what, done):
            names = {f for s in chain for f in s.factors}
            for op in ops:
                if any(op.find(f) is not None for f in names):
                    splits[op.name] = chain
    return splits


def _outer_factors(graph: Graph, parts: int, lookups: bool = False) -> dict[str, str]:
    """Return the factor of each product with a weight outside the blocks: the weight's own, if `parts` divides it. A
    look-up has the factor of its rows.
    """
    weights, inside = weights_of(graph), {op.name for block in inner_blocks(graph) for op in block.ops}
    outside = (op for op in graph.forward_ops if op.name not in inside)
    return {op.name: factor for op in outside if (factor := _own_factor(graph, weights, op, parts, lookups))}


def _with(graph: Graph, factor: str) -> tuple[list[Op], list[Op]]:
    """Return the ops that have a factor, as two groups: those that can be cut on it, and those that need it whole."""
    own = [op for op in graph.forward_ops if any(i.factor == factor for i in op.indices)]
    return [op for op in own if op.find(factor) is not None], [op for op in own if op.find(factor) is None]


def splits_within(graph: Graph, parts: int, what: str) -> dict[str, list[Split]]:
    """Return the splits of each op of a block by which the present cuts of tensor parallelism become `parts` times as
    many. `what`: the plan, in errors.
    """
    factors = {f for some in _inner_splits(graph, parts, what).values() for s in some for f in s.factors}
    outer = max((cuts_along(graph, op, factors) for op in graph.forward_ops), default=1)
    done = {(name, s.factors): s.parts for name, some in _inner_splits(graph, outer).items() for s in some}
    found: dict[str, list[Split]] = {}
    for name, some in _inner_splits(graph, outer * parts, what, outer).items():
        own = [s for s in some if graph.op(name).find(s.factors[0]) is not None]
        left = {s.factors[0]: s.parts // done.get((name, s.factors), 1) for s in own}
        found[name] = [Split(factor, count) for factor, count in left.items() if count > 1]
    return found


def _cut(op: Op, split: Split, axis: str) -> Split | Replicate:
    (factor,) = split.factors
    is_cut = op.find(factor) is not None or factor in dict(op.passes)
    return Split(factor, split.parts, axis=axis) if is_cut else Replicate(split.parts, "route", axis)


def _weights(weights: set[str], op: Op) -> list[int]:
    """Return the indices of the weights that an op contracts with another operand, if it is a product with a weight."""
    used = [i for o in op.inputs if o.tensor in weights for i in o.slots if i is not None]
    shared = (i for i in used if sum(i in operand.slots for operand in op.inputs) > 1)
    return used if any(op.indices[i].mark == "summed" for i in shared) else []


def _candidates(weights: set[str], ops: tuple[Op, ...]) -> list[str]:
    """Return the tensor-parallel factors of a scope, those in most ops first."""
    made: set[str] = set()
    found: list[str] = []
    for op in ops:
        times = Counter(i for o in op.inputs if o.tensor in weights for i in o.slots if i is not None)
        inner = [op.indices[i] for i, count in times.items() if count > 1]
        found += [i.factor for i in inner if i.mark == "summed" and i.factor not in found]
        marks = {(op.indices[i].factor, op.indices[i].mark) for i in _weights(weights, op)}
        found += [f for f, mark in marks if mark == "summed" and f in made and f not in found]
        made |= {f for f, mark in marks if mark == "spatial"}
    last = ops[-1].outputs[0]
    carried = {ops[-1].indices[i].factor for i in last.slots if i is not None}
    held = [i for op in ops for i in op.indices]
    whole = {i.factor for i in held if i.mark == "frozen"}
    count = Counter(f for op in ops for f in {i.factor for i in op.indices})
    return sorted((f for f in found if f not in carried | whole), key=lambda f: (-count[f], f))


def _chains(ops: tuple[Op, ...], candidates: list[str], parts: int, what: str, done: int) -> list[list[Split]]:
    """Return splits that make `parts` parts together; factors of one op are cut one inside the other. `what`: the plan,
    if it is not tensor parallelism; `done`: the parts that were there before.
    """
    where: dict[str, set[str]] = {f: set() for f in candidates}
    for op in ops:
        for f in where.keys() & {i.factor for i in op.indices}:
            if op.find(f) is not None:
                where[f].add(op.name)
    size = {i.factor: i.size for op in ops for i in op.indices}
    chains: list[tuple[list[Split], set[str], int]] = []
    for f in candidates:
        touching = [k for k, (_, names, _) in enumerate(chains) if names & where[f]]
        splits, names, left = chains[touching[0]] if touching else ([], set(), parts)
        cut = gcd(left, size[f])
        if cut == 1 or len(touching) > 1:
            continue
        chain = ([*splits, Split(f, cut)], names | where[f], left // cut)
        chains = [c for k, c in enumerate(chains) if k not in touching] + [chain]
    short = [c for c in chains if c[2] > 1]
    if short:
        sizes = {f: size[f] for s in short[0][0] for f in s.factors}
        factors, counts = (
            ", ".join(f"{f} of size {n}" for f, n in sizes.items()),
            divisors(prod(sizes.values()) // done),
        )
        name = what or f"tensor parallelism into {parts} parts"
        has = f", which other plans cut by {done}" if done > 1 else ""
        raise InputError(f"{name} does not divide {factors}{has}; choose {counts}.")
    return [splits for splits, _, _ in chains]


def _own_factor(graph: Graph, weights: set[str], op: Op, parts: int, lookups: bool) -> str | None:
    used, mark = _weights(weights, op), "spatial"
    # What constants look up, as positions, is little.
    if lookups and not used and any(_reads_inputs(graph, o.tensor) for o in op.inputs):
        used, mark = [i for o in op.inputs if o.tensor in weights for i in o.slots if i is not None], "summed"
    own = (op.indices[i] for i in used)
    return next((i.factor for i in own if i.mark == mark and i.size % parts == 0), None)


def _reads_inputs(graph: Graph, tensor: str) -> bool:
    """Return whether a tensor is an input of the model, or made from more than constants."""
    if tensor not in graph.model.producers:
        return graph.model.tensors[tensor].kind == "input"
    maker, _ = graph.model.producers[tensor]
    return not maker.from_data or any(_reads_inputs(graph, o.tensor) for o in maker.inputs)
