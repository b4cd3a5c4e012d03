"""A better order for the best pipeline of a search."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from superscaler.planner.orders.best import best_order
from superscaler.planner.orders.branch import bound
from superscaler.planner.orders.measured import FORMS, MANY, rows_of
from superscaler.planner.orders.works import Rows, Works, finish, kept_by
from superscaler.planner.space import Choice
from superscaler.planner.whole.programs import Found, Programs
from superscaler.plans.lib.order_text import print_order

# An order is better below so many times the seconds of the best plan.
_BETTER = 0.995
# Plans of another form than the best one are improved, too, below so many times its seconds.
_NEAR = 1.1
# The least seconds of orders of stages of equal FLOPs, in those that the works of other stages say, at least.
_SURE = 0.99


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
        """Return the least seconds of a row of the batch in any order."""
        return bound(self.works, self.works.halved) * min(self.scale, 1.0) / self.choice.batch

    def rows(self, count: int) -> Rows:
        """Return the order of the plan's schedule."""
        return rows_of(replace(self.choice, microbatches=count), self.split)

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


def improve(
    programs: Programs, even: Callable[[Choice], Sequence[float]], allows: Callable[[Choice], bool]
) -> Improved | None:
    """Compile the best pipeline of a search in a better order; None if no order that is found is better by 0.5 %.

    `even`: estimates how much longer stages take with equal FLOPs. `allows`: constraints. Orders that do not
    fit give way to others, as those with no more activations than before.
    """
    limit = _BETTER * programs.found[0].a_row
    tried = list[tuple[float, Choice, _Problem]]()

    def best() -> float:
        return min([limit, *(a_row for a_row, *_ in tried)])

    for problem in _problems(programs, even, best):
        if problem.least < best():
            tried += [(*order, problem) for order in problem.orders()]
    for a_row, choice, problem in sorted(tried, key=lambda order: order[0]):
        plan = _compiled(programs, choice, limit) if a_row < limit and allows(choice) else None
        if plan is not None:
            return Improved(plan, problem.origin, min(problem.least * choice.batch, plan.prediction.step_seconds))
    return None


def _compiled(programs: Programs, choice: Choice, limit: float) -> Found | None:
    """Return a plan that is compiled whole; None, and nothing is changed, if it does not fit or is not better."""
    before, plan = programs.best, programs.compiled(choice)
    if plan is None or (plan.prediction.fits and plan.a_row < limit):
        return plan
    programs.found.remove(plan)
    programs.best = before
    return None


def _problems(
    programs: Programs, even: Callable[[Choice], Sequence[float]], limit: Callable[[], float]
) -> Iterator[_Problem]:
    """Yield the problems of the best plan of each form, if the best plan of all has one or is chimera, whose order is
    not improved, the most promising first; then those of the same plans with stages of equal FLOPs. These are measured
    if the works of the others say that they could take less than `limit` seconds a row.
    """
    best, forms = programs.found[0], dict[str, tuple[Found, Works]]()
    for found in programs.found if best.choice.schedule in (*FORMS, "chimera") else ():
        if found.works and found.a_row < _NEAR * best.a_row and found.prediction.fits:
            forms.setdefault(FORMS[found.choice.schedule], (found, found.works))
    own = [_problem(programs, found, found.choice, works, limit()) for found, works in forms.values()]
    yield from sorted(filter(None, own), key=lambda problem: problem.least)
    others = dict[Choice, Found]()
    # Interleaved stages have equal FLOPs anyway.
    for found, works in ((found, works) for found, works in forms.values() if found.choice.blocks):
        more = even(found.choice)
        is_slow = bool(more) and _SURE * _least(_longer(works, more), found.choice) > limit()
        if not is_slow and {*more} != {0.0}:
            others[replace(found.choice, blocks=())] = found
    for choice, found in others.items():
        measured = programs.works(choice, others)
        if measured and (problem := _problem(programs, found, choice, measured, limit())):
            yield problem


def _problem(programs: Programs, origin: Found, choice: Choice, works: Works, limit: float) -> _Problem | None:
    """Return the problem of a plan's order; None if no order could take less than so many seconds a row."""
    split = replace(works, split=works.halved, rooms=tuple(MANY for _ in works.rooms))
    rows = rows_of(choice, works.halved)
    scale = origin.prediction.step_seconds / finish(split, rows) if choice == origin.choice else 1.0
    if _least(works, choice, scale) > limit:
        return None
    if choice.schedule == "1f1b" and (halves := programs.works(replace(choice, schedule="zb_h1"))):
        seconds = tuple({**half, **whole} for half, whole in zip(halves.seconds, works.seconds, strict=True))
        works = replace(works, seconds=seconds, rooms=tuple(map(min, works.rooms, halves.rooms)))
    is_one = len(works.place) == choice.pp
    kept = tuple(min(choice.pp - d, choice.microbatches) if is_one else kept_by(row) for d, row in enumerate(rows))
    return _Problem(origin, choice, works, split.split, kept, scale)


def _least(works: Works, choice: Choice, scale: float = 1.0) -> float:
    """Return the least seconds of a row of the batch in any order; with unknown halves of backwards, that are alike."""
    if choice.schedule == "1f1b":
        halves = ({**own, "I": own["B"] / 2, "W": own["B"] / 2} for own in works.seconds)
        works = replace(works, seconds=tuple(halves))
    return bound(works, works.halved) * min(scale, 1.0) / choice.batch


def _longer(works: Works, more: Sequence[float]) -> Works:
    """Return works whose stages take so many more seconds for a microbatch."""
    times = (1 + seconds / (own["F"] + own["B"]) for own, seconds in zip(works.seconds, more, strict=True))
    own = zip(works.seconds, times, strict=True)
    return replace(works, seconds=tuple({kind: time * x for kind, x in some.items()} for some, time in own))
