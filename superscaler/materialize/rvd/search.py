"""The cheapest path of primitives from one layout to another, cached up to a renaming of devices.

Dijkstra's algorithm runs from the source and, backwards, from the goal. Messages join two of the states found, or the
states are equal.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Hashable, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf, prod
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from superscaler.errors import InputError
from superscaler.ir.communication import links
from superscaler.ir.layout import Layout
from superscaler.materialize.rvd import transitions as table
from superscaler.materialize.rvd.transitions import (
    MESSAGES,
    Costs,
    D,
    Digits,
    Frame,
    Groups,
    Move,
    R,
    Shape,
    State,
    Step,
    Symmetric,
)

# A tie goes to the path with fewer steps.
_STEP = 1e-13


@dataclass(frozen=True, slots=True)
class Path:
    """The steps from `source` to `goal`, and their seconds. The layout after the last step is `goal`."""

    source: Layout
    goal: Layout
    steps: tuple[Step, ...]
    seconds: float


Cache = MutableMapping[Hashable, tuple[tuple[int, ...], Path]]


def find_path(
    source: Layout, goal: Layout, sizes: Shape, itemsize: int, costs: Costs, paths: Cache | None = None
) -> Path:
    """Return the cheapest path; `sizes` are the elements per slot.

    `paths` caches results up to a renaming of devices that leaves the costs equal. Raises InputError for a layout that
    does not cut the slots into equal parts, or names a device twice.
    """
    for layout in (source, goal):
        _check(layout, sizes)
    ids = source.devices.ravel().tolist() + goal.devices.ravel().tolist()
    devices, paths = tuple(dict.fromkeys(ids)), {} if paths is None else paths
    # The costs see devices by place, or each for itself.
    places = [costs.place(d) for d in devices] if isinstance(costs, Symmetric) else []
    seen = tuple(map(places.index, places)) or devices
    key = (source.devices.shape, goal.devices.shape, tuple(map(devices.index, ids)), seen, sizes, itemsize, costs)
    if key not in paths:
        paths[key] = devices, _search(source, goal, _Case(source, goal, sizes, itemsize, costs))
    known, path = paths[key]
    return path if known == devices else _rename(path, dict(zip(known, devices, strict=True)))


def _rename(path: Path, names: dict[int, int]) -> Path:
    new = np.array([names.get(d, -1) for d in range(max(names) + 1)])
    steps = tuple(
        replace(
            step,
            groups=tuple(tuple(names[d] for d in group) for group in step.groups),
            kept=tuple(names[d] for d in step.kept),
            layout=Layout(new[step.layout.devices]),
        )
        for step in path.steps
    )
    return Path(Layout(new[path.source.devices]), Layout(new[path.goal.devices]), steps, path.seconds)


def _check(layout: Layout, sizes: Shape) -> None:
    parts = layout.shape[2]
    if len(parts) != len(sizes):
        raise InputError(f"layout {layout} cuts {len(parts)} slots, but the tensor has {len(sizes)}: {sizes}.")
    for slot, (k, n) in enumerate(zip(parts, sizes, strict=True)):
        if n % k:
            raise InputError(
                f"layout {layout} cuts slot {slot} of {n} elements into {k} parts, which are not equal; "
                "uneven parts are exchanged as exact pieces, not as layouts."
            )
    ids, counts = np.unique(layout.devices, return_counts=True)
    if (counts > 1).any():
        twice = int(ids[counts > 1][0])
        raise InputError(f"layout {layout} names device {twice} {counts.max()} times; each may appear once.")


class _Case:
    """A tensor that changes its layout, the costs, and the messages between two states."""

    def __init__(self, source: Layout, goal: Layout, sizes: Shape, itemsize: int, costs: Costs) -> None:
        self.sizes, self.itemsize, self.costs, self.size = sizes, itemsize, costs, prod(sizes)
        self.held, self.read = (end.devices.ravel().tolist() for end in (source, goal))
        self.is_same, overlaps = set(self.held) == set(self.read), bool(set(self.held) & set(self.read))
        # Senders and receivers of messages between places that have devices of one side only.
        held, read = self._elsewhere(self.held, self.read), self._elsewhere(self.read, self.held)
        self.near, ends = len(self.held) - len(held), ((self.held, read), (held, self.read))
        self.to_others, self.from_others = ([*map(self._by_turns, some)] for some in ends)
        is_sent = self.is_same or not overlaps
        self.nearest = self._nearest() if is_sent and not all(self.to_others) else ([], [])
        self.bounds: dict[tuple[int, int, int], float] = {}

    def _place(self, device: int) -> int:
        return self.costs.place(device) if isinstance(self.costs, Symmetric) else device

    def _nearest(self) -> tuple[list[int], list[int]]:
        pairs = ((a, b) for a, b in itertools.product(self.held, self.read) if a != b)
        a, b = min(pairs, key=lambda pair: self.costs.seconds(MESSAGES, (pair,), 1), default=(0, 0))
        return [a], [b]

    def _elsewhere(self, devices: list[int], others: list[int]) -> list[int]:
        """Return the devices whose places have none of the others."""
        places = {*map(self._place, others)}
        return [device for device in devices if self._place(device) not in places]

    def _by_turns(self, devices: list[int]) -> list[int]:
        """Return devices interleaved over servers; none unless each has equally many."""
        places = [list(some) for _, some in itertools.groupby(sorted(devices, key=self._place), self._place)]
        return list(itertools.chain(*zip(*places, strict=True))) if len(set(map(len, places))) == 1 else []

    def least(self, before: Shape, after: Shape) -> float:
        """Return a lower bound on the seconds of messages between two states of these shapes."""
        size, shapes = self.size // prod(map(max, before[D:], after[D:])), list(zip(before[D:], after[D:], strict=True))
        # A receiver gets a message from each part that meets its own. A part meets at most so many receivers' ones.
        each = prod(-(-a // b) for a, b in shapes)
        most = after[R] * prod(-(-b // a) + (a % b > 0 < b % a) for a, b in shapes)
        counts = 1, each * len(self.to_others[1]), each * len(self.read) - most * self.near
        return max(map(partial(self._bound, size), range(3), counts))

    def _bound(self, size: int, ends: int, count: int) -> float:
        """Return the seconds of so many messages of a size that are spread evenly over senders and receivers."""
        if (size, ends, count) not in self.bounds:
            senders, receivers = (self.nearest, self.to_others, self.from_others)[ends]
            rounds = zip(itertools.cycle(senders), itertools.cycle(receivers), range(count), strict=False)
            pairs = tuple((a, b) for a, b, _ in rounds)
            self.bounds[size, ends, count] = self.costs.seconds(MESSAGES, pairs, size * self.itemsize) if pairs else 0.0
        return self.bounds[size, ends, count]


class _Side:
    """The states that a frame of the source reaches in under `most` seconds, or (`is_back`) that reach the goal."""

    def __init__(self, frame: Frame, is_back: bool, case: _Case, most: float) -> None:
        self.frame, self.is_back, self.case = frame, is_back, case
        self.prices: dict[tuple[str, Digits, int], tuple[Groups, float]] = {}
        self.came: dict[State, Move] = {}
        # The states of each shape with their seconds, the cheapest first.
        self.found: dict[Shape, list[tuple[float, State]]] = defaultdict(list)
        reached, queue, ties = {self.frame.start: 0.0}, [(0.0, 0, self.frame.start)], itertools.count(1)
        while queue:
            cost, _, state = heapq.heappop(queue)
            if cost > reached[state]:
                continue
            self.found[self.frame.shape(state)].append((cost, state))
            for move in table.moves(state, self.frame.devices.shape, self.case.sizes, self.is_back):
                after = move.before if self.is_back else move.after
                total = cost + self._priced(move)[1] + _STEP
                if total < min(reached.get(after, inf), most):
                    reached[after], self.came[after] = total, move
                    heapq.heappush(queue, (total, next(ties), after))

    def _priced(self, move: Move) -> tuple[Groups, float]:
        """Return the groups and the seconds of a move."""
        key = (move.kind, move.digits, move.parts)
        if key not in self.prices:
            groups, size = self.frame.groups(move.digits), self.case.size * self.case.itemsize // move.parts
            self.prices[key] = groups, self.case.costs.seconds(move.kind, groups, size)
        return self.prices[key]

    def steps(self, state: State) -> list[Step]:
        """Return the steps of the path between this end and a state, the earliest first."""
        found: list[Step] = []
        while (move := self.came.get(state)) is not None:
            (groups, seconds), after = self._priced(move), self.frame.layout(move.after)
            slots, size = (max(move.gather_axis - D, -1), max(move.scatter_axis - D, -1)), self.case.size // move.parts
            moved = len(groups) * links(move.kind, len(groups[0])) if move.kind in table.COLLECTIVES else 0
            found.append(Step(move.kind, groups, *slots, after, size * self.case.itemsize, size * moved, seconds))
            state = move.after if self.is_back else move.before
        return found if self.is_back else found[::-1]


class _Best(NamedTuple):
    """The seconds of a path, its states at both sides, and the messages that join them (None: they are equal)."""

    seconds: float
    before: tuple[_Side, State]
    after: tuple[_Side, State]
    joint: Step | None


def _search(source: Layout, goal: Layout, case: _Case) -> Path:
    direct = table.messages(MESSAGES, source, goal, case.sizes, case.itemsize, case.costs)
    # Where nothing is sent, chunk and value_chunk are preferred.
    most = direct.seconds + (1 if direct.groups else 2) * _STEP
    firsts, lasts = ([_Side(frame, end is goal, case, most) for frame in table.frames(end)] for end in (source, goal))
    best = _Best(most, (firsts[0], firsts[0].frame.start), (lasts[0], lasts[0].frame.start), direct)
    for forward, backward in itertools.product(firsts, lasts):
        best = _joined(forward, backward, _same_cells(forward, backward, best) if case.is_same else best)
    (forward, before), (backward, after) = best.before, best.after
    steps = forward.steps(before)
    if best.joint is not None:
        steps.append(best.joint)
    elif steps:
        steps[-1] = replace(steps[-1], layout=backward.frame.layout(after))
    steps += backward.steps(after)
    return Path(source, goal, tuple(steps), sum(step.seconds for step in steps))


def _same_cells(forward: _Side, backward: _Side, best: _Best) -> _Best:
    """Return the cheapest path through equal states, up to the orders of R and V, or `best`."""
    for shape, firsts in forward.found.items():
        lasts = backward.found.get(shape, [(inf, ())])
        if firsts[0][0] + lasts[0][0] < best.seconds:
            cells = {table.same_cells(backward.frame.layout(s).devices): (cost, s) for cost, s in lasts[::-1]}
            for cost, before in firsts:
                more, after = cells.get(table.same_cells(forward.frame.layout(before).devices), (inf, before))
                if cost + more < best.seconds:
                    best = _Best(cost + more, (forward, before), (backward, after), None)
    return best


def _joined(forward: _Side, backward: _Side, best: _Best) -> _Best:
    """Return the cheapest path whose states messages join, or `best`."""
    case, rows = forward.case, []
    for (a, firsts), (b, lasts) in itertools.product(forward.found.items(), backward.found.items()):
        if (sums := firsts[0][0] + lasts[0][0]) < best.seconds and (kind := table.joining(a, b, case.is_same)):
            least = case.least(a, b) + _STEP
            rows.append((sums + least, firsts[0][0], least, kind, a, b))
    # Of equal bounds, messages come early, and earlier slots are cut.
    for low, _, least, kind, a, b in sorted(rows, key=itemgetter(0, 1)):
        if low >= best.seconds:
            break
        for (cost, before), (more, after) in itertools.product(forward.found[a], backward.found[b]):
            if cost + least + more < best.seconds:
                ends = forward.frame.layout(before), backward.frame.layout(after)
                joint = table.messages(kind, *ends, case.sizes, case.itemsize, case.costs)
                total = cost + joint.seconds + _STEP + more
                # Equal states need no messages.
                if total < best.seconds and (joint.groups or not case.is_same):
                    best = _Best(total, (forward, before), (backward, after), joint)
    return best
