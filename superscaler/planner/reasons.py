"""Reasons for the plan of a search: for its decisions, against other plans, and what holds it back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf

from superscaler.cluster import Cluster
from superscaler.compiler import compile_graph
from superscaler.errors import PlanError, brief
from superscaler.ir.graph import Graph
from superscaler.planner.estimate import Estimate
from superscaler.planner.kinds import of_batch
from superscaler.planner.search import Answer
from superscaler.planner.space import DECISIONS, Choice
from superscaler.plans import resolve
from superscaler.simulate.predict import predict
from superscaler.simulate.prediction import Prediction
from superscaler.simulate.system import PLAIN, System
from superscaler.specs.sizes import duration, size

# The parts of a device's step.
_PARTS = ("compute", "communication", "bubble", "optimizer", "launch", "copies")
# The seconds of a plan without memory for it, in those of the best one, from which on memory holds that back.
_FASTER = 0.95


def words(answer: Answer, has_batches: bool = False) -> str:
    """Return an answer in lines: the plan, its step beside the bound, what holds it back, and its decisions."""
    best = answer.best
    batch = [f"a batch of {best.choice.batch}"] if has_batches else []
    decisions = [f"{name} {text}" for name, text in reasons(answer).items()]
    return "\n  ".join([best.spec, *batch, *lines(answer), *decisions])


def lines(answer: Answer) -> list[str]:
    """Return the step of the best plan beside the bound, and what holds it back."""
    p = answer.best.prediction
    if not p.fits:
        least = f"{size(p.fullest.peak_bytes)} of {size(p.capacity or 0)} on a device"
        return [f"no plan of the space fits; this one needs the least memory: {least}"]
    within, bound = 1 - answer.bound / p.step_seconds, duration(answer.bound)
    return [
        f"step {duration(p.step_seconds)}; nothing in this space is below {bound} ({within:.0%} less at most)",
        f"what holds it back: {held_back(answer)}",
    ]


def held_back(answer: Answer) -> str:
    """Return the cause that the best plan's step is no shorter: the memory that a faster plan lacks, else the largest
    part of its step beside the bound of the model's own products.
    """
    best, p = answer.best, answer.best.prediction
    own, capacity = best.a_row, p.capacity or inf
    faster = [e for e in answer.estimates if e.peak > capacity and e.a_row < _FASTER * own]
    if faster:
        e = min(faster, key=lambda e: e.peak)
        change, needed, has = 1 - e.a_row / own, size(e.peak), size(capacity)
        return f"memory{_stage(answer)}: {e.choice.spec} would take {change:.0%} less, but needs {needed} of {has}"
    seconds, part = max((seconds, part) for part, seconds in _beside_products(p).items())
    return f"{part}, {duration(seconds)} ({seconds / p.step_seconds:.0%}) of the step"


def _stage(answer: Answer) -> str:
    """Return the stage of the fullest device in words; nothing without a pipeline."""
    choice, p = answer.best.choice, answer.best.prediction
    sizes = [own.dp * own.tp for own in map(choice.stage, range(choice.pp))]
    place = bisect_right([*accumulate(sizes)], min(p.fullest.devices))
    stages = [str(stage) for stage in range(choice.stages) if place in choice.places(stage)]
    return f" of stage{'s' if len(stages) > 1 else ''} {' and '.join(stages)}" if choice.pp > 1 else ""


def _beside_products(p: Prediction) -> dict[str, float]:
    """Return the mean seconds of a device that the model's own products do not take, by cause."""
    link = max(p.links, key=lambda name: p.links[name], default="")
    return {
        "compute (kernels below the speed of large products)": p.mean("compute") - p.mean("host") - p.bound,
        "launches (devices wait for the host to start kernels)": p.mean("host") + p.mean("launch"),
        f"links (waits for communication{f', most of it by {link}' if link else ''})": p.mean("communication"),
        "bubble (devices wait for other stages)": p.mean("bubble"),
        "updates of weights": p.mean("optimizer"),
        "copies to and from the hosts": p.mean("copies"),
    }


def reasons(answer: Answer) -> dict[str, str]:
    """Return for each decision of the best plan its value, and what the best estimates with other values take."""
    best, capacity = answer.best, answer.best.prediction.capacity or inf
    mine = next(e for e in answer.estimates if e.choice == best.choice)
    ranked = sorted(answer.estimates, key=lambda e: (e.peak > capacity, e.a_row))
    texts = [(e.choice, _beside(e, mine, capacity)) for e in ranked]
    # Where no plan with a value has an estimate, the least of these says how much longer they take.
    slower = sorted(answer.slower, key=lambda e: e.a_row)
    texts += [(e.choice, f"{max(e.a_row / mine.a_row - 1, 0.0):+.0%} or more") for e in slower]
    return dict(_reasons(texts, mine.choice))


def _reasons(ranked: Sequence[tuple[Choice, str]], mine: Choice) -> Iterator[tuple[str, str]]:
    for name in DECISIONS:
        own, others = mine.said(name), dict[object, str]()
        for choice, text in ranked:
            others.setdefault(choice.said(name), text)
        shown = [f"{value} {text}" for value, text in sorted(others.items(), key=_key) if value != own]
        if shown:
            yield name, f"{own}: {', '.join(shown)}"


def _key(item: tuple[object, str]) -> tuple[int | float, str]:
    """Return the key of a value: numbers in their order, then names."""
    value = item[0]
    return (value, "") if isinstance(value, int) else (inf, str(value))


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
