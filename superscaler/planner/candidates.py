"""The plans that a search estimates: those that could be better than the best, by what is known of plainer ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from superscaler.planner.estimate import Estimate, Estimator
from superscaler.planner.own.stages import Fits, OwnStages
from superscaler.planner.space import BY_SEQUENCE, Choice

# A plan is better than another one below so many times its seconds.
NEAR = 0.995
# The least work of a layout that cuts the sequence, in that of tensor parallelism.
_LEAST_WORK = 0.95


class Candidates:
    """The plans of a space, with the estimates of some. A plan that saves memory is estimated where none of those that
    save less fits, and where these show that it could be better than the best: their steps are no longer.

    `tensor`: the layout of tensor parallelism. `per_server`: devices; tensor parallelism is over more of them only
    where no other plan fits. `room`: the bytes of a device.
    """

    def __init__(
        self, estimator: Estimator, space: Sequence[Choice], tensor: str, per_server: int, room: float
    ) -> None:
        self.estimator, self.tensor, self.per_server, self.room = estimator, tensor, per_server, room
        self.waiting = sorted(space, key=lambda c: (c.tp > per_server, c.savings, c.layout in BY_SEQUENCE))
        self.found: dict[Choice, Estimate | None] = {}
        self.own = OwnStages(estimator, space, tensor, per_server, room)

    def more(self, limit: float, fits: Fits) -> list[Estimate]:
        """Return the estimates of further plans, which could take less than `limit` seconds a row, or less than the
        best estimate.
        """
        new = list[Estimate]()
        for c in self.waiting:
            is_dominated, least = self._known(c, fits)
            if is_dominated or least > NEAR * limit or (c.tp > self.per_server and limit < inf):
                continue
            if limit < inf and c.savings and self.estimator.least_bytes(c) > self.room:
                continue
            if e := self.estimate(c):
                new.append(e)
                limit = min(limit, e.a_row) if fits(e) else limit
        self.waiting = [c for c in self.waiting if c not in self.found]
        # Stages of their own are worth the time where they are better than those of all plans that are known to fit.
        best = min((e.a_row for e in self.found.values() if e and fits(e)), default=inf)
        for e in self.own.better(limit, fits):
            if e.choice not in self.found and e.a_row < NEAR * best:
                self.found[e.choice] = e
                new.append(e)
        return new

    def estimate(self, c: Choice) -> Estimate | None:
        """Return the estimate of a plan; None if the model does not allow it."""
        if c not in self.found:
            self.found[c] = self.estimator.of(c)
        return self.found[c]

    def beside(self, best: Choice) -> Iterator[Estimate]:
        """Yield the estimates of plans that differ from the best in what they recompute only."""
        for c in [c for c in self.waiting if replace(best, blocks=(), recompute=c.recompute) == c]:
            if e := self.estimate(c):
                yield e

    def least(self, fits: Fits) -> float:
        """Return the least seconds a row that plans without an estimate could take."""
        others = (c for c in self.waiting if c not in self.found and c.tp <= self.per_server)
        could = (c for c in others if not c.savings or self.estimator.least_bytes(c) <= self.room)
        known = (self._known(c, fits) for c in could)
        return self.own.least(min((least for is_dominated, least in known if not is_dominated), default=inf))

    def _known(self, c: Choice, fits: Fits) -> tuple[bool, float]:
        """Return whether a plainer plan fits, and the least seconds a row, by all plainer plans."""
        is_dominated, least = False, 0.0
        for plainer in c.plainer():
            e = self.found.get(plainer)
            fit, own = (fits(e), e.bound / c.batch) if e else self._known(plainer, fits)
            is_dominated, least = is_dominated or fit, max(least, own)
        if c.layout in BY_SEQUENCE and (e := self.found.get(replace(c, layout=self.tensor))):
            least = max(least, _LEAST_WORK * e.work / c.batch)
        return is_dominated, least
