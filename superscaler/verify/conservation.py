"""Conservation: every read finds each of its elements with exactly its whole value, once."""

from __future__ import annotations

from collections.abc import Hashable
from fractions import Fraction
from math import prod

from superscaler.errors import ScheduleError
from superscaler.ir.graph import Op, Operand
from superscaler.ir.mask import Mask, extents, intersect
from superscaler.ir.parts import Grid, Rows
from superscaler.ir.spmd import Fold
from superscaler.ir.transformed import Graph
from superscaler.schedule.cover import Wanted
from superscaler.schedule.edges import Edges
from superscaler.schedule.nodes import Schedule


def check_conservation(schedule: Schedule, whole: Graph, fold: Fold | None = None) -> None:
    """Raise ScheduleError at the first read whose pieces do not add up to its elements with their whole value.

    With a fold the schedule has the parts at the compiled places of the `whole` graph, each of which stands for those
    at the other places that it is no different from.
    """
    edges = schedule.edges
    seen: set[tuple[object, ...]] = set()
    counts = _Counts(whole, fold)
    for op in edges.graph.forward_ops:
        _check_branch(op, whole.grids[op.name])
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
                _check_edge(edges, producer, j, edges.wanted(read, operand), pairs, counts)


class _Counts:
    """How many parts of the whole plan a part of the compiled places stands for."""

    def __init__(self, whole: Graph, fold: Fold | None) -> None:
        self.whole, self.fold = whole, fold
        self.at: dict[int, dict[tuple[int, int, int], Hashable]] = {}

    def is_first(self, device: int) -> bool:
        """Tell whether a device is at place 0 everywhere: the others are like it."""
        return self.fold is None or not any(self.fold.place(device))

    def like(self, rows: Rows, row: int) -> int:
        """Return for how many parts one stands, seen from place 0: one at place 1 for all others on its line, unless it
        is a replica of the one at place 0.
        """
        device = int(rows.device[row])
        if self.fold is None or not any(self.fold.place(device)):
            return 1
        if id(rows) not in self.at:
            self.at[id(rows)] = dict(zip(rows.keys, rows.addends(), strict=True))
        addends, (_, microbatch, ordinal) = self.at[id(rows)], rows.keys[row]
        base, *place = self.fold.places[device]
        count = 1
        for axis, n in enumerate(self.fold.widths):
            home = int(self.fold.devices[(base, *place[:axis], 0, *place[axis + 1 :])])
            is_replica = addends.get((home, microbatch, ordinal)) == addends[rows.keys[row]]
            count *= n - 1 if place[axis] and not is_replica else 1
        return count

    def shares(self, op: Op, rows: Rows, row: int) -> int:
        """Return into how many parts of its value a part of the whole plan is shared out."""
        if self.fold is None or not rows.regular:
            return prod(n for _, _, n in rows.shares[row])
        return prod(len(a.sizes) for a in self.whole.grids[op.name].axes if a.value)


def _check_edge(edges: Edges, producer: Op, j: int, wanted: Wanted, pairs: list[list[int]], counts: _Counts) -> None:
    rows, output = edges.rows[producer.name], producer.outputs[j]
    held = edges.wanted(rows, output)
    for row, sources in enumerate(pairs):
        if not counts.is_first(int(wanted.device[row])):
            continue
        box = wanted.box(row)
        found = Fraction(0)
        for source in sources:
            common = intersect(held.box(source), box)
            size = counts.like(rows, source) * (prod(extents(common)) if common is not None else 0)
            found += size * _share(producer, output, rows.boxes[source]) / counts.shares(producer, rows, source)
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


def _check_branch(op: Op, grid: Grid) -> None:
    """The cuts of each index must tile it, one inside the other; the branches of a tree do by construction."""
    for i, index in enumerate(op.indices):
        left = {index.size}
        for axis in grid.axes:
            if axis.index == i:
                if left != {sum(axis.sizes)}:
                    raise ScheduleError(
                        f"the parts of {op.name} cover {sum(axis.sizes)} of its {max(left)} iterations over "
                        f"{index.factor}; some are missing or double."
                    )
                left = set(axis.sizes)
