"""A* from both ends: forward from the source, backward from the goal, joined by messages or by equal layouts."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import gcd, inf, lcm, prod

from superscaler.ir.layout import Layout
from superscaler.materialize.rvd import frames
from superscaler.materialize.rvd import transitions as table
from superscaler.materialize.rvd.bounds import Bounds, Memo, Vertex, changed, near, related
from superscaler.materialize.rvd.frames import Frame
from superscaler.materialize.rvd.transitions import Costs, D, Digits, Groups, R, Shape, State, Step, Symmetric, V

LIMIT = 1800
# A tie goes to the path with fewer steps.
_STEP = 1e-13
_JOIN = 2
# A bound is searched this much further than the next state: as a fraction of its key, and of the cheapest step.
_SLACK = 0.02
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
def _leaving(digits: Digits, is_ordered: bool) -> list[tuple[Digits, frozenset[int]]]:
    return [(some, frozenset(some)) for some in table.leaving(digits, D if is_ordered else R)]


class _Side:
    """The states that the source reaches, or (`is_back`) those that reach the goal."""

    def __init__(self, layout: Layout, is_back: bool, frames: list[Frame]) -> None:
        self.layout, self.is_back, self.frames = layout, is_back, frames
        self.devices: list[int] = layout.devices.reshape(-1).tolist()
        slots = table.slots(layout.devices.ndim)
        self.moves = [(kind, y, x) if is_back else (kind, x, y) for kind, x, y in slots]
        self.codes: dict[Shape, list[Shape]] = {}
        self.reached: dict[Node, float] = {}
        self.came: dict[Node, tuple[Node, str, int, int, Digits]] = {}
        self.settled: dict[Shape, list[Node]] = defaultdict(list)
        self.cells: dict[tuple[Shape, bytes], Node] = {}

    def shape(self, node: Node) -> Shape:
        """Return the coded shape of a state."""
        return self.frames[node[0]].coded(node[1])

    def coded(self, plain: Shape) -> list[Shape]:
        """Return the coded shapes that a plain one may stand for."""
        if plain not in self.codes:
            self.codes[plain] = frames.coded(plain, prod(self.frames[0].radix_codes))
        return self.codes[plain]

    def by_place(self, place: Callable[[int], Hashable]) -> list[list[int]]:
        found: dict[Hashable, list[int]] = {}
        for device in self.devices:
            found.setdefault(place(device), []).append(device)
        return list(found.values())

    def layout_at(self, node: Node) -> Layout:
        return self.frames[node[0]].layout(node[1])

    def chain(self, node: Node) -> list[tuple[Node, Node, str, int, int, Digits]]:
        """Return (from, to, kind, take, give, digits) of the moves between this end and a node, in order of time."""
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
        self.place: Callable[[int], Hashable] = costs.place if isinstance(costs, Symmetric) else int
        both = frames.frames(source, goal, self.place if isinstance(costs, Symmetric) else None)
        self.source, self.goal = self.sides = (_Side(source, False, both[0]), _Side(goal, True, both[1]))
        self.is_same = set(self.source.devices) == set(self.goal.devices)
        places = [side.by_place(self.place) for side in self.sides]
        is_disjoint = isinstance(costs, Symmetric) and not set(self.source.devices) & set(self.goal.devices)
        # One place and another one: the seconds of messages depend on the shapes only.
        self.is_uniform = is_disjoint and all(len(side) == 1 for side in places)
        # Places of equal size, none with devices of both sides: all messages are between places.
        self.is_apart = is_disjoint and all(len({len(some) for some in side}) == 1 for side in places)
        self.is_apart &= not set(map(self.place, self.source.devices)) & set(map(self.place, self.goal.devices))
        self.is_within = set(self.goal.devices) <= set(self.source.devices)
        self.prices: dict[tuple[int, int, str, frozenset[int], int], float] = {}
        self.cheapest = [Memo(partial(self._cheapest, number)) for number in (0, 1)]
        # The most equal parts of a slot that these numbers of devices can have.
        self.limits = tuple(gcd(n, lcm(*(len(side.devices) for side in self.sides))) for n in sizes)
        self.spread: dict[tuple[str, int, int], float] = {}
        self.joins: dict[tuple[str, Shape, Shape], float] = {}
        self.best = inf
        self.ends: tuple[Node, Node, Joined | None] | None = None
        self.queue: list[tuple[float, int, int, tuple[Node, ...], str]] = []
        self.ties = itertools.count()
        self.expanded = 0

    def run(self) -> Path:
        self.free, self.is_merged = self._free()
        self.related = related(*(len(side.devices) for side in self.sides), self.limits, self.is_same)
        starts: list[Node] = []
        for side in self.sides:
            nodes = [(k, frame.start) for k, frame in enumerate(side.frames)]
            starts.append(nodes[0])
            side.reached.update(dict.fromkeys(nodes, 0.0))
        self._try(table.LAST, starts[0], starts[1])
        ends = [
            (0 if self.is_merged else k, side.shape(start))
            for k, side, start in zip((0, 1), self.sides, starts, strict=True)
        ]
        back = Bounds(ends[1], partial(self._relaxed, 1))
        reach = min(self.best, back.at(ends[0], self.best))
        # Local steps may cost nothing, so the scale is the cheapest other step.
        self.slack = _SLACK * min((cost for cost in self.prices.values() if cost > 10 * _STEP), default=reach)
        # The bound of a state of one side is its distance from the layout of the other.
        self.bounds = [back, Bounds(ends[0], partial(self._relaxed, 0), back, reach)]
        for number, side in enumerate(self.sides):
            for node in side.reached:
                self._push(0.0, number, (node,))
        least = self._loop()
        return self._path(least)

    # -- prices and bounds

    def size(self, shape: Shape) -> int:
        """Return the bytes of each device."""
        return self.bytes // frames.parts(shape)

    def _price(self, number: int, frame: int, kind: str, digits: frozenset[int], size: int) -> float:
        key = (number, frame, kind, digits, size)
        found = self.prices.get(key)
        if found is None:
            groups = self.sides[number].frames[frame].groups(tuple(sorted(digits)))
            found = self.prices[key] = self.costs.seconds(kind, groups, size) + _STEP
        return found

    def _cheapest(self, number: int, key: tuple[str, int, int]) -> float:
        """Return the least seconds of a primitive over all sub-axes of a factor. `key`: kind, factor, parts of the
        tensor.
        """
        kind, factor, parts = key
        found = (
            self._price(number, k, kind, digits, self.bytes // parts)
            for k, frame in enumerate(self.sides[number].frames)
            for digits in frame.subsets.get(factor, ())
        )
        return min(found, default=inf)

    def _join_bound(self, kind: str, before: Shape, after: Shape) -> float:
        """Return the least seconds of messages between two states of these shapes."""
        if self.is_uniform:
            return self._uniform(kind, frames.plain(before), frames.plain(after))
        if kind == table.LAST or (self.is_within and not self.is_same):
            return 0.0
        held, read = frames.parts(before), frames.parts(after)
        if self.is_same:
            count = frames.arriving(before, after, len(self.source.devices))
        else:
            count = len(self.goal.devices) * max(1, held // read) * self.is_apart
        key = (kind, self.bytes // max(held, read), count)
        if key not in self.spread:
            self.spread[key] = self._spread(*key) + _STEP
        return self.spread[key]

    def _spread(self, kind: str, size: int, count: int) -> float:
        """Return the seconds of messages between places, spread as evenly as possible; without any, of the cheapest
        message.
        """
        if not count:
            ends = itertools.product(self.source.devices, self.goal.devices)
            pairs = {(self.place(a), self.place(b)): (a, b) for a, b in ends if a != b}
            return min((self.costs.seconds(kind, (pair,), size) for pair in pairs.values()), default=0.0)
        senders, receivers = self.source.by_place(self.place), self.goal.by_place(self.place)
        if self.is_same:
            n = len(senders)
            turns = (divmod(i, n) for i in range(count))
            even = tuple((senders[(x + 1 + k % (n - 1)) % n][k], receivers[x][k]) for k, x in turns)
        else:
            rows = [list(itertools.chain(*zip(*side, strict=False))) for side in (senders, receivers)]
            even = tuple((rows[0][k % len(rows[0])], rows[1][k % len(rows[1])]) for k in range(count))
        return self.costs.seconds(kind, table.stars(even) if kind == "broadcast" else even, size)

    def _uniform(self, kind: str, before: Shape, after: Shape) -> float:
        key = (kind, before, after)
        if key not in self.joins:
            source, goal = self.source.layout.devices, self.goal.layout.devices
            self.joins[key] = (
                self._messages(kind, Layout(source.reshape(before)), Layout(goal.reshape(after)))[1] + _STEP
            )
        return self.joins[key]

    def _free(self) -> tuple[set[tuple[int, int]], bool]:
        """Return (D parts, V parts) where a state of the source may be one of the goal, up to the orders of R and V.

        The second result: whether this holds for all states of both sides, so that they share one set of shapes.
        """
        if not self.is_same:
            return set(), False
        source, goal = ({cut: of for frame in side.frames for cut, of in frame.cuts()} for side in self.sides)
        return {source[cut] for cut in source.keys() & goal.keys()}, source.keys() == goal.keys()

    def _is_free(self, shape: Shape) -> bool:
        return self.is_same and (frames.parts(shape), frames.plain(shape)[V]) in self.free

    def _relaxed(self, start: int, here: Vertex) -> Iterator[tuple[Vertex, float]]:
        """Yield the shapes that may follow a shape, away from the layout of side `start`, each with its least
        seconds.
        """
        layer, shape = here
        prices = self.cheapest[layer]
        for key, after in near(shape, self.limits, bool(start)):
            yield (layer, after), prices[key]
        if layer != start and not self.is_merged:
            return
        other = 0 if self.is_merged else 1 - start
        for kind, other_plain in self.related[start].get(frames.plain(shape), ()):
            for after in self.sides[1 - start].coded(other_plain):
                yield (other, after), self._join_bound(kind, *((after, shape) if start else (shape, after)))
        if self._is_free(shape):
            yield (other, shape), 0.0

    def _place(self, number: int, shape: Shape) -> Vertex:
        return (0 if self.is_merged else number), shape

    def _fits(self, shape: Shape, axis: int) -> bool:
        return axis < D or self.sizes[axis - D] % frames.plain(shape)[axis] == 0

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
            key, _, number, nodes, kind = heapq.heappop(self.queue)
            if number == _JOIN:
                self.expanded += 1
                self._try(kind, *nodes)
            elif (number, nodes[0]) not in settled and self._is_next(key, number, nodes[0]):
                settled.add((number, nodes[0]))
                self.expanded += 1
                self._settle(number, nodes[0])
                self._expand(number, nodes[0])
        return self.best

    def _is_next(self, key: float, number: int, node: Node) -> bool:
        """Return whether no other state of the queue comes before this one; else put it back with a better bound."""
        side = self.sides[number]
        cost = side.reached[node]
        most = min(self.best, (self.queue[0][0] if self.queue else inf) * (1 + _SLACK) + self.slack)
        bound = min(most, cost + self.bounds[number].at(self._place(number, side.shape(node)), most - cost))
        if bound <= key or (self.queue and bound <= self.queue[0][0] and bound < most):
            return True
        self._push(bound, number, (node,))
        return False

    def _settle(self, number: int, node: Node) -> None:
        """Join a state whose cost is final to those of the other side."""
        side, other = self.sides[number], self.sides[1 - number]
        shape, cost = side.shape(node), side.reached[node]
        if self._is_free(shape):
            key = (shape, table.same_cells(side.layout_at(node).devices))
            if key not in side.cells or cost < side.reached[side.cells[key]]:
                side.cells[key] = node
            match = other.cells.get(key)
            if match is not None and cost + other.reached[match] < self.best:
                self.best = cost + other.reached[match]
                self.ends = (*((match, node) if number else (node, match)), None)
        side.settled[shape].append(node)
        for kind, plain in self.related[number].get(frames.plain(shape), ()):
            for partner in other.coded(plain):
                matches = other.settled.get(partner)
                if not matches:
                    continue
                bound = cost + self._join_bound(kind, *((partner, shape) if number else (shape, partner)))
                if self.is_uniform:
                    matches = [min(matches, key=other.reached.__getitem__)]
                for match in matches:
                    self._push(bound + other.reached[match], _JOIN, (match, node) if number else (node, match), kind)

    def _expand(self, number: int, node: Node) -> None:
        side = self.sides[number]
        at, state = node
        shape, cost, codes = side.shape(node), side.reached[node], side.frames[at].radix_codes
        for kind, x, y in side.moves:
            for digits, members in _leaving(state[x], x >= D) if state[x] else ():
                after = changed(shape, x, y, prod(codes[d] for d in digits))
                if not self._fits(after, y):
                    continue
                total = cost + self._price(number, at, kind, members, self.size(after if side.is_back else shape))
                bound = total + self.bounds[number].least(self._place(number, after))
                if bound >= self.best:
                    continue
                for ordered in table.orders(digits, x, y):
                    found = (at, table.moved(state, x, y, ordered))
                    if total < side.reached.get(found, inf):
                        side.reached[found] = total
                        side.came[found] = (node, kind, x, y, ordered)
                        self._push(bound, number, (found,))

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
        # Transitions on the same devices without messages are left to chunk and value_chunk.
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
            size = self.size(frame.coded(state))
            groups = frame.groups(digits)
            seconds = self.costs.seconds(kind, groups, size)
            factor = prod(frame.devices.shape[d] for d in digits)
            yield Step(kind, groups, take - D if take >= D else -1, give - D if give >= D else -1,
                       factor, frame.layout(into), size, seconds)  # fmt: skip
