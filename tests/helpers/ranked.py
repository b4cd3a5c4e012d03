"""Tables of measured plans: how much slower than the best is the one that a prediction ranks first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf, isfinite


@dataclass(frozen=True)
class Measured:
    """A plan of a table. `predicted`, `measured`: seconds of a sample; a plan that ran out of memory took `inf`.
    `fits`: it fits, as predicted.
    """

    plan: str
    predicted: float
    measured: float
    fits: bool = True


def first(plans: Sequence[Measured]) -> Measured | None:
    """Return the plan that is predicted to be the fastest of those that are predicted to fit; None if none is."""
    return min((plan for plan in plans if plan.fits), key=lambda plan: plan.predicted, default=None)


def regret(plans: Sequence[Measured]) -> float:
    """Return the seconds of the plan that is ranked first over those of the best; `inf` if it ran out of memory, or if
    none is said to fit.
    """
    chosen = first(plans)
    return chosen.measured / min(plan.measured for plan in plans) if chosen else inf


def tau(plans: Sequence[Measured]) -> float:
    """Return Kendall's tau of the plans that ran; 0 for fewer than two."""
    ran = [plan for plan in plans if isfinite(plan.measured)]
    signs = [(a.predicted - b.predicted) * (a.measured - b.measured) for a, b in combinations(ran, 2)]
    return sum((sign > 0) - (sign < 0) for sign in signs) / max(len(signs), 1)


def summary(table: str, plans: Sequence[Measured]) -> str:
    """Return the line of a table: regret, tau, wrong verdicts on memory, and both plans where the best is not first."""
    refused = sum(isfinite(plan.measured) and not plan.fits for plan in plans)
    admitted = sum(plan.fits and not isfinite(plan.measured) for plan in plans)
    best, chosen = min(plans, key=lambda plan: plan.measured), first(plans)
    wrong = f", {refused} that ran said not to fit" * (refused > 0)
    wrong += f", {admitted} out of memory said to fit" * (admitted > 0)
    wrong += f": {chosen.plan if chosen else 'nothing'} in place of {best.plan}" * (chosen is not best)
    return f"regret {regret(plans):.3f} tau {tau(plans):+.2f} of {len(plans)} plans, {table}{wrong}"
