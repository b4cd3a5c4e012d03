"""Branch and bound over the orders of a pipeline, by the longest path and by the work that is left on each device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from math import inf

from superscaler.planner.orders.works import BETTER, Rows, State, Work, Works

# The earlier orders of the same works, beside which one is compared.
_KNOWN = 8


def improved(works: Works, seconds: float, rows: Rows, nodes: int) -> tuple[float, Rows, bool]:
    """Return the seconds of the shortest step, its order, and whether no order is shorter: not if `nodes` were not
    enough. `seconds`, `rows`: those of an order that is known.

    One stage on each device is assumed for the proof: a device never waits while a work could start and end.
    """
    search = _Search(works, seconds, rows, nodes)
    search.go()
    return search.best, search.rows, search.left > 0


def bound(works: Works, can_split: Collection[int] = ()) -> float:
    """Return seconds that no order goes below, whichever of some stages are split."""
    seconds = [dict(own) for own in works.seconds]
    for stage in can_split:
        own = seconds[stage]
        half = min(own["I"], own["B"])
        seconds[stage] = {**own, "I": half, "W": min(own["B"] - half, own["I"] + own["W"] - half)}
    return _bound(State(replace(works, seconds=tuple(seconds), split=works.split.union(can_split))))


class _Search:
    def __init__(self, works: Works, seconds: float, rows: Rows, nodes: int) -> None:
        self.works, self.best, self.rows, self.left = works, seconds, rows, nodes
        self.state = State(works)
        self.known: dict[tuple[int, ...], list[tuple[float, ...]]] = {}

    def go(self) -> None:
        """Try all works that could be next on the device that could end one first."""
        self.left -= 1
        state, place, seconds = self.state, self.works.place, self.works.seconds
        if self.left <= 0 or _bound(state) >= self.best * (1 - BETTER) or self._is_known():
            return
        ready = [pair for device in range(len(self.works.rooms)) for pair in state.ready(device)]
        if not ready:
            if all(len(own) == self.works.count for own in state.backward) and self._has_halves():
                self.best, self.rows = state.end, [list(row) for row in state.rows]
            return
        end, stage = min((start + seconds[s][kind], s) for start, (s, kind) in ready)
        own = [(start, work) for start, work in ready if place[work[0]] == place[stage]]
        for start, work in sorted(own, key=_rank):
            if start < end or start + seconds[work[0]][work[1]] <= end:
                done = state.do(work, start)
                self.go()
                state.undo(done)

    def _has_halves(self) -> bool:
        return all(self.state.halves[s] == self.works.count for s in self.works.split)

    def _is_known(self) -> bool:
        """Return whether the same works were done by then in another order, and note this one."""
        state, works = self.state, self.works
        stages = range(len(works.place))
        key = tuple(len(own[s]) for own in (state.forward, state.backward) for s in stages) + tuple(state.halves)
        # What is read by works to come.
        times = [*state.free]
        for s in stages:
            after = state.forward[s + 1] if s + 1 < len(works.place) else state.backward[s]
            times += state.forward[s][min(len(after), len(state.backward[s])) :]
            times += state.backward[s][len(state.backward[s - 1]) :] if s else []
        others, found = self.known.setdefault(key, []), tuple(times)
        if any(all(a <= b for a, b in zip(other, found, strict=True)) for other in others):
            return True
        others.append(found)
        del others[:-_KNOWN]
        return False


def _rank(pair: tuple[float, Work]) -> tuple[float, int]:
    start, (_, kind) = pair
    return start, "IBFW".index(kind)


def _bound(state: State) -> float:
    """Return seconds that no order of the works that are left goes below."""
    works, last = state.works, len(state.works.place) - 1
    forward, backward, sends, count = state.forward, state.backward, works.sends, works.count
    heads, backs = [0.0] * (last + 1), [0.0] * (last + 1)
    least = max(free + after for free, after in zip(state.free, works.after, strict=True))
    for s, device in enumerate(works.place):
        heads[s], k = state.free[device], len(forward[s])
        if s and k < count:
            known = len(forward[s - 1]) > k
            ready = forward[s - 1][k] if known else heads[s - 1] + works.seconds[s - 1]["F"]
            heads[s] = max(heads[s], ready + sends[s - 1])
        if k < count:
            # A forward starts when the activations of as many before it as there is room are gone.
            turns, more = divmod(count - k - 1, state.rooms[device])
            rest = works.after_forward[s] + works.seconds[s]["F"]
            least = max(least, heads[s] + turns * works.rounds[s] + more * works.seconds[s]["F"] + rest)
            least = max(least, heads[s] + (count - k) * works.seconds[s]["F"] + works.after_forward[s])
    for s in range(last, -1, -1):
        backs[s], k = state.free[works.place[s]], len(backward[s])
        if k == count:
            continue
        own = forward[s][k] if k < len(forward[s]) else heads[s] + works.seconds[s]["F"]
        backs[s] = max(backs[s], own)
        if s < last:
            ready = backward[s + 1][k] if k < len(backward[s + 1]) else backs[s + 1] + works.back[s + 1]
            backs[s] = max(backs[s], ready + sends[s])
        least = max(least, backs[s] + (count - k) * works.back[s] + works.after_backward[s])
    for device, own_stages in enumerate(works.own):
        least = max(least, _work_left(state, device, own_stages, heads, backs))
    return least


def _work_left(state: State, device: int, stages: list[int], heads: list[float], backs: list[float]) -> float:
    """Return the end of a step by the work that is left on a device: it begins with its first, and ends with a last."""
    works, count = state.works, state.works.count
    first, needed, halves, tail = inf, 0.0, 0.0, inf
    for s in stages:
        forwards, backwards = count - len(state.forward[s]), count - len(state.backward[s])
        first = min(first, heads[s] if forwards else inf, backs[s] if backwards else inf)
        needed += forwards * works.seconds[s]["F"] + backwards * works.back[s]
        tail = min(tail, works.after_backward[s]) if backwards else tail
        if s in works.split and state.halves[s] < count:
            halves += (count - state.halves[s]) * works.seconds[s]["W"]
            first = min(first, state.free[device] if state.halves[s] < len(state.backward[s]) else inf)
    if first == inf:
        return 0.0
    alone = first + needed + tail if needed else 0.0
    return max(alone, first + needed + halves + (works.after[device] if halves else tail))
