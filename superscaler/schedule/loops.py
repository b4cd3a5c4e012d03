"""Loops over microbatches: the steady state of a schedule repeats, so a plan is compiled with a few microbatches.

Its parts are restricted to the first microbatches, and what was ordered around the others is ordered directly. Whether
what is left out only repeats is told by the program (materialize/loops.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from superscaler.ir.loops import SEEN, find_spans, steady_spans
from superscaler.ir.parts import Axis, Grid
from superscaler.ir.transformed import Graph, Group, Order

# A work: the number of what it is but for its microbatch, and that.
Name = tuple[int, int]
# How often the steady state is compiled: a few times before the code of all devices repeats.
REPEATED = 6
# The longest steady state, in microbatches, that is looked for.
LONGEST = 16


@dataclass(frozen=True)
class Steady:
    """A plan of which the first `few` of `total` microbatches are compiled: what is done repeats every `period`. The
    `orders` are those of all; `works` has a group of each number.
    """

    period: int
    few: int
    total: int
    orders: Sequence[tuple[Name, Name]]
    works: Sequence[Group]

    @property
    def added(self) -> int:
        """How many repetitions are not compiled."""
        return (self.total - self.few) // self.period


def find_steady(graph: Graph) -> Steady | None:
    """Return what of a plan tells all its microbatches, None where that is all of them, or rows do not repeat."""
    total, found_names = _count(graph), _named(graph.orders)
    rows = None if found_names is None else _rows(found_names[0])
    if found_names is None or rows is None:
        return None
    for period in range(1, min(LONGEST, total // SEEN) + 1):
        found = [_left(row, period, total) for row in rows]
        if None not in found:
            few = max((n for n in found if n is not None), default=0) + REPEATED * period
            few += (total - few) % period
            return Steady(period, few, total, *found_names) if 2 * few <= total else None
    return None


def _left(row: Sequence[Name], period: int, total: int) -> int | None:
    """Return how many microbatches of a row are done outside of its steady state, None where it has none."""
    forms, at = zip(*row, strict=True)
    spans = steady_spans(find_spans(forms, at, period), forms, at, [True] * len(row))
    inside = Counter(forms[n] for span in spans for n in range(span.start, span.end))
    return total - min(inside.values()) if inside.keys() == set(forms) else None


def _named(orders: Iterable[Order]) -> tuple[list[tuple[Name, Name]], list[Group]] | None:
    """Return orders by the names of their works, and a work of each number; None where one is of no microbatch, or of
    some parts only.
    """
    numbers, works = dict[Hashable, int](), list[Group]()

    def name(group: Group) -> Name | None:
        if group.microbatch is None:
            return None
        number = numbers.setdefault((group.kind, group.members), len(works))
        if number == len(works):
            works.append(group)
        return number, group.microbatch

    pairs = [(name(order.before), name(order.after)) for order in orders]
    found = [(a, b) for a, b in pairs if a is not None and b is not None]
    is_whole = len(found) == len(pairs) and not any(paths for group in works for _, paths in group.members)
    return (found, works) if is_whole else None


def _rows(orders: Iterable[tuple[Name, Name]]) -> list[list[Name]] | None:
    """Return the works that are ordered one after the other, None where one of them is at two places."""
    after, first = dict[Name, Name](), dict[Name, bool]()
    for one, other in orders:
        if one in after:
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


def first_microbatches(graph: Graph, steady: Steady) -> Graph:
    """Return a graph whose works are in rows with the first microbatches only, in the same order."""
    twin, count = graph.copy(), steady.few
    twin.orders = list(_orders(graph.orders, steady))
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


def _orders(orders: Sequence[Order], steady: Steady) -> Iterator[Order]:
    """Yield the orders of the first microbatches: what was before and after others is ordered directly."""
    following = {one: (other, order.after) for order, (one, other) in zip(orders, steady.orders, strict=True)}
    for order, (one, other) in zip(orders, steady.orders, strict=True):
        if one[1] >= steady.few:
            continue
        found: tuple[Name, Group] | None = (other, order.after)
        while found is not None and found[0][1] >= steady.few:
            found = following.get(found[0])
        if found is not None:
            yield replace(order, after=found[1])
