"""Pipelines whose stages have a (dp, tp), blocks and a recomputation of their own: the best, and a bound below all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf

from superscaler.groups import collect
from superscaler.planner.estimate import Estimate, Estimator
from superscaler.planner.own.chains import Ways
from superscaler.planner.space import RECOMPUTE, Choice, Use

# The shares of a device that estimates may fill: where that of a plan was too low, less is tried.
_SHARES = 1.0, 0.93, 0.85
# The estimate of bytes, in those of a device, from which on a stage does not fit for certain.
_ALMOST = 1.1
# A bound below so many times the best step is raised: by measuring more, or by more whole plans.
CLOSE = 0.95
# The most devices of pipelines whose stages have a (dp, tp) of their own: data-parallel devices do not fold there.
_UNFOLDED = 32
_OWN = tuple(RECOMPUTE)[:3]
Fits = Callable[[Estimate], bool]


class OwnStages:
    """The plans of a space with stages of their own. `layout`: of tensor parallelism; `most`: of its devices; `room`:
    the bytes of a device.
    """

    def __init__(self, estimator: Estimator, space: Iterable[Choice], layout: str, most: int, room: float) -> None:
        self.estimator, self.room = estimator, room
        plain = (c for c in space if is_free(c) and c.zero < 2 and c.recompute in _OWN)
        own = (c for c in plain if c.loss == "whole" and c.swap == "none" and c.tp <= most)
        self.groups = collect((_group(c), c) for c in own if c.layout == (layout if c.tp > 1 else "tensor"))
        self._given: dict[tuple[Choice, ...], Estimate | None] = {}

    def better(self, limit: float, fits: Fits) -> Iterator[Estimate]:
        """Yield the estimate of the best plan of each group that fits, if it may take less than `limit` seconds a row:
        once for the ways of its stages that are known, unless it turned out not to fit.
        """
        for group in self.groups.values():
            self._measure(group, limit)
            known = tuple(c for c in group if self.estimator.menu.known(c.use))
            is_done = known in self._given and ((last := self._given[known]) is None or fits(last))
            if len(known) < 2 or is_done or Ways(self.estimator, known).least >= limit * known[0].batch:
                continue
            if e := fitting(self.estimator, known, (share * self.room for share in _SHARES), fits):
                yield e
            self._given[known] = e

    def _measure(self, group: Sequence[Choice], limit: float) -> None:
        """Measure what was not, if only that keeps the bound of a group's plans from being close to `limit` seconds a
        row: first the ways of the stages that could be best.
        """
        menu, low, asked = self.estimator.menu, CLOSE * limit * group[0].batch, set[Use]()
        while low < inf and (lacking := {c.use for c in group if not menu.known(c.use)} - asked):
            ways = Ways(self.estimator, group, _ALMOST * self.room, is_bound=True)
            chain = ways.chain() if ways.least < low and ways.bound() < low else None
            if chain is None:
                return
            some = lacking & {way.choice.use for way in chain.ways} or lacking
            asked |= {use for use in some if menu.costs(use) is None}

    def least(self, limit: float) -> float:
        """Return the least seconds a row of any of these plans, or `limit`."""
        # Of one way, the plan with equal stages has an estimate.
        for group in (some for some in self.groups.values() if len(some) > 1):
            ways = Ways(self.estimator, group, _ALMOST * self.room, is_bound=True)
            if ways.least < limit * group[0].batch:
                limit = min(limit, ways.bound() / group[0].batch)
        return limit


def is_free(c: Choice) -> bool:
    """Return whether stages with any blocks are chains: fewer microbatches do not fill the idle time of ZB-H1."""
    is_full = c.schedule == "1f1b" or (c.schedule == "zb_h1" and c.microbatches >= c.pp)
    return c.pp > 1 and not c.own and is_full


def fitting(estimator: Estimator, plans: Sequence[Choice], rooms: Iterable[float], fits: Fits) -> Estimate | None:
    """Return the estimate of the best stages that fit, each with the cuts and the recomputation of one of some plans;
    None if none do. `rooms`: bytes of a device, the first of them first.
    """
    every = (Ways(estimator, plans, room) for room in rooms)
    found = (ways.estimate(chain) for ways in every if (chain := ways.chain()))
    return next(filter(fits, found), None)


def even(estimator: Estimator, c: Choice) -> list[float]:
    """Return the seconds that each stage of a plan takes longer with equal FLOPs in all; none if not known."""
    costs, even = estimator.menu.costs(c.use), estimator.cuts.even(c.stages)
    if costs is None or even is None:
        return []
    both = even, estimator.cuts.of(c)
    pairs = zip(*(estimator.stage_costs(c, [costs] * c.stages, bounds) for bounds in both), strict=True)
    return [a.seconds - b.seconds for a, b in pairs]


def _group(c: Choice) -> tuple[object, ...]:
    """Return a key, equal for plans whose stages may be mixed."""
    own = () if c.dp * c.tp * c.pp <= _UNFOLDED else (c.dp, c.tp)
    return c.batch, c.pp, c.microbatches, c.zero, c.schedule, *own
