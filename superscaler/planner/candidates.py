"""The plans that a search estimates: those that could be better than the best, by what is known of plainer ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from math import inf
from typing import TypeVar

from superscaler.planner.estimate import Estimate, Estimator
from superscaler.planner.own.stages import Fits, OwnStages, fitting, is_free
from superscaler.planner.space import BY_SEQUENCE, DECISIONS, SPLIT, Choice
from superscaler.planner.whole.programs import Found
from superscaler.simulate.prediction import Prediction

# A plan is better than another one below so many times its seconds.
NEAR = 0.995
# The least work of a layout that cuts the sequence, in that of tensor parallelism.
_LEAST_WORK = 0.95
# The weight of the whole plans of the same kind beside that of the estimate itself.
_TRUST = 0.25
# The best plan of a family is measured below so many times the best step: predictions may be wrong by so much.
_VARIED = 1.15
# So many of a family are compiled whole to find its best one.
_TRIED = 3
# Estimates of bytes above so many times those of a device are not near it: no other stages, nor corrections, make them
# fit.
FAR = 1.5
Ranked = TypeVar("Ranked", bound=Estimate | Found)


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
        self.waiting = sorted(space, key=lambda c: (c.tp > per_server, c.savings, self._is_other(c)))
        self.found: dict[Choice, Estimate | None] = {}
        self.errors = Errors()
        self.own = OwnStages(estimator, space, tensor, per_server, room)

    def more(self, limit: float, fits: Fits) -> list[Estimate]:
        """Return the estimates of further plans, which could take less than `limit` seconds a row, or less than the
        best estimate.
        """
        new, menu = list[Estimate](), self.estimator.menu

        def could(c: Choice) -> bool:
            """Return whether a plan could take less than `limit` seconds a row, by what is known."""
            is_dominated, least = self._known(c, fits)
            if is_dominated or least > NEAR * limit or (c.tp > self.per_server and limit < inf):
                return False
            return limit == inf or self._has_room(c)

        for _, some in groupby(self.waiting, key=lambda c: (c.tp > self.per_server, c.savings)):
            plans = [*some]
            menu.look(plans, could)
            for c in filter(could, plans):
                menu.fill()
                menu.begin(c.use)
                # What was measured may show that the plan is no better.
                if could(c) and (e := self.estimate(c, limit)):
                    new.append(e)
                    limit = min(limit, e.a_row) if fits(e) else limit
        menu.look(())
        self.waiting = [c for c in self.waiting if c not in self.found]
        # Where the fastest stages of a plan do not fit, others may.
        for e in sorted(filter(None, self.found.values()), key=lambda e: e.a_row):
            is_near = e.bound < NEAR * limit * e.choice.batch and e.peak <= FAR * self.room
            if not is_near or not is_free(plan := replace(e.choice, blocks=())) or fits(e):
                continue
            room = self.room * e.peak / self.errors.corrected(e).peak
            other = fitting(self.estimator, [plan], [room], fits)
            if other and other.choice not in self.found:
                self.found[other.choice] = other
                new.append(other)
                limit = min(limit, other.a_row)
        # Stages of their own are worth the time where they are better than those of all plans that are known to fit.
        best = min((e.a_row for e in self.found.values() if e and fits(e)), default=inf)
        for e in self.own.better(limit, fits):
            if e.choice not in self.found and e.a_row < NEAR * best:
                self.found[e.choice] = e
                new.append(e)
        return new

    def estimate(self, c: Choice, limit: float = inf) -> Estimate | None:
        """Return the estimate of a plan; None if the model does not allow it. `limit`: see `Estimator.of`."""
        if c not in self.found:
            self.found[c] = self.estimator.of(c, limit)
        return self.found[c]

    def beside(self, best: Choice, fits: Fits) -> Iterator[Estimate]:
        """Yield the estimates of plans that differ from the best in what they recompute only, after all others with
        which it is compared.
        """
        plans = [c for c in self.waiting if replace(best, blocks=(), recompute=c.recompute) == c]
        self.estimator.menu.look(plans)
        for _ in self.compare(fits):
            self.estimator.menu.fill()
        for c in plans:
            if e := self.estimate(c):
                yield e

    def compare(self, fits: Fits) -> Iterator[bool]:
        """Estimate further plans, one at a time, until the best one with each value of each decision is known, of those
        that save no memory and whose costs are known.
        """
        others = (c for c in self._others() if not c.savings and self.estimator.menu.known(c.use))
        plans = sorted(((c, self._known(c, fits)[1]) for c in others), key=lambda pair: pair[1])
        for name in DECISIONS:
            best = dict[object, float]()
            for e in filter(None, self.found.values()):
                if fits(e):
                    best[e.choice.said(name)] = min(best.get(e.choice.said(name), inf), e.a_row)
            for c, least in plans:
                limit = best.get(c.said(name), inf)
                if least < limit and c not in self.found:
                    new = self.estimate(c, 0.0)
                    best[c.said(name)] = min(limit, new.a_row) if new and fits(new) else limit
                    yield True

    def slower(self, fits: Fits) -> Iterator[Estimate]:
        """Yield the least seconds of plans that save no memory, and have no estimate."""
        for c in self._others():
            if not (c.savings or self._is_other(c)) and (least := self._known(c, fits)[1] * c.batch):
                yield Estimate(c, least, 0.0, least)

    def least(self, fits: Fits, limit: float) -> float:
        """Return the least seconds a row that plans without an estimate could take, or `limit`."""
        known = ((*self._known(c, fits), c) for c in self._others())
        lower = ((least, c) for is_dominated, least, c in known if not is_dominated and least < limit)
        could = sorted(lower, key=lambda pair: pair[0])
        return self.own.least(next((least for least, c in could if self._has_room(c)), limit))

    def _others(self) -> Iterator[Choice]:
        """Yield the plans without an estimate, but for tensor parallelism over several servers."""
        return (c for c in self.waiting if c not in self.found and c.tp <= self.per_server)

    def _has_room(self, c: Choice) -> bool:
        """Return whether a plan could fit, by what is known of its bytes: of those that save memory only."""
        return not c.savings or self.estimator.least_bytes(c) <= self.room

    def _known(self, c: Choice, fits: Fits) -> tuple[bool, float]:
        """Return whether a plainer plan fits, and the least seconds a row, by all plainer plans."""
        is_dominated, least = False, 0.0
        for plainer in c.plainer():
            e = self.found.get(plainer)
            fit, own = (fits(e), e.bound / c.batch) if e else self._known(plainer, fits)
            is_dominated, least = is_dominated or fit, max(least, own)
        own = self.estimator.least(c)
        if self._is_other(c):
            own = max(own, _LEAST_WORK * self.estimator.least(replace(c, layout=self.tensor), is_work=True))
        return is_dominated, max(least, own / c.batch)

    def _is_other(self, c: Choice) -> bool:
        """Return whether a plan's layout has about the work of `tensor`, or more."""
        return c.tp > 1 and c.layout != self.tensor and c.layout in SPLIT


