"""Kinds of blocks: equal subgraphs, and the model with fewer of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from superscaler.ir.graph import Graph
from superscaler.ir.model import Model, Op
from superscaler.ir.parts import Block
from superscaler.ir.variants import resized
from superscaler.plans.lib.shared import batch_of, inner_blocks
from superscaler.specs.registered import REGISTERED

# What a tensor is to a block: made inside by an op, its weight, or given from outside; with its shape.
Form = tuple[object, ...]
# The most blocks that take turns.
_PERIOD = 8


def runs(graph: Graph) -> list[list[Block]]:
    """Return the blocks in runs: each block of a run does the same, with other weights, on the result of the one
    before it. Of the blocks and those inside of them, it takes those that repeat most.

    Blocks that take turns, as those of Swin with windows and with shifted ones, are one block of a run together.
    """
    return min((_runs(graph, blocks) for blocks in (graph.blocks, inner_blocks(graph))), key=_distinct)


def has_own(graph: Graph) -> bool:
    """Return whether a graph has operators of the user: they are in this process only, and their code may change."""
    return any(op.target in REGISTERED for op in graph.ops)


def _distinct(found: Sequence[Sequence[Block]]) -> float:
    """Return the share of ops in blocks that are left if each run has one."""
    every = sum(len(block.ops) for run in found for block in run)
    return sum(len(run[0].ops) for run in found) / max(every, 1)


def _runs(graph: Graph, blocks: Sequence[Block]) -> list[list[Block]]:
    numbers, found, first = dict[Form, int](), list[list[Block]](), 0
    same = [numbers.setdefault(form_of(graph.model, block.ops), len(numbers)) for block in blocks]
    while first < len(blocks):
        best, most, period = list[Block](), -1, 0
        for n in range(1, _PERIOD + 1):
            # No run of this period has more blocks beside its first ones.
            if len(blocks) - first - n > most:
                run = _repeated(graph.model, blocks[first:], same[first:], n)
                if n * (len(run) - 1) > most:
                    best, most, period = run, n * (len(run) - 1), n
        found.append(best)
        first += period * len(best)
    return found


def _repeated(model: Model, blocks: Sequence[Block], same: Sequence[int], period: int) -> list[Block]:
    """Return the run with which a row of blocks begins, each of its blocks made of so many. `same`: equal for equal
    blocks.
    """
    run, end = [_joined(blocks[:period])], period
    while len(blocks) >= end + period and same[:period] == same[end : end + period]:
        after = _joined(blocks[end : end + period])
        is_equal = period == 1 or form_of(model, after.ops) == form_of(model, run[0].ops)
        if not (is_equal and _is_next(run[-1], after)):
            break
        run.append(after)
        end += period
    return run


def _joined(blocks: Sequence[Block]) -> Block:
    return Block(blocks[0].path, tuple(op for block in blocks for op in block.ops))


def form_of(model: Model, ops: Sequence[Op]) -> Form:
    """Return a key of ops, equal for equal subgraphs: their operators, and the origins of their inputs."""
    number = {o.tensor: (n, k) for n, op in enumerate(ops) for k, o in enumerate(op.outputs)}
    outside: dict[str, int] = {}
    found = []
    for op in ops:
        inputs = tuple(
            number.get(o.tensor) or (model.tensors[o.tensor].kind, outside.setdefault(o.tensor, len(outside)))
            for o in op.inputs
        )
        shapes = tuple(_meta(model, o.tensor) for o in (*op.inputs, *op.outputs))
        given = _alike(op.args), _alike(op.kwargs)
        found.append((op.target, *given, inputs, shapes, op.has_mirror, bool(op.checkpoint)))
    return tuple(found)


def _alike(value: object) -> object:
    """Return arguments with one number in the place of all fractions but 0: the rate at which paths are dropped grows
    with depth, and takes as long.
    """
    if isinstance(value, tuple):
        return tuple(map(_alike, value))
    return 0.5 if isinstance(value, float) and value else value


def _is_next(first: Block, second: Block) -> bool:
    """Return whether a block reads a result of an equal one where that one reads something from before."""
    made = {o.tensor for op in first.ops for o in op.outputs}
    pairs = zip(first.ops, second.ops, strict=True)
    ends = ((a.tensor, b.tensor) for x, y in pairs for a, b in zip(x.inputs, y.inputs, strict=True))
    return any(after in made and before not in made for before, after in ends)


def bypass(model: Model, block: Block) -> dict[str, str] | None:
    """Return, for each result of a block that others read, what they read in a model without the block: the one value
    of the same shape that the block gets. None if there is no such value.
    """
    names, made = {op.name for op in block.ops}, {o.tensor for op in block.ops for o in op.outputs}
    others = (op for op in model.forward_ops if op.name not in names)
    results = dict.fromkeys(o.tensor for op in others for o in op.inputs if o.tensor in made)
    given = {o.tensor for op in block.ops for o in op.inputs if o.tensor in model.producers} - made
    found = dict[str, str]()
    for name in results:
        like = [x for x in given if _meta(model, x) == _meta(model, name)]
        if len(like) != 1:
            return None
        found[name] = like[0]
    return found


def _meta(model: Model, name: str) -> tuple[object, ...]:
    return model.tensors[name].shape, model.tensors[name].dtype


def reduced(graph: Graph, repeated: Sequence[Sequence[Block]], counts: Sequence[int], rows: int) -> Graph:
    """Return the graph with the first `counts` blocks of each of its `runs`, and with so many rows.

    What reads the last block of a run reads the last kept one instead; without any, what that block gets (`bypass`).
    Updates of other blocks are gone. It has no values: it is compiled and simulated, not run.
    """
    model, other = graph.model, dict[str, str]()
    dropped = set[str]()
    for run, count in zip(repeated, counts, strict=True):
        for block in run[count:]:
            dropped |= {op.name for op in block.ops}
            if count == 0:
                other |= bypass(model, block) or {}
                continue
            pairs = zip(run[count - 1].ops, block.ops, strict=True)
            other |= {b.tensor: a.tensor for x, y in pairs for a, b in zip(x.outputs, y.outputs, strict=True)}
    forward = [_reading(op, other) for op in model.forward_ops if op.name not in dropped]
    read = {o.tensor for op in forward for o in (*op.inputs, *op.outputs)}
    rest = [op for op in model.ops if not op.is_forward and {o.tensor for o in op.inputs} & read]
    names = read | {o.tensor for op in rest for o in (*op.inputs, *op.outputs)} | {*model.inputs}
    tensors = {name: tensor for name, tensor in model.tensors.items() if name in names}
    aliases = {alias: name for alias, name in model.aliases.items() if name in tensors}
    segments = {piece: whole for piece, whole in model.segments.items() if piece in tensors or whole[0] in tensors}
    small = replace(model, tensors=tensors, ops=(*forward, *rest), aliases=aliases, segments=segments, shorter={})
    used = {i.factor for op in small.ops for i in op.indices} | {f for t in tensors.values() for f in t.factors}
    small = replace(small, factors={name: factor for name, factor in model.factors.items() if name in used})
    return Graph(resized(small, {"batch": rows}), graph.captured)


def of_batch(graph: Graph, rows: int) -> Graph:
    """Return the graph with so many rows, without values; itself if it has them."""
    return graph if rows == batch_of(graph) else reduced(graph, (), (), rows)


def _reading(op: Op, other: Mapping[str, str]) -> Op:
    """Return an op that reads other tensors in place of dropped ones."""
    if not any(o.tensor in other for o in op.inputs):
        return op
    return replace(op, inputs=tuple(replace(o, tensor=other.get(o.tensor, o.tensor)) for o in op.inputs))
