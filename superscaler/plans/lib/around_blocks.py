"""Ops before the repeated blocks of a model and after them, and the stage that each belongs to."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from superscaler.verbs import Graph, Op


def in_three(graph: Graph) -> tuple[list[Op], list[Op], list[Op]]:
    """Return the forward ops before the blocks, from the first block to the last, and after them.

    An op between blocks that reads no result of a block, as the look-up of a decoder, is before them.
    """
    inside = {op.name for block in graph.blocks for op in block.ops}
    end = 1 + max((k for k, op in enumerate(graph.forward_ops) if op.name in inside), default=-1)
    made, before, within = set[str](), list[Op](), list[Op]()
    for op in graph.forward_ops[:end]:
        if op.name in inside or not made.isdisjoint(o.tensor for o in op.inputs):
            within.append(op)
            made.update(o.tensor for o in op.outputs)
        else:
            before.append(op)
    return before, within, list(graph.forward_ops[end:])


def read_by(graph: Graph, ops: Sequence[Op], stage: Sequence[Op], splits: Collection[str]) -> list[Op]:
    """Return, beside cut ops, the uncut ops whose results only this stage reads. The stage needs the sum of rows."""
    inside = {op.name for op in stage}
    for op in reversed(ops) if any(op.name in splits for op in ops) else ():
        readers = {reader.name for o in op.outputs for reader, _ in graph.model.uses[o.tensor]}
        if readers and readers <= inside and op.name not in splits and not op.from_data:
            inside.add(op.name)
    return [op for op in ops if op.name in inside]


def made_by(ops: Sequence[Op], stage: Sequence[Op], splits: Collection[str]) -> list[Op]:
    """Return, beside cut ops, uncut ops of a stage alone: they read its values, and none made on all devices."""
    made, shared, found = {o.tensor for op in stage for o in op.outputs}, set[str](), list[Op]()
    for op in (op for op in ops if not op.from_data) if any(op.name in splits for op in ops) else ():
        inputs = {o.tensor for o in op.inputs}
        if is_alone := op.name not in splits and inputs & made and not inputs & shared:
            found.append(op)
        (made if is_alone else shared).update(o.tensor for o in op.outputs)
    return found
