"""The steady state of a schedule over microbatches, so that a plan is compiled with a few of them.

Its parts are restricted to the first microbatches; orders that led over the others lead directly. The finished program
decides whether all others only repeat these (materialize/loops.py).
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from math import prod

import numpy as np

from superscaler.groups import collect
from superscaler.ir.graph import Graph
from superscaler.ir.grid import Axis, Grid, Ints
from superscaler.ir.loops import SEEN, Span, find_spans, steady_spans
from superscaler.ir.orders import Group, Order

# The name of a work: its number without the microbatch, and its microbatch.
Name = tuple[int, int]
# Microbatches of each work that are compiled besides the repeating ones, before the code of all devices repeats. One is
# enough where kinds of work alternate; more are taken where a kind follows itself, or if one proves not to be enough.
AROUND = (1, 3)
# The repetitions of a long round (an interleaved one) that are compiled at least, for each of these. Half of a second
# one is enough where the instructions of the first occur in warm-up or cool-down, too.
LONG = (1.5, 2)
# The longest period of a steady state, in microbatches.
LONGEST = 64


@dataclass(frozen=True)
class Microbatches:
    """The `total` microbatches of a plan, and the `few` first ones that are compiled. `inner`: slices per microbatch;
    the other numbers count slices.
    """

    few: int
    total: int
    inner: int


@dataclass(frozen=True)
class SteadyState(Microbatches):
    """A plan with a few microbatches compiled; the schedule repeats every `period`.

    `seen`: repetitions that a loop must have. `orders`: those of all microbatches. `works`: a group for each number.
    `rows`: per device, pairs (work in the short schedule, the work that it stands for in the full one).
    """

    period: int
    seen: float
    orders: Sequence[tuple[Name, Name]]
    works: Sequence[Group]
    rows: Sequence[Sequence[tuple[Name, Name]]]

    @property
    def added(self) -> int:
        """Return the number of repetitions that are not compiled."""
        return (self.total - self.few) // self.period

    @cached_property
    def pairs(self) -> dict[tuple[int, int], tuple[Ints, Ints]]:
        """Return the orders by the numbers of their two works: the microbatches of both."""
        found = collect(((before, after), (one, other)) for (before, one), (after, other) in self.orders)
        return {works: tuple(np.array(some).T) for works, some in found.items()}

    def group(self, name: Name) -> Group:
        """Return the parts of a work."""
        return replace(self.works[name[0]], microbatch=name[1])


def steady_states(graph: Graph) -> Iterator[SteadyState]:
    """Yield the steady state of a plan, with few microbatches and then with more around it; nothing if the plan needs
    all microbatches, or if its rows do not repeat.
    """
    least = 0
    for around, seen in zip(AROUND, LONG, strict=True):
        steady = _find(graph, around, seen)
        if steady is not None and steady.few > least:
            least = steady.few
            yield steady


def _find(graph: Graph, around: int, least: float) -> SteadyState | None:
    (total, inner), found_names = _count(graph), _named(graph.orders)
    if found_names is None:
        return None
    rows = _rows(found_names[0]) or _listed(found_names[0])
    for seen, period in product((SEEN, least), range(inner, min(LONGEST, total // SEEN) + 1, inner)):
        found = _repeated(rows, period, seen, around, inner, total / (2 * period))
        if found is None:
            continue
        added = min((count for _, count in found), default=int(total // period - seen - AROUND[-1]))
        if 2 * added * period < total:
            continue
        few = total - added * period
        kept = [_kept(row, spans, few, total) for row, (spans, _) in zip(rows, found, strict=True)]
        short = [row for row in kept if row is not None]
        if len(short) == len(kept):
            return SteadyState(few, total, inner, period, seen, *found_names, short)
    return None


def _repeated(
    rows: Sequence[Sequence[Name]], period: int, seen: float, around: int, inner: int, least: float
) -> list[tuple[list[Span], int]] | None:
    """Return, for each row, the spans in which it is in its steady state, and the number of repetitions that need not
    be compiled. None if these are not the `least` number in all rows.
    """
    found = []
    for row in rows:
        forms, at = zip(*row, strict=True)
        spans = steady_spans(find_spans(forms, at, period, seen), forms, at, [True] * len(row))
        added = min((int(_left(row, span, around, inner, period) - seen) for span in spans), default=0)
        if added < least:
            return None
        found.append((spans, added))
    return found


def _left(row: Sequence[Name], span: Span, around: int, inner: int, period: int) -> float:
    """Return the number of repetitions of a span without those `around` it."""
    kinds, end = {row[n][0] for n in span.body}, span.end
    around = around if len(kinds) > 1 else AROUND[-1]
    while end < len(row) and row[end] == (row[end - span.length][0], row[end - span.length][1] + period):
        end += 1
    return (end - span.start - around * inner * len(kinds)) / span.length


def _kept(row: Sequence[Name], spans: Sequence[Span], few: int, total: int) -> list[tuple[Name, Name]] | None:
    """Return a row for the first `few` microbatches, as pairs (work, the work of the full row that it stands for). None
    if that is ambiguous.

    The last repetitions are left out, and the work behind them moves to as much earlier microbatches.
    """
    missing, found = total - few, dict[Name, Name]()
    # Sorted, so that the last microbatch of each work remains.
    ends = dict(sorted(work for span in spans for work in row[span.start : span.end]))
    first, last = spans[0].start, spans[-1].end
    for n, (form, at) in enumerate(row):
        is_inside = any(span.start <= n < span.end for span in spans)
        if not is_inside and form not in ends and first <= n < last:
            return None
        is_late = at > ends[form] if form in ends else n >= last
        if is_inside and at > ends[form] - missing:
            continue
        name = form, at - missing if is_late else at
        if not 0 <= name[1] < few or name in found:
            return None
        found[name] = form, at
    return list(found.items())


def _named(orders: Iterable[Order]) -> tuple[list[tuple[Name, Name]], list[Group]] | None:
    """Return the orders as pairs of work names, and a group for each work number. None if an order has no microbatch,
    or only some parts.
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
    """Return chains of ordered works; None if a work is in two places."""
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
        # A chain that ends in a cycle has no end.
        while row[-1] in after and len(row) <= len(first):
            row.append(after[row[-1]])
        rows.append(row)
    return rows if sum(map(len, rows)) == len(first) else None


