"""Lower bounds on the cost of a path: Dijkstra over the shapes of layouts, whatever their digits."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from math import inf

from superscaler.materialize.rvd import frames
from superscaler.materialize.rvd import transitions as table
from superscaler.materialize.rvd.transitions import D, Shape, V

# (side, shape).
Vertex = tuple[int, Shape]
Follow = Callable[[Vertex], Iterable[tuple[Vertex, float]]]
Related = dict[Shape, list[tuple[str, Shape]]]


class Bounds:
    """The least seconds from one layout, whatever the digits: A* over the shapes of both sides, extended on demand.

    `guide`: the bounds from the other layout, final up to `reach`.
    """

    def __init__(self, start: Vertex, follow: Follow, guide: Bounds | None = None, reach: float = 0.0) -> None:
        self.follow, self.guide, self.reach = follow, guide, reach
        self.known = {start: 0.0}
        self.queue = [(self._rest(start), 0.0, start)]
        self.done: dict[Vertex, float] = {}

    def at(self, place: Vertex, most: float) -> float:
        """Return the seconds of a shape; infinity from `most` on."""
        found = self.done.get(place)
        if found is None:
            most += self._rest(place)
            while found is None and self.queue and self.queue[0][0] < most:
                _, cost, here = heapq.heappop(self.queue)
                if here not in self.done:
                    self._settle(here, cost)
                    found = self.done.get(place)
        return inf if found is None else found

    def least(self, place: Vertex) -> float:
        """Return a lower bound on the seconds of a shape without a further search."""
        found = self.done.get(place)
        if found is not None:
            return found
        return self.queue[0][0] - self._rest(place) if self.queue else inf

    def _rest(self, place: Vertex) -> float:
        return min(self.guide.done.get(place, inf), self.reach) if self.guide else 0.0

    def _settle(self, here: Vertex, cost: float) -> None:
        self.done[here] = cost
        known = self.known
        for place, more in self.follow(here):
            total = cost + more
            if total < known.get(place, inf):
                known[place] = total
                heapq.heappush(self.queue, (total + self._rest(place), total, place))


class Memo(dict[tuple[str, int, int], float]):
    """A dict that computes missing values by a function."""

    def __init__(self, function: Callable[[tuple[str, int, int]], float]) -> None:
        super().__init__()
        self.function = function

    def __missing__(self, key: tuple[str, int, int]) -> float:
        found = self[key] = self.function(key)
        return found


@lru_cache(maxsize=1 << 14)
def near(shape: Shape, limits: Shape, is_back: bool) -> list[tuple[tuple[str, int, int], Shape]]:
    """Return ((kind, factor, parts of the tensor at its source), shape) of all collectives from, or to, a shape."""
    plain, parts, found = frames.plain(shape), frames.parts(shape), []
    for kind, take, give in table.slots(len(shape)):
        x, y = (give, take) if is_back else (take, give)
        for p, radix in frames.factors(shape[x]):
            if y < D or limits[y - D] % (plain[y] * radix) == 0:
                after = changed(shape, x, y, p)
                found.append(((kind, p, frames.parts(after) if is_back else parts), after))
    return found


@lru_cache(maxsize=256)
def related(few: int, many: int, limits: Shape, is_same: bool) -> tuple[Related, Related]:
    """Return, for the plain shapes of each side, the shapes of the other with the messages that join them."""
    forward: Related = defaultdict(list)
    back: Related = defaultdict(list)
    afters: dict[object, list[Shape]] = defaultdict(list)

    def common(shape: Shape) -> list[object]:
        """Return keys, at least one of which is equal for two shapes that messages may join."""
        if table.is_odd(few, many):
            return [shape[V]]
        return [shape] if is_same else [("R", shape[V:]), ("D", shape[:D])]

    for after in _shapes(many, limits):
        for key in common(after):
            afters[key].append(after)
    for before in _shapes(few, limits):
        for after in dict.fromkeys(b for key in common(before) for b in afters[key]):
            for row in table.INTER:
                if row.fits(before, after, is_same):
                    forward[before].append((row.kind, after))
                    back[after].append((row.kind, before))
    return forward, back


def _shapes(n: int, limits: Shape) -> Iterator[Shape]:
    """Yield the shapes of n devices that cut every slot into equal parts."""
    if not limits:
        yield from ((n // k, k) for k in _divisors(n))
        return
    for k in _divisors(n):
        if limits[-1] % k == 0:
            yield from ((*more, k) for more in _shapes(n // k, limits[:-1]))


@cache
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(k for k in range(1, n + 1) if n % k == 0)


def changed(shape: Shape, x: int, y: int, p: int) -> Shape:
    after = list(shape)
    after[x] //= p
    after[y] *= p
    return tuple(after)
