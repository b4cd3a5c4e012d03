"""Chains of stages, each in a way of its own: the one with the shortest step, and a bound below all.

A stage is one that a plan with equal stages could have: its costs are known. Dynamic programming over (block, stage)
finds, for some limits on the slowest stage, the chain of stages with the least sum: points of the Pareto set of both.
Stages that do not fit, with the microbatches that are in flight there, are in no chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import numpy as np

from superscaler.groups import collect
from superscaler.planner.costs import Cost, Costs, spans
from superscaler.planner.estimate import IDLE, Estimate, Estimator
from superscaler.planner.space import Choice, Own
from superscaler.planner.stages.balance import Floats, Ints

# Limits on the slowest stage, in the least that any chain has.
_LIMITS = np.array([1 + 1e-9, 1.02, 1.05, 1.12, 1.25, inf])
# The least seconds of the slowest stage: infinitely many times none is no number.
_INSTANT = 1e-12


class Way(NamedTuple):
    """A way of a stage: its plan, its costs, and those of the blocks of all stages, by first block and end."""

    choice: Choice
    costs: Costs
    cost: Cost


class Chain(NamedTuple):
    """Stages in a row: the first block of each, with the end, and the way of each."""

    bounds: list[int]
    ways: list[Way]


class _Table(NamedTuple):
    """Of a stage, by first block, end and (dp, tp), in the fastest way that fits: the seconds that it adds to a step of
    others, those of its own step, and the number of the way.
    """

    waits: Floats
    steps: Floats
    ways: Ints


class Ways:
    """The ways of the stages of a pipeline. `room`: the bytes of a device. `is_bound`: a way is no slower than it is,
    and one that was not measured has the least costs. `pace`: the seconds of work in those that are known.
    """

    def __init__(
        self,
        estimator: Estimator,
        group: Sequence[Choice],
        room: float = inf,
        is_bound: bool = False,
        pace: float = 1.0,
    ) -> None:
        self.estimator, self.room, self.is_bound = estimator, room, is_bound
        # A device waits for so many of the seconds that the others take for a microbatch.
        self.pp, self.microbatches, self.idle = group[0].pp, group[0].microbatches, IDLE.get(group[0].schedule, 1.0)
        costs_of = estimator.menu.least if is_bound else estimator.menu.known
        costs = ((c, costs_of(c.use)) for c in group)
        self.known = [(c, own.faster(pace)) for c, own in costs if own]

    @property
    def least(self) -> float:
        """Return the seconds of a step if all devices were busy alike, in the fastest way for each block."""
        every = [costs for _, costs in self.known]
        runs = [min(costs.runs[n].turn for costs in every) for n in range(len(every[0].runs))] if every else [inf]
        rest = min((costs.rest.turn for costs in every), default=inf)
        work = float(sum(runs[n] for n in self.estimator.run_of)) + rest
        return max(((self.microbatches - self.idle) / self.pp + self.idle) * work, self._shared)

    @cached_property
    def _shared(self) -> float:
        """Return the least seconds of the work of all devices, on the cores that they share."""
        every = [(c.dp * c.tp, costs) for c, costs in self.known]
        works = (min((n * costs.runs[k].work for n, costs in every), default=0.0) for k in self.estimator.run_of)
        rest = min((n * costs.rest.work for n, costs in every), default=0.0)
        return self.estimator.shared(self.microbatches * (sum(works) + rest))

    @cached_property
    def by_cut(self) -> list[list[Way]]:
        """Return the ways by (dp, tp)."""
        e = self.estimator
        ways = (Way(c, costs, spans(costs, e.run_of)) for c, costs in self.known)
        return [*collect(((way.choice.dp, way.choice.tp), way) for way in ways).values()]

    def _cost(self, way: Way, stage: int) -> Cost:
        """Return the costs of a stage by first block and end."""
        return self.estimator.with_ends(way.cost, way.costs.rest, stage, self.pp)

    @cached_property
    def _tables(self) -> list[_Table]:
        return [self._table(stage) for stage in range(self.pp)]

    def _table(self, stage: int) -> _Table:
        count = len(self.estimator.run_of) + 1
        shape = count, count, len(self.by_cut)
        found = _Table(np.full(shape, inf), np.full(shape, inf), np.zeros(shape, dtype=int))
        is_some = self.estimator.cuts.allowed(stage, self.pp)
        for at, ways in enumerate(self.by_cut):
            for number, way in enumerate(ways):
                c, cost = way.choice, self._cost(way, stage)
                peak = self.estimator.bytes_at(c, way.costs, [cost] * self.pp, stage)
                # All others are done before the first one.
                wait = self.idle * cost.turn + (0.0 if stage else self.estimator.tail(c, cost))
                chosen = is_some & (peak <= self.room) & (wait < found.waits[:, :, at])
                for table, value in zip(found, (wait, self._own_step(c, cost), number), strict=True):
                    table[:, :, at] = np.where(chosen, value, table[:, :, at])
        return found

    def _own_step(self, c: Choice, cost: Cost) -> Any:
        """Return the seconds of a stage in a step beside those in which it waits for itself, too."""
        # A device that waits for its host adds gradients meanwhile.
        busy = self.microbatches * cost.seconds + self.estimator.sums(c, cost)
        return np.maximum(self.microbatches * cost.turn, busy) - self.idle * cost.turn

    @cached_property
    def _passes(self) -> Floats:
        """Return the seconds of the messages between stages, by the (dp, tp) of both: of a step's, those that an
        estimate has.
        """
        every = [ways[0].choice for ways in self.by_cut]
        send = np.array([[self.estimator.traffic.send(a, b) for b in every] for a in every])
        times = 1.0 if self.is_bound else (self.microbatches + self.pp) / (self.pp - 1)
        return 2 * times * send

    @cached_property
    def _slowest(self) -> float:
        """Return the least that the slowest stage of a chain takes."""
        before = np.where(np.arange(len(self.estimator.run_of) + 1) == 0, 0.0, inf)
        for table in self._tables:
            before = np.maximum(before[:, None, None], table.steps).min(axis=(0, 2))
        return float(before[-1])

    def _sums(self) -> tuple[Floats, Floats, list[tuple[Ints, Ints]]]:
        """Return limits on the slowest stage, the least sum of the stages of a chain under each, by the (dp, tp) of the
        last one, and how these come about: the first block of each stage, and the (dp, tp) before it.
        """
        # Of one microbatch, no stage has a step beside its waits.
        limits = max(self._slowest, _INSTANT) * _LIMITS
        count = len(self.estimator.run_of) + 1
        before = np.full((len(limits), count, len(self.by_cut)), inf)
        before[:, 0] = 0.0
        ways = list[tuple[Ints, Ints]]()
        origin = np.zeros(before.shape, dtype=int)
        for own in self._tables:
            table = before[:, :, None, :] + np.where(own.steps <= limits[:, None, None, None], own.waits, inf)
            ways.append((table.argmin(axis=1), origin))
            after = table.min(axis=1)[..., None] + self._passes
            before, origin = after.min(axis=2), after.argmin(axis=2)
        return limits, table.min(axis=1)[:, -1], ways

    def chain(self) -> Chain | None:
        """Return the stages with which the step is shortest; None if none fit."""
        if self._slowest == inf:
            return None
        _, sums, ways = self._sums()
        chains = [self._traced(ways, n, int(sums[n].argmin())) for n in range(len(_LIMITS))]
        return min(zip(chains, sums.min(axis=1), strict=True), key=lambda pair: self._step(pair[0]) + pair[1])[0]

    def _traced(self, ways: Sequence[tuple[Ints, Ints]], limit: int, cut: int) -> Chain:
        end, bounds, found = len(self.estimator.run_of), list[int](), list[Way]()
        for table, (firsts, origin) in zip(self._tables[::-1], ways[::-1], strict=True):
            bounds.append(end)
            first = int(firsts[limit, end, cut])
            found.append(self.by_cut[cut][table.ways[first, end, cut]])
            cut, end = int(origin[limit, first, cut]), first
        return Chain([end, *bounds[::-1]], found[::-1])

    def _step(self, chain: Chain) -> float:
        """Return the seconds of a step of the slowest stage of a chain."""
        return max(
            float(self._own_step(way.choice, self._cost(way, stage))[a, b])
            for stage, (way, (a, b)) in enumerate(zip(chain.ways, pairwise(chain.bounds), strict=True))
        )

    def bound(self) -> float:
        """Return seconds that no step goes below: a chain whose slowest stage is between two limits has the sum of the
        upper one, at least.
        """
        if self._slowest == inf:
            return inf
        limits, sums, _ = self._sums()
        return max(float((limits[:-1] / _LIMITS[0] + sums.min(axis=1)[1:]).min()), self._shared)

    def estimate(self, chain: Chain) -> Estimate:
        """Return the estimate of the plan of a chain."""
        own = tuple(Own(c.dp, c.tp, c.recompute) for c, *_ in chain.ways)
        first = chain.ways[0].choice
        layout = next((c.layout for c, *_ in chain.ways if c.tp > 1), "tensor")
        choice = replace(first, layout=layout, own=own) if len({*own}) > 1 else first
        return self.estimator.with_stages(choice, [way.costs for way in chain.ways], chain.bounds)
