"""A better order for the best pipeline of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from superscaler.compiler import compile_graph
from superscaler.errors import PlanError
from superscaler.planner.kinds import of_batch
from superscaler.planner.orders.best import best_order
from superscaler.planner.orders.branch import bound
from superscaler.planner.orders.measured import MANY, measured
from superscaler.planner.orders.works import Rows, Works, finish, kept_by
from superscaler.planner.programs import Found, Programs
from superscaler.planner.space import SCHEDULES, Choice
from superscaler.plans import resolve
from superscaler.plans.lib.order_text import print_order
from superscaler.plans.lib.schedules import RULES
from superscaler.simulate.predict import simulate

# An order is better below so many times the seconds of the best plan.
_BETTER = 0.995
# Plans of another form than the best one are improved, too, below so many times its seconds.
_NEAR = 1.1
# The works of plans are measured in a step of so many microbatches for each stage.
_FEW = 2
# The schedules whose order is improved, by the form of their stages.
_FORMS = {"1f1b": "one", "zb_h1": "one", "zbv": "V", "interleaved": "rounds"}
# A schedule whose order is not, beside which those of others are.
_OTHER = "chimera"


@dataclass(frozen=True)
class Improved:
    """A plan with an order of its own, and the plan whose stages it has. `bound`: the least seconds of a step in any
    order of these stages, by their works.
    """

    plan: Found
    origin: Found
    bound: float


@dataclass(frozen=True)
class _Problem:
    """The works of a plan of the stages that another one has, or of stages of equal FLOPs, and the activations that its
    devices keep. `scale`: the seconds of a step in those of its works. `split`: the stages in halves.
    """

    origin: Found
    choice: Choice
    works: Works
    split: frozenset[int]
    kept: tuple[int, ...]
    scale: float

    @property
    def least(self) -> float:
        return bound(self.works, self.works.halved) * min(self.scale, 1.0)

    def rows(self, count: int) -> Rows:
        """Return the order of the plan's schedule."""
        return _rows(replace(self.choice, microbatches=count), self.split)

    def orders(self) -> Iterator[tuple[float, Choice]]:
        """Yield the best orders that are found with all room, and with that of the plan's own order, each with the
        seconds of a row of the batch.
        """
        for rooms in dict.fromkeys((self.works.rooms, self.kept)):
            works, choice = replace(self.works, rooms=rooms), self.choice
            found = best_order(works, self.kept, sorted(self.works.halved), self.rows)
            if found.rows != self.rows(works.count):
                choice = replace(choice, schedule="ordered", order=print_order(found.rows))
            yield found.seconds * self.scale / choice.batch, choice


def improve(programs: Programs, allows: Callable[[Choice], bool]) -> Improved | None:
    """Compile the best pipeline of a search in a better order; None if no order that is found is better by 0.5 %.

    `allows`: constraints. Orders that do not fit give way to others, as those with no more activations than before.
    """
    limit = _BETTER * programs.found[0].a_row
    best, tried = limit, list[tuple[float, Choice, _Problem]]()
    for problem in sorted(_problems(programs, limit), key=lambda problem: problem.least / problem.choice.batch):
        if problem.least < best * problem.choice.batch:
            tried += [(*order, problem) for order in problem.orders()]
            best = min(best, *(a_row for a_row, *_ in tried))
    for a_row, choice, problem in sorted(tried, key=lambda order: order[0]):
        plan = _compiled(programs, choice, limit) if a_row < limit and allows(choice) else None
        if plan is not None:
            return Improved(plan, problem.origin, min(problem.least, plan.prediction.step_seconds))
    return None


def _compiled(programs: Programs, choice: Choice, limit: float) -> Found | None:
    """Return a plan that is compiled whole; None, and nothing is changed, if it does not fit or is not better."""
    before, plan = programs.best, programs.compiled(choice)
    if plan is None or (plan.prediction.fits and plan.a_row < limit):
        return plan
    programs.found.remove(plan)
    programs.best = before
    return None


def _problems(programs: Programs, limit: float) -> Iterator[_Problem]:
    """Yield the problems of the best plan of each form, if the best plan of all has one, or other pipelines may have a
    better order than it has.
    """
    best, forms = programs.found[0], dict[str, Found]()
    for found in programs.found if best.choice.schedule in (*_FORMS, _OTHER) else ():
        choice, is_near = found.choice, found.a_row < _NEAR * best.a_row
        # Stages with cuts of their own exchange data as no schedule of other stages shows.
        if is_near and found.prediction.fits and choice.pp > 1 and choice.schedule in _FORMS and not choice.own:
            forms.setdefault(_FORMS[choice.schedule], found)
    for origin in forms.values():
        for choice in dict.fromkeys((origin.choice, replace(origin.choice, blocks=()))):
            problem = _problem(programs, origin, choice, limit)
            if problem is not None:
                yield problem


def _problem(programs: Programs, origin: Found, choice: Choice, limit: float) -> _Problem | None:
    """Return the problem of a plan's order; None if no order could take less than so many seconds a row."""
    works = _measured(programs, choice)
    if works is None:
        return None
    works = replace(works, count=choice.microbatches)
    split = replace(works, split=works.halved, rooms=tuple(MANY for _ in works.rooms))
    rows = _rows(choice, works.halved)
    scale = origin.prediction.step_seconds / finish(split, rows) if choice == origin.choice else 1.0
    if choice.schedule == "1f1b":
        alike = [{**some, "I": some["B"] / 2, "W": some["B"] / 2} for some in works.seconds]
        could = bound(replace(works, seconds=tuple(alike)), range(choice.pp)) * min(scale, 1.0)
        if could > limit * choice.batch:
            return None
        if halves := _measured(programs, replace(choice, schedule="zb_h1")):
            seconds = tuple({**half, **whole} for half, whole in zip(halves.seconds, works.seconds, strict=True))
            works = replace(works, seconds=seconds, rooms=tuple(map(min, works.rooms, halves.rooms)))
    is_one = len(works.place) == choice.pp
    kept = tuple(min(choice.pp - d, choice.microbatches) if is_one else kept_by(row) for d, row in enumerate(rows))
    return _Problem(origin, choice, works, split.split, kept, scale)


def _measured(programs: Programs, choice: Choice) -> Works | None:
    """Return the works of a plan in a step of few microbatches; None if it does not hold."""
    few = replace(choice, microbatches=min(choice.microbatches, _FEW * choice.pp))
    graph = of_batch(programs.graph, few.batch)
    try:
        program = compile_graph(graph, resolve(few.spec), programs.cluster, certified=False).program
    except PlanError:
        return None
    found = simulate(program, programs.cluster, programs.memory, programs.system)
    return measured(found, _rows(few, frozenset(range(few.pp * few.chunks))))


def _rows(choice: Choice, split: frozenset[int]) -> Rows:
    """Return the works of a plan in the order of its schedule, with the backwards of some stages in halves."""
    chunks = (choice.chunks,) if choice.schedule == "interleaved" else ()
    table = RULES[SCHEDULES[choice.schedule]](choice.pp, choice.microbatches, *chunks)
    return [
        [(w.stage, _kind(w.kind, w.stage in split)) for w in row if w.kind != "W" or w.stage in split] for row in table
    ]


def _kind(kind: str, is_split: bool) -> str:
    return "B" if kind == "I" and not is_split else kind
