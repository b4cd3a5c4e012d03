"""Reasons for the plan of a search: for its decisions, and against other plans."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from superscaler.cluster import Cluster
from superscaler.compiler import compile_graph
from superscaler.errors import PlanError, brief
from superscaler.ir.graph import Graph
from superscaler.planner.estimate import Estimate
from superscaler.planner.kinds import of_batch
from superscaler.planner.search import Answer
from superscaler.plans import resolve
from superscaler.simulate.predict import predict
from superscaler.simulate.system import PLAIN, System
from superscaler.specs.sizes import duration, size

# The parts of a device's step.
_PARTS = ("compute", "communication", "bubble", "optimizer", "launch", "copies")


def reasons(answer: Answer) -> Iterator[str]:
    """Yield a line for each decision of the best plan: what the best estimates with other values take."""
    best, capacity = answer.best, answer.best.prediction.capacity or inf
    mine = next(e for e in answer.estimates if e.choice == best.choice)
    ranked = sorted(answer.estimates, key=lambda e: (e.peak > capacity, e.a_row))
    for name in ("batch", "pp", "tp", "dp", "rows", "layout", "recompute", "zero", "schedule", "loss", "swap"):
        own, others = getattr(best.choice, name), dict[object, Estimate]()
        for e in ranked:
            others.setdefault(getattr(e.choice, name), e)
        words = [
            f"{value} {_beside(e, mine, capacity)}" for value, e in sorted(others.items(), key=str) if value != own
        ]
        if words:
            yield f"{name} {own}: {', '.join(words)}"


def _beside(e: Estimate, mine: Estimate, capacity: float) -> str:
    """Return an estimate beside that of the best plan, in words."""
    return "does not fit" if e.peak > capacity else f"{e.a_row / mine.a_row - 1:+.0%}"


def why(spec: str, graph: Graph, cluster: Cluster, answer: Answer, capacity: int | None, system: System = PLAIN) -> str:
    """Return the reason against a plan beside the best one, in words."""
    try:
        own = of_batch(graph, answer.best.choice.batch)
        p = predict(compile_graph(own, resolve(spec), cluster).program, cluster, capacity, system)
    except PlanError as error:
        return f"it does not hold: {brief(error)}"
    if not p.fits:
        return f"it does not fit: {size(p.fullest.peak_bytes)} of {size(p.capacity or 0)} on a device"
    best = answer.best.prediction
    longer = {part: p.mean(part) - best.mean(part) for part in _PARTS}
    part = max(longer, key=lambda name: longer[name])
    change = p.step_seconds / best.step_seconds - 1
    cause = f", most of it {part}: {duration(longer[part])} more a device" if change > 0 else ""
    return f"its step takes {duration(p.step_seconds)}, {change:+.1%}{cause}"
