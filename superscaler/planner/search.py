"""The search: all plans of the space are estimated, and the best ones are compiled whole and simulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf

from superscaler.cluster import Cluster
from superscaler.compiler import compile_graph
from superscaler.errors import InputError, PlanError, brief
from superscaler.ir.graph import Graph
from superscaler.planner.constraints import left, read
from superscaler.planner.estimate import Estimate, Estimator
from superscaler.planner.menu import Menu
from superscaler.planner.space import Choice, Use, choices
from superscaler.plans import resolve
from superscaler.simulate.predict import check_speeds, predict
from superscaler.simulate.prediction import Prediction
from superscaler.specs.arguments import checked
from superscaler.specs.sizes import duration, size

# The plans that are compiled whole: at most, and at least.
MOST, _LEAST = 25, 3
# Other plans are compiled whole while an estimate is below so many times the best whole step.
_NEAR = 0.995
# Estimates of bytes that are compiled whole, in those of a device.
_ALMOST = 1.1
# The weight of the whole plans of the same kind beside that of the estimate itself.
_TRUST = 0.25
# The parts of a device's step.
_PARTS = ("compute", "communication", "bubble", "optimizer", "launch", "copies")


@dataclass(frozen=True)
class Found:
    """A plan that was compiled whole: its text, what it decides, and its prediction."""

    spec: str
    choice: Choice
    prediction: Prediction


@dataclass(frozen=True)
class Answer:
    """The result of a search. `plans`: compiled whole, the best first, those that fit before others. `bound`: the least
    seconds of a step in the space, by the estimates. `estimates`: of all plans that the model allows.
    """

    plans: Sequence[Found]
    bound: float
    estimates: Sequence[Estimate]

    @property
    def best(self) -> Found:
        return self.plans[0]


@checked
def search(
    graph: Graph,
    cluster: Cluster | str,
    memory: int | None = None,
    where: str = "",
    torch_compile: bool = False,
    seconds: float = inf,
    note: Callable[[str], None] = lambda line: None,
) -> Answer:
    """Return the best plans of the space for a graph on a cluster, the best first: `ss.search(graph, "a100:1x8").best`.

    memory         bytes of a device; default: those of the cluster
    where          constraints, as "tp <= 8, no recompute" (docs/search.md)
    torch_compile  steps are loaded with it
    seconds        after which no further plan is compiled whole
    note           gets a line for each stage of the search
    Raises InputError if the speeds of the devices are unknown, for a constraint that no plan satisfies, and if no plan
    of the space holds for the model.
    """
    if not seconds > 0 or (memory is not None and memory < 1):
        raise InputError(f"search has memory={memory} and seconds={seconds}; give numbers above 0, or leave them out.")
    devices = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    start, constraints, kind = time.monotonic(), read(where), check_speeds(devices)
    menu, room = Menu(graph, devices, torch_compile), memory or kind.memory or inf
    estimator = Estimator(graph, devices, menu)
    every = list(choices(devices, menu.batch, len(estimator.run_of), _by_sequence(menu, devices)))
    if not every:
        raise InputError(
            f"{devices} has {len(devices.devices)} devices, among which a batch of {menu.batch} cannot be divided; "
            "give another batch."
        )
    space = left(every, constraints)
    note(f"{len(space)} plans in the space; measuring blocks")
    estimates = [found for found in map(estimator.of, space) if found is not None]
    if not estimates:
        raise InputError("no plan of the space holds for this model; superscaler plans lists others.")
    note(f"{len(estimates)} plans estimated; compiling the best")
    found = list[Found]()
    try:
        for whole in _whole_plans(estimates, room, partial(_whole, graph, devices, memory, torch_compile)):
            found.append(whole)
            note(_line(whole))
            if time.monotonic() - start > seconds:
                break
    except KeyboardInterrupt:
        if not found:
            raise
        note("interrupted; these are the best so far")
    if not found:
        raise InputError("none of the best estimates holds for this model; give constraints that leave others.")
    found.sort(key=lambda f: (not f.prediction.fits, f.prediction.step_seconds))
    fitting = [e.bound for e in estimates if e.peak <= _ALMOST * room]
    return Answer(found, min([*fitting, found[0].prediction.step_seconds]), estimates)


def _whole_plans(
    estimates: Sequence[Estimate], room: float, compiled: Callable[[Choice], Found | None]
) -> Iterator[Found]:
    """Yield plans that are compiled whole, the best estimates first, until no estimate is better than the best plan.
    Each corrects the estimates of its kind.
    """
    errors, waiting, best = _Errors(), {e.choice: e for e in estimates}, inf

    def rank(e: Estimate) -> tuple[bool, float]:
        """Those that fit come first, the fastest first; others by their bytes."""
        return e.peak > _ALMOST * room, e.seconds if e.peak <= _ALMOST * room else e.peak

    for count in range(min(MOST, len(estimates))):
        nearest = min(map(errors.corrected, waiting.values()), key=rank)
        is_worse = best < inf and nearest.seconds > _NEAR * best
        if count >= _LEAST and (is_worse or nearest.peak > _ALMOST * room):
            return
        estimate = waiting.pop(nearest.choice)
        if (whole := compiled(estimate.choice)) is not None:
            errors.learn(estimate, whole.prediction)
            best = min(best, whole.prediction.step_seconds) if whole.prediction.fits else best
            yield whole


class _Errors:
    """The errors of estimates, which plans of the same kind share: their exposed communication, and the activations
    that their schedule keeps, are alike.
    """

    def __init__(self) -> None:
        self.known: dict[tuple[int, str, bool], list[tuple[float, float]]] = {}

    def learn(self, e: Estimate, p: Prediction) -> None:
        found = p.step_seconds / e.seconds, p.fullest.peak_bytes / e.peak
        self.known.setdefault(self._kind(e.choice), []).append(found)

    def corrected(self, e: Estimate) -> Estimate:
        """Return the estimate with more seconds and bytes, or less, as those of its kind had."""
        own = self.known.get(self._kind(e.choice), ())
        time, room = ((_TRUST + sum(pair[k] for pair in own)) / (_TRUST + len(own)) for k in (0, 1))
        return e._replace(seconds=e.seconds * time, peak=e.peak * room)

    def _kind(self, c: Choice) -> tuple[int, str, bool]:
        return c.zero, c.schedule, c.pp > 1


def _by_sequence(menu: Menu, cluster: Cluster) -> bool:
    """Return whether the model can be cut along its sequence."""
    tp = next((n for n in (2, 4, 8) if cluster.devices_per_server % n == 0), 1)
    return tp > 1 and menu.costs(Use(tp, True, "none", 1)) is not None


def _line(found: Found) -> str:
    """Return a plan that was compiled whole in one line."""
    p = found.prediction
    fits = "" if p.fits else f"; it does not fit: {size(p.fullest.peak_bytes)}"
    return f"{found.spec}: step {duration(p.step_seconds)}{fits}"


def _whole(graph: Graph, cluster: Cluster, memory: int | None, torch_compile: bool, choice: Choice) -> Found | None:
    """Return a plan that is compiled whole; None if the model does not allow it."""
    try:
        program = compile_graph(graph, resolve(choice.spec), cluster).program
        return Found(choice.spec, choice, predict(program, cluster, memory, torch_compile))
    except PlanError:
        return None


def reasons(answer: Answer) -> Iterator[str]:
    """Yield a line for each decision of the best plan: what the best estimates with other values take."""
    best, capacity = answer.best, answer.best.prediction.capacity or inf
    mine = next(e for e in answer.estimates if e.choice == best.choice)
    ranked = sorted(answer.estimates, key=lambda e: (e.peak > capacity, e.seconds))
    for name in ("pp", "tp", "dp", "rows", "recompute", "zero", "schedule"):
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
    return "does not fit" if e.peak > capacity else f"{e.seconds / mine.seconds - 1:+.0%}"


def why(
    spec: str, graph: Graph, cluster: Cluster, answer: Answer, capacity: int | None, torch_compile: bool = False
) -> str:
    """Return the reason against a plan beside the best one, in words."""
    try:
        p = predict(compile_graph(graph, resolve(spec), cluster).program, cluster, capacity, torch_compile)
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
