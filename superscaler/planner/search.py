"""The search: all plans of the space are estimated, and the best ones are compiled whole and simulated."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from math import inf

from superscaler.cluster import Cluster
from superscaler.errors import InputError
from superscaler.ir.graph import Graph
from superscaler.launch.second import Second
from superscaler.planner import WORK
from superscaler.planner.candidates import FAR, NEAR, Candidates, Errors, finalists, kind_of, next_finalist
from superscaler.planner.constraints import Constraint, left, read, satisfies
from superscaler.planner.estimate import Estimate, Estimator
from superscaler.planner.kinds import has_own
from superscaler.planner.menu import Menu
from superscaler.planner.own.stages import CLOSE, Fits, even
from superscaler.planner.space import Choice, choices, undivided
from superscaler.planner.whole.bounds import ALMOST, least_of
from superscaler.planner.whole.improve import Improved, improve
from superscaler.planner.whole.programs import Found, Programs
from superscaler.simulate.predict import check_system
from superscaler.simulate.system import PLAIN, System
from superscaler.specs.arguments import checked
from superscaler.specs.sizes import duration, size

# The plans that are compiled whole: at most, and at least.
MOST, _LEAST = 25, 3
# The most whole plans by which a bound is raised.
_PROOFS = 4


@dataclass(frozen=True)
class Answer:
    """The result of a search. `plans`: compiled whole, those that fit first, then by the seconds of a row of the batch.
    `bound`: the least seconds of a step of the best plan's batch, by the estimates. `estimates`: of the plans that
    could be the best, corrected by those compiled whole. `slower`: the least seconds of others.
    """

    plans: Sequence[Found]
    bound: float
    estimates: Sequence[Estimate]
    slower: Sequence[Estimate] = ()

    @property
    def best(self) -> Found:
        return self.plans[0]

    def finalists(self, count: int) -> list[Found]:
        """Return so many of the plans that fit, to measure their steps: the best of some families."""
        return finalists([found for found in self.plans if found.prediction.fits], count)

    def ranked(self, seconds: Mapping[str, float]) -> Answer:
        """Return the answer with the plans whose steps were measured first, the shortest before others."""
        return replace(self, plans=sorted(self.plans, key=lambda found: seconds.get(found.spec, inf)))


@checked
def search(
    graph: Graph,
    cluster: Cluster | str,
    memory: int | None = None,
    where: str = "",
    system: System = PLAIN,
    seconds: float = inf,
    note: Callable[[str], None] = lambda line: None,
    batches: Sequence[int] = (),
    is_kept: bool = True,
    measured: int = 0,
) -> Answer:
    """Return the best plans of the space for a graph on a cluster, the best first: `ss.search(graph, "a100:1x8").best`.

    memory         bytes of a device; default: those of the cluster
    where          constraints, as "tp <= 8, no recompute" (docs/search.md)
    system         how steps run, as of `Plan.simulate`
    seconds        after which no further plan is compiled whole
    note           gets a line for each stage of the search
    batches        rows of a step to choose among; default: those that were captured
    is_kept        at Ctrl-C the best so far are returned
    measured       plans whose steps will be measured: those are compiled whole, too (`Answer.finalists`)
    Raises InputError if the speeds of the devices are unknown, for a constraint that no plan satisfies, and if no plan
    of the space holds for the model.
    """
    if not seconds > 0 or (memory is not None and memory < 1) or any(rows < 1 for rows in batches):
        given = f"memory={memory}, seconds={seconds} and batches={list(batches)}"
        raise InputError(f"search has {given}; give numbers above 0, or leave them out.")
    devices = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    start, kind = time.monotonic(), check_system(graph.model, devices, system)
    constraints = read(where, devices.devices_per_server)
    with Second(WORK, None if has_own(graph) else (graph.model, devices, memory, system)) as second:
        menu = Menu(graph, devices, system, second)
        programs = Programs(graph, devices, memory, system, menu.runs, second)
        estimator = Estimator(graph, devices, menu, [one.limit for one in constraints if one.limit])
        candidates = _candidates(estimator, constraints, batches, memory or kind.memory or inf, note)
        is_late = partial(_is_late, start + seconds)
        return _found(candidates, programs, constraints, is_late, note, is_kept, measured)


def _candidates(
    estimator: Estimator,
    constraints: Sequence[Constraint],
    batches: Sequence[int],
    room: float,
    note: Callable[[str], None],
) -> Candidates:
    """Return the plans of the space that satisfy the constraints."""
    menu, per_server = estimator.menu, estimator.cluster.devices_per_server
    layouts = _layouts(menu, estimator.cluster)
    every = _space(estimator, batches or [menu.batch], layouts)
    if menu.coupling:
        note(f"plans have one microbatch: {menu.coupling}")
    space = left(every, constraints, estimator.cuts.sizes, estimator.cuts.ends)
    space = _uncut(menu, space, per_server, constraints) or space
    note(f"{len(space)} plans in the space; measuring blocks")
    return Candidates(estimator, space, layouts[0], per_server, room)


def _found(
    candidates: Candidates,
    programs: Programs,
    constraints: Sequence[Constraint],
    is_late: Callable[[], bool],
    note: Callable[[str], None],
    is_kept: bool,
    measured: int,
) -> Answer:
    """Return the best plans of the candidates; see `search`."""
    found, waiting, ordered, beside = programs.found, dict[Choice, Estimate](), None, list[Estimate]()
    menu, room, errors = candidates.estimator.menu, candidates.room, candidates.errors

    def fits(e: Estimate) -> bool:
        whole = programs.prediction(e.choice)
        could = errors.corrected(e).peak <= room if whole is None else whole.fits
        return could and e.choice not in programs.refused

    try:
        proofs = _proofs(waiting, room, errors, programs, fits)
        while not (found and is_late()):
            if new := candidates.more(_best(found), fits):
                menu.keep()
                waiting |= {e.choice: e for e in new}
                note(f"{len(new)} plans estimated; compiling the best")
                programs.spare = partial(next, candidates.compare(fits), False)
                for whole in _whole_plans(waiting, room, errors, programs):
                    note(_line(whole))
                    if is_late():
                        break
                programs.certify_ahead()
            elif proof := next(proofs, None):
                note(_line(proof))
            else:
                break
        for whole in _measured_plans(waiting, room, errors, programs, measured):
            note(_line(whole))
            if is_late():
                break
        if found and not is_late():
            ordered = improve(programs, partial(even, candidates.estimator), partial(satisfies, constraints))
        if found:
            beside += candidates.beside((ordered.origin if ordered else found[0]).choice, fits)
    except KeyboardInterrupt:
        # It may be in the middle of a message.
        programs.second.end()
        if not found or not is_kept:
            raise
        note("interrupted; the best so far is certified (Ctrl-C again ends without it)")
    finally:
        menu.keep()
    if not found:
        cluster = programs.cluster
        raise InputError(f"no plan of the space holds for this model on {cluster}; superscaler plans lists others.")
    note("certifying the best plan")
    return _answer(programs, candidates, fits, ordered, beside)


def _space(estimator: Estimator, batches: Sequence[int], layouts: Sequence[str]) -> list[Choice]:
    """Return the plans of the space. Raises InputError for batches that devices cannot divide."""
    cluster, count = estimator.cluster, len(estimator.run_of)
    every = [c for rows in batches for c in choices(cluster, rows, count, layouts, bool(estimator.menu.coupling))]
    if not every:
        raise InputError(undivided(cluster, batches, count))
    # A CUDA graph replays no copies to the hosts.
    every = [c for c in every if c.swap == "none" or not estimator.menu.system.cuda_graph]
    return [c for c in every if c.schedule != "3f1b" or estimator.has_passes]


def _uncut(menu: Menu, space: list[Choice], per_server: int, constraints: Sequence[Constraint]) -> list[Choice]:
    """Return the space with whole sequences where the model does not allow to cut them among so many devices, as the
    windows of Swin among eight.
    """
    sizes = {min(c.tp, per_server) for c in space if c.layout == "sequence"}
    plans = [Choice(1, tp, 1, 1, 1, "sequence") for tp in sorted(sizes)]
    uncut = {c.tp for c in plans if not menu.holds(c.use)}
    if not uncut:
        return space

    def whole(c: Choice) -> Choice:
        is_uncut = c.layout == "sequence" and min(c.tp, per_server) in uncut
        return replace(c, layout="tensor") if is_uncut else c

    return [c for c in dict.fromkeys(map(whole, space)) if all(one.allows(c, None) for one in constraints)]


def _answer(
    programs: Programs,
    candidates: Candidates,
    fits: Fits,
    ordered: Improved | None,
    beside: Sequence[Estimate],
) -> Answer:
    """Return the answer, whose best plan has a certificate. `ordered`: the plan with a better order, if any. `beside`:
    estimated for the reasons only: what saves memory is no faster than the plainer plan, which fits.
    """
    programs.certify()
    found, left_out = programs.found, programs.refused.union(e.choice for e in beside)
    estimates = [e for e in candidates.found.values() if e and e.choice not in left_out]
    ordered = ordered if ordered is not None and found[0].choice == ordered.plan.choice else None
    least = [
        candidates.least(fits, found[0].a_row),
        *least_of(estimates, programs, candidates.estimator, candidates.room),
    ]
    if ordered:
        origin = next(e for e in estimates if e.choice == ordered.origin.choice)
        estimates.append(origin._replace(choice=found[0].choice, bound=ordered.bound))
        least.append(ordered.bound / found[0].choice.batch)
    corrected = [candidates.errors.corrected(e, programs.prediction(e.choice)) for e in (*estimates, *beside)]
    return Answer(found, min(least) * found[0].choice.batch, corrected, [*candidates.slower(fits)])


def _is_late(end: float) -> bool:
    return time.monotonic() > end


def _whole_plans(waiting: dict[Choice, Estimate], room: float, errors: Errors, programs: Programs) -> Iterator[Found]:
    """Yield plans that are compiled whole, the best estimates of those that wait first, until none is better than the
    best plan. Each corrects the estimates of its kind; of a kind that does not hold twice, no other is compiled. The
    second process compiles the one that comes next, as it seems.
    """

    def rank(e: Estimate) -> tuple[bool, bool, float]:
        """Those that fit come first, the fastest first; of others one of each kind, by their bytes."""
        is_over = e.peak > ALMOST * room
        return is_over, is_over and kind_of(e.choice) in errors.known, e.peak if is_over else e.a_row

    def is_worth(e: Estimate, count: int) -> bool:
        """Return whether a plan is compiled after so many others."""
        is_over, is_known, _ = rank(e)
        best = _best(programs.found)
        is_hopeless = is_over and (is_known or best < inf or e.peak > FAR * room)
        return count < _LEAST or not (is_hopeless or e.a_row > NEAR * best)

    for count in range(len(programs.found), MOST):
        ranked = sorted(map(errors.corrected, waiting.values()), key=rank)
        if not ranked or not is_worth(ranked[0], count):
            return
        ahead, estimate = partial(_ahead, ranked, is_worth, count), waiting.pop(ranked[0].choice)
        if not is_worth(estimate, _LEAST):
            # It is compiled since there are so many at least: the best is likely to stay.
            programs.certify_ahead(chain([estimate.choice], ahead()))
        whole = programs.compiled(estimate.choice, ahead=ahead)
        if whole is None:
            errors.refuse(estimate.choice, waiting)
        else:
            errors.learn(estimate, whole.prediction)
            yield whole


def _ahead(ranked: Sequence[Estimate], is_worth: Callable[[Estimate, int], bool], count: int) -> Iterator[Choice]:
    """Yield the plans that are compiled after the first of these, as it seems: others of its kind will have its errors.
    `count`: of plans before that; as long as there are none, little is known about the second next one.
    """
    firsts = dict[Choice, Estimate]()
    for e in ranked:
        firsts.setdefault(kind_of(e.choice), e)
    others = islice(firsts.values(), 1, None if count else 2)
    return (e.choice for n, e in enumerate(others, count + 1) if is_worth(e, n))


def _proofs(
    waiting: dict[Choice, Estimate], room: float, errors: Errors, programs: Programs, fits: Fits
) -> Iterator[Found]:
    """Yield plans that are compiled whole since nothing else says that they are not far better than the best: those of
    the lowest bounds, until these are close to the best step, or belong to a plan that fits, whose stages could be
    faster with other blocks.
    """
    for _ in range(min(_PROOFS, MOST - len(programs.found))):
        others = (e for e in waiting.values() if e.peak <= ALMOST * room)
        low = min(others, key=lambda e: e.bound / e.choice.batch, default=None)
        if low is None or low.bound / low.choice.batch >= CLOSE * _best(programs.found):
            return
        if low.choice.blocks and fits(low):
            return
        del waiting[low.choice]
        if whole := programs.compiled(low.choice):
            errors.learn(low, whole.prediction)
            yield whole


def _measured_plans(
    waiting: dict[Choice, Estimate], room: float, errors: Errors, programs: Programs, count: int
) -> Iterator[Found]:
    """Yield plans that are compiled whole since so many are measured: those that are not among the best, either."""
    for _ in range(MOST if count and programs.found and programs.found[0].prediction.fits else 0):
        others = [e for e in map(errors.corrected, waiting.values()) if e.peak <= ALMOST * room]
        some: list[Found | Estimate] = [*(f for f in programs.found if f.prediction.fits), *others]
        choice = next_finalist(sorted(some, key=lambda one: one.a_row), count)
        if choice is None:
            return
        estimate = waiting.pop(choice)
        if whole := programs.compiled(choice):
            errors.learn(estimate, whole.prediction)
            yield whole


def _layouts(menu: Menu, cluster: Cluster) -> list[str]:
    """Return the layouts that the model has: tensor, or sequence if it can be cut along that; of its experts, and of
    its two axes.
    """
    tp = next((n for n in (2, 4, 8) if cluster.devices_per_server % n == 0), 1)
    plans = [Choice(1, tp, 1, 1, 1, name) for name in ("sequence", "dap")]
    menu.look([Choice(1, 1, 1, 1, 1)])
    is_cut, has_axes = (tp > 1 and menu.holds(c.use) for c in plans)
    has_experts = any(op.target == "ss.experts" for op in menu.graph.model.ops)
    return ["sequence" if is_cut else "tensor", *["experts"] * has_experts, *["dap"] * has_axes]


def _best(found: Sequence[Found]) -> float:
    """Return the least seconds of a row of the plans that fit."""
    return min((f.a_row for f in found if f.prediction.fits), default=inf)


def _line(found: Found) -> str:
    """Return a plan that was compiled whole in one line."""
    p = found.prediction
    fits = "" if p.fits else f"; it does not fit: {size(p.fullest.peak_bytes)}"
    return f"{found.spec}: step {duration(p.step_seconds)}{fits}"
