"""A* from both ends: forward from the source, backward from the goal, joined by messages or by equal layouts."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import inf, prod

from superscaler.ir.layout import Layout
from superscaler.materialize import transitions as table
from superscaler.materialize.transitions import Costs, D, Digits, Groups, R, Shape, State, Step, Symmetric, V

LIMIT = 4000
# A tie goes to the path with fewer steps.
_STEP = 1e-13
_JOIN = 2
Node = tuple[int, State]
Joined = tuple[str, Groups, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Path:
    """The steps from `source` to `goal`, their seconds, and the least seconds that any path can take.

    `least` is below `seconds` only where the search met its limit after `expanded` states. The layout after the last
    step is `goal`.
    """

    source: Layout
    goal: Layout
    steps: tuple[Step, ...]
    seconds: float
    least: float
    expanded: int

    @property
    def is_optimal(self) -> bool:
        return self.least >= self.seconds


@cache
def _leaving(digits: Digits, is_ordered: bool) -> list[Digits]:
    return table.leaving(digits, D if is_ordered else R)


class _Side:
    """What is known of the states that the source reaches, or (`is_back`) of those that reach the goal."""

    def __init__(self, layout: Layout, is_back: bool) -> None:
        self.layout, self.is_back = layout, is_back
        self.frames = list(table.frames(layout))
        self.shape: Shape = tuple(layout.devices.shape)
        self.devices: list[int] = layout.devices.reshape(-1).tolist()
        slots = table.slots(layout.devices.ndim)
        self.moves = [(kind, y, x) if is_back else (kind, x, y) for kind, x, y in slots]
        self.bound: dict[Shape, float] = {}
        self.reached: dict[Node, float] = {}
        self.came: dict[Node, tuple[Node, str, int, int, Digits]] = {}
        self.settled: dict[Shape, list[Node]] = defaultdict(list)
        self.cells: dict[tuple[Shape, bytes], Node] = {}

    def layout_at(self, node: Node) -> Layout:
        return self.frames[node[0]].layout(node[1])

    def chain(self, node: Node) -> list[tuple[Node, Node, str, int, int, Digits]]:
        """Return (from, to, kind, take, give, digits) of the moves between this end and a node, in the order of time."""
        found = []
        while node in self.came:
            other, kind, x, y, digits = self.came[node]
            found.append((node, other, kind, y, x, digits) if self.is_back else (other, node, kind, x, y, digits))
            node = other
        return found if self.is_back else found[::-1]


def search(source: Layout, goal: Layout, sizes: Shape, itemsize: int, costs: Costs, limit: int) -> Path:
    """Return the cheapest path, or, after `limit` expanded states, the cheapest so far with a bound."""
    return _Search(source, goal, sizes, itemsize, costs, limit).run()


class _Search:
    def __init__(self, source: Layout, goal: Layout, sizes: Shape, itemsize: int, costs: Costs, limit: int) -> None:
        self.sizes, self.itemsize, self.costs, self.limit = sizes, itemsize, costs, limit
        self.bytes = prod(sizes) * itemsize
        self.source, self.goal = self.sides = (_Side(source, False), _Side(goal, True))
        self.place: Callable[[int], Hashable] = costs.place if isinstance(costs, Symmetric) else int
        self.is_same = set(self.source.devices) == set(self.goal.devices)
        # One place and one other: the seconds of messages depend on the shapes only.
        self.is_uniform = isinstance(costs, Symmetric) and all(
            len(set(map(self.place, side.devices))) == 1 for side in self.sides
        )
        self.is_uniform &= not set(self.source.devices) & set(self.goal.devices)
        self.is_within = set(self.goal.devices) <= set(self.source.devices)
        self.prices: dict[tuple[int, int, str, frozenset[int], int], float] = {}
        self.cheapest: dict[tuple[int, str, int, int], float] = {}
        self.single: dict[tuple[str, int], float] = {}
        self.joins: dict[tuple[str, Shape, Shape], float] = {}
        self.best = inf
        self.ends: tuple[Node, Node, Joined | None] | None = None
        self.queue: list[tuple[float, int, int, tuple[Node, ...], str]] = []
        self.ties = itertools.count()
        self.expanded = 0

    def run(self) -> Path:
        self.free = self._free()
        self.related = self._related()
        starts: list[Node] = []
        for number, side in enumerate(self.sides):
            nodes = [(k, frame.start) for k, frame in enumerate(side.frames)]
            starts.append(nodes[0])
            side.reached.update(dict.fromkeys(nodes, 0.0))
        self._try(table.LAST, starts[0], starts[1])
        self._bounds(self.source, self.goal)
        self._bounds(self.goal, self.source)
        for number, side in enumerate(self.sides):
            for node in side.reached:
                self._push(side.bound.get(side.shape, inf), number, (node,))
        least = self._loop()
        return self._path(least)

    # -- bounds

    def size(self, shape: Shape) -> int:
        """Bytes of each device."""
        return self.bytes // prod(shape[D:])

    def _price(self, number: int, frame: int, kind: str, digits: Digits, size: int) -> float:
        key = (number, frame, kind, frozenset(digits), size)
        found = self.prices.get(key)
        if found is None:
            groups = self.sides[number].frames[frame].groups(digits)
            found = self.prices[key] = self.costs.seconds(kind, groups, size) + _STEP
        return found

    def _cheapest(self, number: int, kind: str, factor: int, size: int) -> float:
        """The least seconds of a primitive over all sub-axes of a factor."""
        key = (number, kind, factor, size)
        if key not in self.cheapest:
            self.cheapest[key] = min(
                (
                    self._price(number, k, kind, digits, size)
                    for k, frame in enumerate(self.sides[number].frames)
                    for p, digits in frame.subsets
                    if p == factor
                ),
                default=inf,
            )
        return self.cheapest[key]

    def _single(self, kind: str, size: int) -> float:
        """The least seconds of one message from a device of the source to one of the goal."""
        if self.is_within and not self.is_same:
            return 0.0
        key = (kind, size)
        if key not in self.single:
            pairs = {
                (self.place(a), self.place(b)): (a, b) for a in self.source.devices for b in self.goal.devices if a != b
            }
            found = (self.costs.seconds(kind, (pair,), size) for pair in pairs.values())
            self.single[key] = min(found, default=0.0) + _STEP
        return self.single[key]

    def _join_bound(self, kind: str, before: Shape, after: Shape) -> float:
        if self.is_uniform:
            return self._uniform(kind, before, after)
        if kind == table.LAST:
            return 0.0
        return self._single(kind, min(self.size(before), self.size(after)))

    def _uniform(self, kind: str, before: Shape, after: Shape) -> float:
        key = (kind, before, after)
        if key not in self.joins:
            layouts = (
                Layout(self.source.layout.devices.reshape(before)),
                Layout(self.goal.layout.devices.reshape(after)),
            )
            self.joins[key] = self._messages(kind, *layouts)[1] + _STEP
        return self.joins[key]

    def _free(self) -> set[tuple[int, int]]:
        """Return (D parts, V parts) at which a state of the source can be one of the goal, but for orders in R and V."""
        if not self.is_same:
            return set()
        found = []
        for side in self.sides:
            cuts: dict[tuple[bytes, bytes], tuple[int, int]] = {}
            for frame in side.frames:
                parts = {frozenset(digits): frame.partition(digits) for _, digits in [(1, ()), *frame.subsets]}
                for outer, coarse in parts.items():
                    for inner, fine in parts.items():
                        if outer <= inner:
                            of = (frame.radix(outer), frame.radix(inner - outer))
                            cuts[coarse, fine] = of
            found.append(cuts)
        return {found[0][cut] for cut in found[0].keys() & found[1].keys()}

    def _related(self) -> tuple[dict[Shape, list[tuple[str, Shape]]], dict[Shape, list[tuple[str, Shape]]]]:
        """Return, for the shapes of each side, the shapes of the other with the messages that join them."""
        forward: dict[Shape, list[tuple[str, Shape]]] = defaultdict(list)
        back: dict[Shape, list[tuple[str, Shape]]] = defaultdict(list)
        afters: dict[object, list[Shape]] = defaultdict(list)
        many = table.is_odd(len(self.source.devices), len(self.goal.devices))
        for after in self._shapes(len(self.goal.devices)):
            for key in self._keys(after, many):
                afters[key].append(after)
        for before in self._shapes(len(self.source.devices)):
            for after in dict.fromkeys(b for key in self._keys(before, many) for b in afters[key]):
                for row in table.INTER:
                    if row.fits(before, after, self.is_same):
                        forward[before].append((row.kind, after))
                        back[after].append((row.kind, before))
        return forward, back

    def _keys(self, shape: Shape, many: bool) -> list[object]:
        if many:
            return [shape[V]]
        return [shape] if self.is_same else [("D", shape[V:]), ("RV", shape[:D])]

    def _shapes(self, n: int) -> Iterator[Shape]:
        """Yield the shapes of n devices that cut every slot into equal parts."""

        def rest(n: int, sizes: Shape) -> Iterator[Shape]:
            if not sizes:
                yield (n,)
                return
            for k in _divisors(n):
                if sizes[0] == 0 or sizes[0] % k == 0:
                    yield from ((k, *more) for more in rest(n // k, sizes[1:]))

        # R and V are cut into anything.
        for last_first in rest(n, (*self.sizes[::-1], 0)):
            yield last_first[::-1]

    def _bounds(self, start: _Side, end: _Side) -> None:
        """Set, for the shapes of `end`, the least seconds to the layout of `start`, whatever the devices."""
        numbers = (0, 1) if not start.is_back else (1, 0)
        known: dict[tuple[int, Shape], float] = {(numbers[0], start.shape): 0.0}
        queue = [(0.0, numbers[0], start.shape)]
        done = set()
        while queue:
            cost, number, shape = heapq.heappop(queue)
            if (number, shape) in done or cost > self.best:
                continue
            done.add((number, shape))
            for other, after, more in self._relaxed(start, numbers, number, shape):
                total = cost + more
                if total < known.get((other, after), inf):
                    known[other, after] = total
                    heapq.heappush(queue, (total, other, after))
        end.bound = {shape: cost for (number, shape), cost in known.items() if number == numbers[1]}

    def _relaxed(
        self, start: _Side, numbers: tuple[int, int], number: int, shape: Shape
    ) -> Iterator[tuple[int, Shape, float]]:
        for kind, x, y in start.moves:
            for p in _divisors(shape[x])[1:]:
                after = _changed(shape, x, y, p)
                if y >= D and self.sizes[y - D] % after[y]:
                    continue
                size = self.size(after if start.is_back else shape)
                yield number, after, self._cheapest(number, kind, p, size)
        if number == numbers[0]:
            for kind, after in self.related[numbers[0]].get(shape, ()):
                pair = (after, shape) if start.is_back else (shape, after)
                yield numbers[1], after, self._join_bound(kind, *pair)
            if self.is_same and (prod(shape[D:]), shape[V]) in self.free:
                yield numbers[1], shape, 0.0

    # -- search

    def _push(self, key: float, number: int, nodes: tuple[Node, ...], kind: str = "") -> None:
        if key < self.best:
            heapq.heappush(self.queue, (key, next(self.ties), number, nodes, kind))

    def _loop(self) -> float:
        """Return the least seconds that any path can take."""
        settled: set[tuple[int, Node]] = set()
        while self.queue and self.queue[0][0] < self.best:
            if self.expanded >= self.limit:
                return self.queue[0][0]
            _, _, number, nodes, kind = heapq.heappop(self.queue)
            if number == _JOIN:
                self.expanded += 1
                self._try(kind, *nodes)
            elif (number, nodes[0]) not in settled:
                settled.add((number, nodes[0]))
                self.expanded += 1
                self._settle(number, nodes[0])
                self._expand(number, nodes[0])
        return self.best

    def _settle(self, number: int, node: Node) -> None:
        side, other = self.sides[number], self.sides[1 - number]
        shape = side.frames[node[0]].shape(node[1])
        cost = side.reached[node]
        if self.is_same and (prod(shape[D:]), shape[V]) in self.free:
            key = (shape, table.same_cells(side.layout_at(node).devices))
            side.cells.setdefault(key, node)
            if key in other.cells:
                match = other.cells[key]
                if cost + other.reached[match] < self.best:
                    self.best = cost + other.reached[match]
                    self.ends = (match, node, None) if number else (node, match, None)
        side.settled[shape].append(node)
        for kind, partner in self.related[number].get(shape, ()):
            matches = other.settled.get(partner, ())
            if not matches:
                continue
            bound = cost + (
                self._join_bound(kind, shape, partner) if number == 0 else self._join_bound(kind, partner, shape)
            )
            if self.is_uniform:
                match = min(matches, key=other.reached.__getitem__)
                if bound + other.reached[match] < self.best:
                    self._try(kind, *((match, node) if number else (node, match)))
                continue
            for match in matches:
                key2 = bound + other.reached[match]
                if key2 < self.best:
                    ends = (match, node) if number else (node, match)
                    self._push(key2, _JOIN, ends, kind)

    def _expand(self, number: int, node: Node) -> None:
        side = self.sides[number]
        at, state = node
        shape = side.frames[at].shape(state)
        radices = side.frames[at].devices.shape
        cost = side.reached[node]
        reached, bounds = side.reached, side.bound
        for kind, x, y in side.moves:
            for digits in _leaving(state[x], x >= D) if state[x] else ():
                p = prod(radices[d] for d in digits)
                after = _changed(shape, x, y, p)
                bound = bounds.get(after, inf)
                if cost + bound >= self.best or (y >= D and self.sizes[y - D] % after[y]):
                    continue
                total = cost + self._price(number, at, kind, digits, self.size(after if side.is_back else shape))
                if total + bound >= self.best:
                    continue
                for ordered in table.orders(digits, x, y):
                    found = (at, table.moved(state, x, y, ordered))
                    if total < reached.get(found, inf):
                        reached[found] = total
                        side.came[found] = (node, kind, x, y, ordered)
                        self._push(total + bound, number, (found,))

    def _try(self, kind: str, before: Node, after: Node) -> None:
        """Price the messages that join two states."""
        joined, seconds = self._messages(kind, self.source.layout_at(before), self.goal.layout_at(after))
        total = self.source.reached[before] + seconds + _STEP + self.goal.reached[after]
        if total < self.best:
            self.best, self.ends = total, (before, after, joined)

    def _messages(self, kind: str, before: Layout, after: Layout) -> tuple[Joined, float]:
        groups, kept, largest = table.messages(before, after, self.sizes, self.place)
        if kind == "broadcast":
            groups = table.stars(groups)
        size = largest * self.itemsize
        # What moves nothing on the same devices is left to chunk and value_chunk.
        nothing = inf if self.is_same else 0.0
        return (kind, groups, kept, size), self.costs.seconds(kind, groups, size) if groups else nothing

    # -- result

    def _path(self, least: float) -> Path:
        source, goal = self.source.layout, self.goal.layout
        if self.ends is None:
            return Path(source, goal, (), 0.0, 0.0, self.expanded)
        before, after, joined = self.ends
        steps = list(self._steps(0, self.source.chain(before)))
        if joined is not None:
            kind, groups, kept, size = joined
            seconds = self.costs.seconds(kind, groups, size) if groups else 0.0
            steps.append(Step(kind, groups, -1, -1, 1, self.goal.layout_at(after), size, seconds, kept))
        elif steps:
            last = steps[-1]
            steps[-1] = Step(
                last.kind,
                last.groups,
                last.take,
                last.give,
                last.factor,
                self.goal.layout_at(after),
                last.size,
                last.seconds,
            )
        steps += self._steps(1, self.goal.chain(after))
        seconds = sum(step.seconds for step in steps)
        return Path(source, goal, tuple(steps), seconds, seconds if least >= self.best else least, self.expanded)

    def _steps(self, number: int, chain: Iterable[tuple[Node, Node, str, int, int, Digits]]) -> Iterator[Step]:
        side = self.sides[number]
        for (at, state), (_, into), kind, take, give, digits in chain:
            frame = side.frames[at]
            size = self.size(frame.shape(state))
            groups = frame.groups(digits)
            seconds = self.costs.seconds(kind, groups, size)
            factor = prod(frame.devices.shape[d] for d in digits)
            yield Step(kind, groups, take - D if take >= D else -1, give - D if give >= D else -1,
                       factor, frame.layout(into), size, seconds)  # fmt: skip


@cache
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(k for k in range(1, n + 1) if n % k == 0)


def _changed(shape: Shape, x: int, y: int, p: int) -> Shape:
    after = list(shape)
    after[x] //= p
    after[y] *= p
    return tuple(after)