class Errors:
    """The errors of estimates, which plans of the same kind share: their exposed communication, and the activations
    that their schedule keeps, are alike.
    """

    def __init__(self) -> None:
        self.known: dict[Choice, list[tuple[float, float]]] = {}
        # Of plans that differ in their stages only.
        self.same: dict[Choice, tuple[float, float]] = {}
        self.refused: set[Choice] = set()

    def learn(self, e: Estimate, p: Prediction) -> None:
        found = p.step_seconds / e.seconds, p.fullest.peak_bytes / e.peak
        self.known.setdefault(kind_of(e.choice), []).append(found)
        self.same[replace(e.choice, blocks=())] = found

    def refuse(self, choice: Choice, waiting: dict[Choice, Estimate]) -> None:
        """Note a plan that does not hold; remove all of its kind if it is the second, and none has held."""
        kind = kind_of(choice)
        if kind in self.refused and kind not in self.known:
            for other in [c for c in waiting if kind_of(c) == kind]:
                del waiting[other]
        self.refused.add(kind)

    def corrected(self, e: Estimate, whole: Prediction | None = None) -> Estimate:
        """Return the estimate with the seconds and bytes of the whole plan; without it with more of them, or less, as
        those of its kind had.
        """
        if whole is not None:
            return e._replace(seconds=whole.step_seconds, peak=float(whole.fullest.peak_bytes))
        own = self.known.get(kind_of(e.choice), ())
        time, room = self.same.get(replace(e.choice, blocks=())) or (
            (_TRUST + sum(pair[k] for pair in own)) / (_TRUST + len(own)) for k in (0, 1)
        )
        return e._replace(seconds=e.seconds * time, peak=e.peak * room)


@lru_cache(maxsize=2**14)
def kind_of(c: Choice) -> Choice:
    """Return a plan that stands for all of its kind."""
    recompute = c.recompute if c.recompute == "co_shard" else "none"
    return replace(
        c, dp=1, tp=min(c.tp, 2), pp=min(c.pp, 2), rows=1, microbatches=1, chunks=1, recompute=recompute,
        blocks=(), own=(), layout=c.layout if c.layout in (*BY_SEQUENCE, "experts", "dap") else "tensor",
    )  # fmt: skip


def finalists(ranked: Sequence[Ranked], count: int) -> list[Ranked]:
    """Return so many of the plans that are ranked, to measure their steps: the best of each family that is near, then
    the next best.
    """
    firsts = dict[object, Ranked]()
    for plan in _near(ranked):
        firsts.setdefault(_family(plan.choice), plan)
    chosen = [*firsts.values()]
    rest = [plan for plan in ranked if plan not in chosen]
    return sorted([*chosen, *rest][:count], key=ranked.index)


def next_finalist(ranked: Sequence[Estimate | Found], count: int) -> Choice | None:
    """Return the first plan that is to be compiled whole, to know which so many finalists are: those that seem so, and
    then the best of their families, and of as many others: some may be better than they seem. None if there is no such
    plan.
    """
    chosen, known = finalists(ranked, count), Counter(_family(f.choice) for f in ranked if isinstance(f, Found))
    families = {_family(one.choice) for one in finalists(ranked, 2 * count)}
    others = (one for one in _near(ranked) if _family(one.choice) in families and known[_family(one.choice)] < _TRIED)
    return next((one.choice for one in (*chosen, *others) if isinstance(one, Estimate)), None)


def _near(ranked: Sequence[Ranked]) -> list[Ranked]:
    return [plan for plan in ranked if plan.a_row <= _VARIED * ranked[0].a_row]


def _family(c: Choice) -> tuple[object, ...]:
    """Return the decisions that make the errors of predictions alike."""
    return c.schedule if c.pp > 1 else "", c.layout if c.tp > 1 else "", c.zero == 3
