"""The verb `op_order`, and `order` of whole rows: what happens before what. Plans import them from the verbs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, TypeVar, cast

from superscaler.errors import InputError, named
from superscaler.ir.graph import Graph
from superscaler.ir.journal import caller
from superscaler.ir.model import Op
from superscaler.ir.orders import Action, Group, Groups, Order
from superscaler.ir.parts import Flat, Parts
from superscaler.specs.arguments import checked, fits
from superscaler.transform.check_rows import check_rows

T = TypeVar("T")
Target = Op | Parts | Sequence[Op | Parts]
Pair = tuple[Action, Action]
Known = dict[tuple[int, str], Group | None]


def op_order(
    graph: Graph, before: Target | Group | Groups, after: Target | Group | Groups, turns: bool = False
) -> None:
    """Make everything in `before` happen before everything in `after`, on every device: ops, parts, groups of
    `graph.select`, or several of these, `a | b`.

    With `turns` the two alternate instead: a run of `before` without communication inside it, then a run of `after`,
    and so on. One communicates while the other computes.

    Updates (optimizer ops) run at the end of a step, or where they are ordered before other work: after all reads of
    their weight on their device, and after its gradient is complete.
    """
    where = where_of(graph)
    if not isinstance(turns, bool):
        raise InputError(f"op_order at {where}: turns is {named(turns)}; give True or False.")
    pairs = list(product(_groups(before, where), _groups(after, where)))
    members = (name for pair in pairs if turns for group in pair for name, _ in group.members)
    if update := next((name for name in members if not graph.op(name).is_forward), ""):
        raise InputError(f"op_order at {where}: {update} takes no turns, but runs as one; order it before or after.")
    graph.orders += [Order(first, second, where, turns) for first, second in pairs]


@checked
def order(
    graph: Graph,
    rows: Iterable[Iterable[Target | Group | Groups | Action | Pair]],
    stages: Sequence[Sequence[Op]] = (),
    whole: bool = True,
) -> None:
    """Make the items of each row happen one after the other: targets of `op_order`, actions (`2F0`) of `stages`, or
    pairs of actions that take turns.

    Actions that do not exist are left out: the backward of a stage without training, the recomputation of a stage that
    recomputes nothing. Raises InputError for an unknown stage; and, if the rows are to be `whole`, where they have
    forwards and backwards but lack one of a stage: it would run at any place that is left.
    """
    where, known = where_of(graph), Known()
    rows = [_row(row, where) for row in rows]
    if not rows:
        raise InputError(f"order at {where}: no rows; give one for each device.")
    if whole:
        check_rows(graph, [[work for item in row for work in _works(item)] for row in rows], stages, where)
    for row in rows:
        found = (_of_row(graph, item, stages, known, where) for item in row)
        for before, after in pairwise(item for item in found if item is not None):
            op_order(graph, before, after)


def _row(row: Iterable[T], where: str) -> list[T]:
    """Return the items of a row. Raises InputError for another thing, and for an action of other types."""
    if not isinstance(row, Iterable) or hasattr(row, "shape"):
        raise InputError(f"order at {where}: {named(row)} is no row; give a list of actions or ops for each device.")
    found = list(row)
    for work in (work for item in found for work in _works(cast(Any, item))):
        if not fits([work.stage, work.microbatch], list[int]) or not isinstance(work.kind, str):
            raise InputError(
                f"order at {where}: {named(work)} is no action; give two numbers and a kind, as Action(2, 'F', 0)."
            )
    return found


def _works(item: Target | Group | Groups | Action | Pair) -> list[Action]:
    return [work for work in (item if isinstance(item, tuple) else (item,)) if isinstance(work, Action)]


def _of_row(
    graph: Graph,
    item: Target | Group | Groups | Action | Pair,
    stages: Sequence[Sequence[Op]],
    known: Known,
    where: str,
) -> Target | Group | Groups | None:
    works = _works(item)
    if not works:
        return cast(Target | Group | Groups, item)
    groups = Groups(group for work in works if (group := _work(graph, work, stages, known, where)))
    for one, other in pairwise(groups):
        op_order(graph, one, other, turns=True)
    return groups or None


def _work(graph: Graph, work: Action, stages: Sequence[Sequence[Op]], known: Known, where: str) -> Group | None:
    """Return the parts of an action; `known` caches those of all microbatches."""
    key = work.stage, work.kind
    if key not in known:
        known[key] = _in_all(graph, work, stages, where)
    group = known[key]
    return group and replace(group, microbatch=work.microbatch, label=str(work))


def _in_all(graph: Graph, work: Action, stages: Sequence[Sequence[Op]], where: str) -> Group | None:
    """Return the parts of an action in all microbatches."""
    if work.stage not in range(len(stages)):
        raise InputError(f"order at {where}: {work} names stage {work.stage}, but there are {len(stages)}; give all.")
    ops = stages[work.stage]
    if work.kind != "F" and not any(op.name in graph.twins if work.kind == "R" else op.has_mirror for op in ops):
        return None
    return graph.select(ops=ops, kind=work.kind)


def _groups(target: Target | Group | Groups, where: str) -> Groups:
    if isinstance(target, Group | Groups):
        return Groups(()) | target
    items = items_of(target, where)
    members = tuple((i.name, ()) if isinstance(i, Op) else (i.op.name, tuple(i.paths())) for i in items)
    names = list(dict.fromkeys(name for name, _ in members))
    return Groups((Group("F", members, None, ", ".join(names[:3]) + ("..." if len(names) > 3 else "")),))


def items_of(target: Target, where: str) -> list[Op | Parts]:
    items: list[Any] = list(target) if isinstance(target, list | tuple | Flat) else [target]
    if not items:
        raise InputError(f"{where}: a verb is given an empty list of ops; give at least one op.")
    for item in items:
        if not isinstance(item, Op | Parts):
            hint = "; graph.op(NAME) returns an op, and op.module is the module that it is in" * isinstance(item, str)
            raise InputError(f"{where}: a verb takes ops, parts, or a list of them, not {named(item)}{hint}.")
    return items


def where_of(graph: object) -> str:
    """Return the line at which a verb is called. Raises InputError for a graph other than the one given to the plan."""
    where = caller()
    if not isinstance(graph, Graph):
        raise InputError(f"{where}: a verb takes the graph first, not {type(graph).__name__}.")
    return where
