"""Loops over microbatches: the steady state of a schedule repeats, so a plan is compiled with a few microbatches.

Its parts are restricted to the first microbatches, and what was ordered around the others is ordered directly. Whether
what is left out only repeats is told by the program (materialize/loops.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from superscaler.ir.loops import SEEN, find_spans, steady_spans
from superscaler.ir.parts import Axis, Grid
from superscaler.ir.transformed import Graph, Group, Order

# The symbol of a work: its kind, and of what it is.
Symbol = tuple[str, tuple[tuple[str, object], ...]]
Name = tuple[Symbol, int]
# How often the steady state is compiled: a few times before the code of all devices repeats.
REPEATED = 6
# The longest steady state, in microbatches, that is looked for.
LONGEST = 16


@dataclass(frozen=True)
class Steady:
    """A plan of which the first `few` of `total` microbatches are compiled: what is done repeats every `period`. The
    `orders` are those of all.
    """

    period: int
    few: int
    total: int
    orders: Sequence[Order]

    @property
    def added(self) -> int:
        """How many repetitions are not compiled."""
        return (self.total - self.few) // self.period


def find_steady(graph: Graph) -> Steady | None:
    """Return what of a plan tells all its microbatches, None where that is all of them, or rows do not repeat."""
    total, rows = _count(graph), _rows(graph.orders)
    if rows is None:
        return None
    for period in range(1, min(LONGEST, total // SEEN) + 1):
        found = [_left(row, period, total) for row in rows]
        if None not in found:
            few = max((n for n in found if n is not None), default=0) + REPEATED * period
            few += (total - few) % period
            return Steady(period, few, total, graph.orders) if 2 * few <= total else None
    return None


def _left(row: Sequence[Name], period: int, total: int) -> int | None:
    """Return how many microbatches of a row are done outside of its steady state, None where it has none."""
    forms, at = zip(*row, strict=True)
    spans = steady_spans(find_spans(forms, at, period), forms, at, [True] * len(row))
    inside = Counter(forms[n] for span in spans for n in range(span.start, span.end))
    return total - min(inside.values()) if inside.keys() == set(forms) else None


def _rows(orders: Iterable[Order]) -> list[list[Name]] | None:
    """Return the works that are ordered one after the other, None where one of them is at two places, or in turns."""
    after, first = dict[Name, Name](), dict[Name, bool]()
    for order in orders:
        one, other = _name(order.before), _name(order.after)
        if order.turns or one is None or other is None or one in after:
            return None
        after[one] = other
        first[other] = False
        first.setdefault(one, True)
    rows = []
    for name in (name for name, is_first in first.items() if is_first):
        row = [name]
        while row[-1] in after:
            row.append(after[row[-1]])
        rows.append(row)
    return rows if sum(map(len, rows)) == len(first) else None


def _name(group: Group) -> Name | None:
    """Return which work a group is, None where it is of no microbatch, or of some parts only."""
    if group.microbatch is None or any(paths for _, paths in group.members):
        return None
    return (group.kind, group.members), group.microbatch


def _count(graph: Graph) -> int:
    """Return in how many microbatches a plan does its work, 0 where they do not correspond."""
    cuts = {axis.sizes for grid in graph.grids.values() for axis in _all_axes(grid) if axis.is_microbatch}
    if any(_depth(grid) > 1 for grid in graph.grids.values()):
        return 0
    numbers = {len(sizes) for sizes in cuts}
    return numbers.pop() if len(numbers) == 1 and all(len(set(sizes)) == 1 for sizes in cuts) else 0


def _depth(grid: Grid) -> int:
    """Return how many cuts into microbatches are inside each other."""
    return sum(axis.is_microbatch for axis in grid.axes) + max(map(_depth, grid.children.values()), default=0)


def _all_axes(grid: Grid) -> Iterator[Axis]:
    yield from grid.axes
    for child in grid.children.values():
        yield from _all_axes(child)


def first_microbatches(graph: Graph, count: int) -> Graph:
    """Return a graph whose works are in rows with the first microbatches only, in the same order."""
    twin = graph.copy()
    twin.orders = list(_orders(graph.orders, count))
    done: dict[object, Grid] = {}
    for name, grid in twin.grids.items():
        key = grid.signature()
        if key not in done:
            done[key] = _first(grid, count)
        twin.grids[name] = done[key]
    return twin


def _first(grid: Grid, count: int) -> Grid:
    kept = [slice(0, count if axis.is_microbatch else None) for axis in grid.axes]
    axes = (replace(a, sizes=a.sizes[some]) for a, some in zip(grid.axes, kept, strict=True))
    places = np.arange(grid.devices.size).reshape(grid.devices.shape)[tuple(kept)].reshape(-1)
    cells = places.tolist() if grid.children else ()
    children = {at: _first(grid.children[cell], count) for at, cell in enumerate(cells) if cell in grid.children}
    return Grid(tuple(axes), grid.devices[tuple(kept)], children, grid.replaced_at)


def _orders(orders: Sequence[Order], count: int) -> Iterator[Order]:
    """Yield the orders of the first microbatches: what was before and after others is ordered directly."""
    following = {_name(order.before): order.after for order in orders}
    for order in orders:
        after: Group | None = order.after
        while after is not None and (after.microbatch or 0) >= count:
            after = following.get(_name(after))
        if after is not None and (order.before.microbatch or 0) < count:
            yield replace(order, after=after)