def _listed(orders: Iterable[tuple[Name, Name]]) -> list[list[Name]]:
    """Return chains of ordered works, as they are listed one after the other: a work of several devices is in several
    of them.
    """
    rows: list[list[Name]] = []
    for one, other in orders:
        if not rows or rows[-1][-1] != one:
            rows.append([one])
        rows[-1].append(other)
    return rows


def microbatches_of(graph: Graph) -> Microbatches | None:
    """Return the microbatches of a plan that is compiled whole; None if they are too few for a loop, or if its ops do
    not agree in them.
    """
    total, inner = _count(graph)
    return Microbatches(total, total, inner) if total // inner >= SEEN else None


def _count(graph: Graph) -> tuple[int, int]:
    """Return (microbatches, slices per microbatch) of a plan; 0 microbatches if its ops do not agree."""
    cuts = {cut for grid in graph.grids.values() for cut in _cuts(grid) if cut}
    if len({tuple(map(len, cut)) for cut in cuts}) != 1 or any(len(set(sizes)) > 1 for sizes, *_ in cuts):
        return 0, 1
    outer, *inner = map(len, cuts.pop())
    return outer * prod(inner), prod(inner)


def _cuts(grid: Grid) -> set[tuple[tuple[int, ...], ...]]:
    """Return the sizes of the microbatch axes of a grid, outer ones first, for each of its leaves."""
    own = tuple(axis.sizes for axis in grid.axes if axis.is_microbatch)
    below = {cut for child in grid.children.values() for cut in _cuts(child)}
    below |= {()} if len(grid.children) < grid.devices.size else set()
    return {(*own, *cut) for cut in below}


def first_microbatches(graph: Graph, steady: SteadyState) -> Graph:
    """Return a graph with the rows of a steady state: the first microbatches only, in the same order."""
    twin, count = graph.copy(), steady.few // steady.inner

    def places(outer: Sequence[Axis], grid: Grid) -> list[range]:
        cut = next((axis for axis in (*outer, *grid.axes) if axis.is_microbatch), None)
        return [range(count if axis is cut else len(axis.sizes)) for axis in grid.axes]

    where = {one: order for order, (one, _) in zip(graph.orders, steady.orders, strict=True)}
    twin.orders = [
        replace(where[of], before=steady.group(before), after=steady.group(after))
        for row in steady.rows
        for (before, of), (after, _) in pairwise(row)
    ]
    done: dict[object, Grid] = {}
    for name, grid in twin.grids.items():
        key = grid.signature()
        if key not in done:
            done[key] = grid.only(places)
        twin.grids[name] = done[key]
    return twin
