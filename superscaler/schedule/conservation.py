"""Conservation: every read finds each of its elements with exactly its whole value, once."""

from __future__ import annotations

from collections.abc import Hashable
from fractions import Fraction
from math import prod

from superscaler.errors import ScheduleError
from superscaler.ir.graph import Op, Operand
from superscaler.ir.mask import Mask, extents, intersect
from superscaler.ir.parts import Rows
from superscaler.schedule.cover import Wanted
from superscaler.schedule.edges import Edges
from superscaler.schedule.nodes import Schedule


def check_conservation(schedule: Schedule) -> None:
    """Raise ScheduleError at the first read whose pieces do not add up to its elements with their whole value."""
    edges = schedule.edges
    seen: set[tuple[object, ...]] = set()
    for op in edges.graph.forward_ops:
        _check_branch(edges, op)
        for k, operand in enumerate(op.inputs):
            if operand.tensor not in edges.producers:
                continue
            producer, j = edges.producers[operand.tensor]
            made, read = edges.rows[producer.name], edges.rows[op.name]
            key = (id(made), producer.outputs[j].slots, id(read), operand.slots, k if read.has_shares else -1)
            if key not in seen:
                seen.add(key)
                pairs = edges.forward(op, k)
                if read.is_shared(k):
                    # In a tree, sharing out is a choice per level of one whole reading; a grid is checked as it is.
                    pairs = _together(read, k, pairs) if read.regular else edges.whole_reads(op, k)
                _check_edge(edges, producer, j, edges.wanted(read, operand), pairs)


def _check_edge(edges: Edges, producer: Op, j: int, wanted: Wanted, pairs: list[list[int]]) -> None:
    rows, output = edges.rows[producer.name], producer.outputs[j]
    held = edges.wanted(rows, output)
    for row, sources in enumerate(pairs):
        box = wanted.box(row)
        found = Fraction(0)
        for source in sources:
            common = intersect(held.box(source), box)
            size = prod(extents(common)) if common is not None else 0
            found += size * _share(producer, output, rows.boxes[source]) / prod(n for _, _, n in rows.shares[source])
        if found != prod(extents(box)):
            raise ScheduleError(
                f"{Mask(output.tensor, box)} is read on device {int(wanted.device[row])}, but its producer "
                f"{producer.name} gives {float(found)} of its {prod(extents(box))} elements."
            )


def _together(rows: Rows, k: int, pairs: list[list[int]]) -> list[list[int]]:
    """Return for each part what it and those that share out input `k` with it read together."""
    keys: list[Hashable] = []
    read: dict[Hashable, dict[Hashable, list[int]]] = {}
    for label, shares, sources in zip(rows.addends(k), rows.shares, pairs, strict=True):
        mine = [s for s in shares if k in s[0]]
        keys.append((label, tuple(count for *_, count in mine)))
        read.setdefault(keys[-1], {}).setdefault(tuple(mine), sources)
    return [[source for sources in read[key].values() for source in sources] for key in keys]


def _share(op: Op, output: Operand, box: tuple[int, ...]) -> Fraction:
    """Return which part of the value of its elements a part computes: its share of the indices summed away."""
    count = len(op.indices)
    share = Fraction(1)
    for i, index in enumerate(op.indices):
        if i not in output.slots:
            share *= Fraction(box[count + i] - box[i], index.size)
    return share


def _check_branch(edges: Edges, op: Op) -> None:
    """One branch of the parts must tile the op's iteration space; the branches of a tree do by construction."""
    rows = edges.rows[op.name]
    count = len(op.indices)
    if not rows.regular:
        return
    whole = prod(i.size for i in op.indices)
    parts = {(box, shares) for box, shares in zip(rows.boxes, rows.shares, strict=True)}
    found = sum(Fraction(prod(b[count + i] - b[i] for i in range(count)), prod(n for *_, n in s)) for b, s in parts)
    if found != whole:
        raise ScheduleError(
            f"the parts of {op.name} cover {found} of its {whole} iterations; some are missing or double."
        )
