"""Layouts to try, a cluster to price them on, and paths executed in numpy with the semantics of torch.distributed."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from superscaler.ir.layout import Layout
from superscaler.materialize.rvd import transitions as table
from superscaler.materialize.rvd.search import Path
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
    "all_gather": lambda held, step: [np.concatenate(held, axis=step.gather_slot)] * len(held),
    "reduce_scatter": lambda held, step: np.split(sum(held), len(held), axis=step.scatter_slot),
    "all_to_all": lambda held, step: np.split(
        np.concatenate(held, axis=step.gather_slot), len(held), axis=step.scatter_slot
    ),
    "chunk": lambda held, step: [np.split(x, len(held), axis=step.scatter_slot)[k] for k, x in enumerate(held)],
    "value_chunk": lambda held, step: [x if k == 0 else 0 * x for k, x in enumerate(held)],
}


def execute(path: Path, data: dict[int, Array], sizes: tuple[int, ...]) -> dict[int, Array]:
    before = path.source
    for step in path.steps:
        if step.kind in COLLECTIVES:
            after = {}
            for group in step.groups:
                after |= dict(zip(group, COLLECTIVES[step.kind]([data[d] for d in group], step), strict=True))
        else:
            after = exchange(step, before, data, sizes)
        data, before = after, step.layout
    return data


def exchange(step: Step, before: Layout, data: dict[int, Array], sizes: tuple[int, ...]) -> dict[int, Array]:
    held, read = boxes(before, sizes), boxes(step.layout, sizes)
    after = {d: np.zeros([s.stop - s.start for s in box]) for d, box in read.items()}
    for sender, receiver in [*step.groups, *((d, d) for d in step.kept)]:
        both = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(held[sender], read[receiver], strict=True)]
        assert prod(hi - lo for lo, hi in both) > 0
        after[receiver][_inside(both, read[receiver])] += data[sender][_inside(both, held[sender])]
    return after


def _inside(box: list[tuple[int, int]], outer: tuple[slice, ...]) -> tuple[slice, ...]:
    return tuple(slice(lo - s.start, hi - s.start) for (lo, hi), s in zip(box, outer, strict=True))


def exhaustive(source: Layout, goal: Layout, sizes: tuple[int, ...], itemsize: int, costs: Servers) -> float:
    """Return the least seconds of any path: every state of both sides and every join, unless both ends take longer."""
    same = set(source.devices.flat) == set(goal.devices.flat)
    firsts, lasts = (reached(end, end is goal, sizes, itemsize, costs) for end in (source, goal))
    best = table.messages(table.MESSAGES, source, goal, sizes, itemsize, costs).seconds
    for (low, before), (high, after) in itertools.product(firsts, lasts):
        if low + high >= best:
            continue
        a, b = before.devices, after.devices
        if same and a.shape == b.shape and table.same_cells(a) == table.same_cells(b):
            best = low + high
        elif kind := table.joining(a.shape, b.shape, same):
            best = min(best, low + high + table.messages(kind, before, after, sizes, itemsize, costs).seconds)
    return best


def reached(
    end: Layout, is_back: bool, sizes: tuple[int, ...], itemsize: int, costs: Servers
) -> list[tuple[float, Layout]]:
    """Return all layouts that collectives lead to, or (`is_back`) come from, with their least seconds."""
    found = []
    for frame in table.frames(end):
        known, changed = {frame.start: 0.0}, {frame.start}
        while changed:
            state = changed.pop()
            for move in table.moves(state, frame.devices.shape, sizes, is_back):
                size = prod(sizes) * itemsize // prod(frame.shape(move.before)[2:])
                total = known[state] + costs.seconds(move.kind, frame.groups(move.digits), size)
                other = move.before if is_back else move.after
                if total < known.get(other, inf):
                    known[other] = total
                    changed.add(other)
        found += [(cost, frame.layout(state)) for state, cost in known.items()]
    return sorted(found, key=lambda one: one[0])
