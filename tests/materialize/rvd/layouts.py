"""Layouts to try, a cluster to price them on, and paths executed in numpy with the semantics of torch.distributed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf, log2, prod

import numpy as np
from numpy.typing import NDArray

from superscaler.ir.layout import Layout
from superscaler.materialize.rvd import transitions as table
from superscaler.materialize.rvd.frames import Frame
from superscaler.materialize.rvd.frames import frames as find_frames
from superscaler.materialize.rvd.paths import Path
from superscaler.materialize.rvd.transitions import Step

Array = NDArray[np.float64]
# Elements that move, of those of a source, in a ring of p members.
RING = {
    "all_reduce": lambda p: 2 * (p - 1) / p,
    "all_gather": lambda p: p - 1,
    "reduce_scatter": lambda p: (p - 1) / p,
    "all_to_all": lambda p: (p - 1) / p,
}


@dataclass(frozen=True)
class Servers:
    """Servers of `devices` each: NVLink at 150 GB/s inside, one 12.5 GB/s NIC a server and direction (facts.md 2)."""

    devices: int = 8
    inside: float = 150e9
    across: float = 12.5e9
    alpha: float = 5e-6

    def place(self, device: int) -> int:
        return device // self.devices

    def seconds(self, kind: str, groups: Sequence[Sequence[int]], size: int) -> float:
        if kind in RING:
            return self.alpha + RING[kind](len(groups[0])) * size / self._bandwidth(groups)
        if kind in ("chunk", "value_chunk"):
            return 0.0
        if kind == "broadcast":
            return self._broadcast(groups, size)
        return self._pairs(groups, size)

    def crossing(self, groups: Sequence[Sequence[int]], size: int) -> int:
        """Bytes of messages between servers."""
        return size * sum(self.place(a) != self.place(b) for a, b in groups)

    def _bandwidth(self, groups: Sequence[Sequence[int]]) -> float:
        """That of NVLink, or of the NIC with the most rings through it."""
        far = Counter[int]()
        for group in groups:
            servers = set(map(self.place, group))
            far.update(servers if len(servers) > 1 else ())
        return self.across / max(far.values()) if far else self.inside

    def _pairs(self, pairs: Sequence[Sequence[int]], size: int) -> float:
        ends: dict[tuple[str, int], float] = {}
        messages = Counter([("send", a) for a, _ in pairs] + [("receive", b) for _, b in pairs])
        for a, b in pairs:
            far = self.place(a) != self.place(b)
            keys = [("send", self.place(a)), ("receive", self.place(b))] if far else [("out", a), ("in", b)]
            for key in keys:
                ends[key] = ends.get(key, 0.0) + size / (self.across if far else self.inside)
        return self.alpha * max(messages.values()) + max(ends.values())

    def _broadcast(self, groups: Sequence[Sequence[int]], size: int) -> float:
        """A binomial tree inside each server, after one message to each other server."""
        far = [
            (g[0], d)
            for g in groups
            for d in {self.place(d): d for d in g if self.place(d) != self.place(g[0])}.values()
        ]
        most = max(max(sum(self.place(d) == s for d in g) for s in {self.place(d) for d in g}) for g in groups)
        rounds = ceil(log2(most)) if most > 1 else 0
        return (self._pairs(far, size) if far else 0.0) + rounds * (self.alpha + size / self.inside)


def shapes(n: int, ndim: int) -> Iterator[tuple[int, ...]]:
    """Yield all (R, V, D1..) of n devices with `ndim` axes."""
    if ndim == 1:
        yield (n,)
        return
    for k in range(1, n + 1):
        if n % k == 0:
            yield from ((k, *rest) for rest in shapes(n // k, ndim - 1))


def layout(shape: tuple[int, ...], ids: Sequence[int]) -> Layout:
    return Layout(np.array(ids, dtype=np.int64).reshape(shape))


def scattered(of: Layout, full: Array, rng: np.random.Generator) -> dict[int, Array]:
    """Return what each device holds: random value parts that add up to the tensor."""
    parts = [rng.integers(-9, 9, full.shape).astype(float) for _ in range(of.shape[1] - 1)]
    parts.append(full - sum(parts))
    return {int(of.devices[i]): parts[i[1]][_box(i[2:], of, full.shape)] for i in np.ndindex(of.devices.shape)}


def _box(cell: tuple[int, ...], of: Layout, sizes: tuple[int, ...]) -> tuple[slice, ...]:
    each = [n // k for n, k in zip(sizes, of.shape[2], strict=True)]
    return tuple(slice(i * n, (i + 1) * n) for i, n in zip(cell, each, strict=True))


def boxes(of: Layout, sizes: tuple[int, ...]) -> dict[int, tuple[slice, ...]]:
    return {int(of.devices[i]): _box(i[2:], of, sizes) for i in np.ndindex(of.devices.shape)}


def holds(data: dict[int, Array], of: Layout, full: Array) -> bool:
    """Whether the devices of a layout hold exactly the tensor: replicas alike, value parts adding up."""
    if set(data) != set(of.devices.reshape(-1).tolist()):
        return False
    for cell in np.ndindex(of.devices.shape[2:]):
        here = full[_box(cell, of, full.shape)]
        total = np.zeros(here.shape)
        for replicas in of.devices[(slice(None), slice(None), *cell)].T.tolist():
            if any(data[d].shape != here.shape or not np.array_equal(data[d], data[replicas[0]]) for d in replicas):
                return False
            total += data[replicas[0]]
        if not np.array_equal(total, here):
            return False
    return True


COLLECTIVES = {
    "all_reduce": lambda held, step: [sum(held)] * len(held),
    "all_gather": lambda held, step: [np.concatenate(held, axis=step.take)] * len(held),
    "reduce_scatter": lambda held, step: np.split(sum(held), len(held), axis=step.give),
    "all_to_all": lambda held, step: np.split(np.concatenate(held, axis=step.take), len(held), axis=step.give),
    "chunk": lambda held, step: [np.split(x, len(held), axis=step.give)[k] for k, x in enumerate(held)],
    "value_chunk": lambda held, step: [x if k == 0 else 0 * x for k, x in enumerate(held)],
}


def execute(path: Path, data: dict[int, Array], sizes: tuple[int, ...]) -> dict[int, Array]:
    before = path.source
    for step in path.steps:
        if step.kind in COLLECTIVES:
            after = {}
            assert {len(group) for group in step.groups} == {step.factor}
            for group in step.groups:
                after |= dict(zip(group, COLLECTIVES[step.kind]([data[d] for d in group], step), strict=True))
        else:
            after = exchange(step, before, data, sizes)
        data, before = after, step.layout
    return data


def exchange(step: Step, before: Layout, data: dict[int, Array], sizes: tuple[int, ...]) -> dict[int, Array]:
    held, read = boxes(before, sizes), boxes(step.layout, sizes)
    after = {d: np.zeros([s.stop - s.start for s in box]) for d, box in read.items()}
    pairs = [(group[0], d) for group in step.groups for d in group[1:]]
    for sender, receiver in [*pairs, *((d, d) for d in step.kept)]:
        both = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(held[sender], read[receiver], strict=True)]
        assert prod(hi - lo for lo, hi in both) > 0
        after[receiver][_inside(both, read[receiver])] += data[sender][_inside(both, held[sender])]
    return after


def _inside(box: list[tuple[int, int]], outer: tuple[slice, ...]) -> tuple[slice, ...]:
    return tuple(slice(lo - s.start, hi - s.start) for (lo, hi), s in zip(box, outer, strict=True))


def exhaustive(source: Layout, goal: Layout, sizes: tuple[int, ...], itemsize: int, costs: Servers, most: int) -> float:
    """Return the least seconds of any path of at most `most` steps: every state of the table and every join, but for
    those whose steps before and after it take as long as a path that is known.
    """
    same = set(source.devices.flat) == set(goal.devices.flat)
    firsts, lasts = (
        ends(side, is_back, most, sizes, itemsize, costs)
        for side, is_back in zip(find_frames(source, goal, None), (False, True), strict=True)
    )
    best = joined(table.LAST, source, goal, sizes, itemsize, costs, same)
    if same:
        cells = [by_cells(some for side in found.values() for some in side) for found in (firsts, lasts)]
        for key in cells[0].keys() & cells[1].keys():
            best = min(best, together(cells[0][key], cells[1][key], most))
    for (before, some), (after, others), row in itertools.product(firsts.items(), lasts.items(), table.INTER):
        if not row.fits(before, after, same):
            continue
        for low, first, a in some:
            for high, last, b in others:
                if low + high >= best:
                    break
                if (total := together(a, b, most - 1)) < best:
                    best = min(best, total + joined(row.kind, first, last, sizes, itemsize, costs, same))
    return best


Steps = dict[int, float]
End = tuple[float, Layout, Steps]


def together(first: Steps, last: Steps, most: int) -> float:
    """Return the least seconds of the steps before and after a join, of at most `most` steps."""
    return min((a + b for i, a in first.items() for j, b in last.items() if i + j <= most), default=inf)


def by_cells(found: Iterable[End]) -> dict[object, Steps]:
    """Return the seconds of layouts that are equal up to the order of R and V, by number of steps."""
    known: dict[object, Steps] = {}
    for _, end, steps in found:
        mine = known.setdefault((end.devices.shape, table.same_cells(end.devices)), {})
        mine.update({n: min(cost, mine.get(n, inf)) for n, cost in steps.items()})
    return known


def ends(
    frames: Sequence[Frame], is_back: bool, most: int, sizes: tuple[int, ...], itemsize: int, costs: Servers
) -> dict[tuple[int, ...], list[End]]:
    """Return by shape the layouts that are reached, the cheapest first, each with its seconds by number of steps."""
    found: dict[tuple[int, ...], list[End]] = {}
    for frame in frames:
        for state, steps in reached(frame, is_back, most, sizes, itemsize, costs).items():
            end = frame.layout(state)
            found.setdefault(end.devices.shape, []).append((min(steps.values()), end, steps))
    return {shape: sorted(some, key=lambda end: end[0]) for shape, some in found.items()}


def reached(
    frame: Frame, is_back: bool, most: int, sizes: tuple[int, ...], itemsize: int, costs: Servers
) -> dict[table.State, dict[int, float]]:
    """Return the seconds of each state by the number of steps."""
    known: dict[table.State, dict[int, float]] = {frame.start: {0: 0.0}}
    for count in range(most):
        for state in [state for state, steps in known.items() if count in steps]:
            for kind, x, y in table.slots(len(state)):
                take, give = (y, x) if is_back else (x, y)
                for digits in table.leaving(state[take], take):
                    for ordered in table.orders(digits, take, give):
                        after = table.moved(state, take, give, ordered)
                        shape = frame.layout(after).devices.shape
                        if any(n % k for n, k in zip(sizes, shape[2:], strict=True)):
                            continue
                        held = frame.layout(after if is_back else state).devices.shape
                        size = prod(sizes) * itemsize // prod(held[2:])
                        total = known[state][count] + costs.seconds(kind, frame.groups(ordered), size)
                        steps = known.setdefault(after, {})
                        steps[count + 1] = min(total, steps.get(count + 1, inf))
    return known


def joined(
    kind: str, before: Layout, after: Layout, sizes: tuple[int, ...], itemsize: int, costs: Servers, same: bool
) -> float:
    groups, _, largest = table.messages(before, after, sizes, costs.place)
    if not groups:
        return inf if same else 0.0
    return costs.seconds(kind, table.stars(groups) if kind == "broadcast" else groups, largest * itemsize)
