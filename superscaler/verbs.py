"""The verbs `op_trans`, `op_assign`, `op_order`, and algorithms of `op_trans`: everything that a plan imports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce
from itertools import pairwise, product
from math import prod
from typing import Any, ParamSpec, TypeVar, cast, overload

import numpy as np

from superscaler.cluster import Cluster, Device, Mesh
from superscaler.errors import InputError, TransformError, brief, named, unknown
from superscaler.ir.graph import Entry, Graph, caller
from superscaler.ir.grid import HOSTS, Ints
from superscaler.ir.model import Op, PTensor
from superscaler.ir.orders import Action, Group, Groups, Order, Row, parse_schedule, timetable
from superscaler.ir.parts import Block, Flat, Parts
from superscaler.specs.arguments import checked, fits
from superscaler.transform.algorithms import Algorithm, Microbatch, Replicate, Shard, Split, Stage, ValueSplit
from superscaler.transform.attention_blocks import AttentionBlocks
from superscaler.transform.check_rows import check_rows
from superscaler.transform.cut import cut
from superscaler.transform.experts import Dispatch
from superscaler.transform.losses import Decompose
from superscaler.transform.place import leaves, spread
from superscaler.transform.recompute import Recompute, Save
from superscaler.transform.rewrite import Insert, Regather, Rewrite, SplitBackward, Stale, rewrite

__all__ = [
    "Action", "Algorithm", "AttentionBlocks", "Block", "Cluster", "Decompose", "Device", "Dispatch", "Graph",
    "Group", "InputError", "Insert", "Mesh", "Microbatch", "Op", "Parts", "Recompute", "Regather", "Replicate",
    "Rewrite", "Row", "Save", "Shard", "Split", "SplitBackward", "Stage", "Stale", "ValueSplit", "op_assign",
    "op_order", "op_trans", "order", "parse_schedule", "place", "sprogram", "timetable", "unknown",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
Target = Op | Parts | Sequence[Op | Parts]
Regions = Sequence[Sequence[Op | Parts]]
Pair = tuple[Action, Action]
Known = dict[tuple[int, str], Group | None]


def sprogram(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a function `f(graph, cluster, **options)` as an sProgram, so that it is found in a file by its name.

    `--plan mine.py:f:tp=2` calls f(graph, cluster, tp=2); options are converted to the types of their defaults. Python
    callers may pass a function without `@sprogram`, too: `ss.compile(graph, f, cluster)`.
    """
    try:
        function.is_sprogram = True  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        raise InputError(
            f"{caller()}: sprogram marks a function of a graph and a cluster, not {named(function)}; put @ss.sprogram "
            "above its def."
        ) from None
    return function


@overload
def op_trans(graph: Graph, target: Op | Parts, algorithm: Algorithm) -> Parts: ...


@overload
def op_trans(graph: Graph, target: Sequence[Op | Parts], algorithm: Algorithm) -> Sequence[Parts]: ...


@overload
def op_trans(graph: Graph, target: Target | Group | Regions, algorithm: Rewrite) -> list[Parts]: ...


def op_trans(graph: Graph, target: Target | Group | Regions, algorithm: Algorithm | Rewrite) -> Parts | Sequence[Parts]:
    """Replace ops or parts by the parts that `algorithm` makes of each, and of their mirrors; or ops by other ops.

        Split("batch", 2):  y[0:8] = f(x[0:8])  ->  y[0:4] = f(x[0:4]); y[4:8] = f(x[4:8])
        Recompute():        keep what f needs for its backward  ->  recompute f before it
        Save():             recompute f, as the model asks  ->  keep what f needs for its backward
        SplitBackward():    d(x), d(w) = d.f(d(y))  ->  I: d(x) = d.f(d(y)); W: d(w) = d.f(kept)
        Insert():           z = g(y)  ->  y.c = identity(y); z = g(y.c)
        Decompose():        y = cross_entropy(x, c)  ->  m = max(x); t, p = ...; y = ..., each cut on classes if need be

    Returns for one op or part its new parts, and for several one flat row of these, in order. An algorithm that makes
    other ops takes whole ops, a group of `graph.select`, or lists of ops, each as in a call of its own; its result is
    the parts of the new ops. Raises TransformError (the paper, 3.2) when a split does not divide, a required factor is
    missing, or a part was already replaced.
    """
    where = _where(graph)
    if isinstance(algorithm, type):
        raise InputError(f"op_trans at {where} needs an algorithm, not its class; write {algorithm.__name__}(...).")
    if isinstance(algorithm, Rewrite):
        is_several = isinstance(target, list | tuple) and all(isinstance(one, list | tuple) for one in target)
        regions = cast(Regions, target) if is_several and target else [cast(Target, target)]
        return rewrite(graph, [_ops(graph, one, where) for one in regions], algorithm, where)
    if not isinstance(algorithm, Algorithm):
        raise InputError(f"op_trans at {where} needs an algorithm such as Split('batch', 2), not {named(algorithm)}.")
    if isinstance(target, Group):
        raise InputError(f"op_trans at {where}: {algorithm} takes ops or parts, not the group {target}.")
    if isinstance(target, Parts | Op):
        return cut(graph, _parts(graph, target), algorithm, where)
    pieces = (piece for item in _items(cast(Target, target), where) for piece in _pieces(graph, item))
    return Flat([cut(graph, piece, algorithm, where) for piece in pieces])


def _parts(graph: Graph, item: Op | Parts) -> Parts:
    return graph.parts(item) if isinstance(item, Op) else item


def _pieces(graph: Graph, item: Op | Parts) -> Sequence[Parts]:
    """Return handles that one call can cut: several for an op with irregular cuts."""
    if isinstance(item, Parts):
        return [item]
    found = leaves(graph, item)
    return [piece for leaf in found for piece in ([leaf] if leaf.prefix or len(found) == 1 else leaf.flat())]


def _ops(graph: Graph, target: Target | Group, where: str) -> list[Op]:
    """Return the ops that a verb takes whole, those of a group included."""
    if isinstance(target, Group):
        return [graph.op(name) for name, _ in target.members]
    items = _items(target, where)
    for parts in (item for item in items if isinstance(item, Parts)):
        parts.check()
        if parts.prefix or parts.cells.size != parts.grid.devices.size:
            raise TransformError(
                f"{where}: this is done to whole ops, not to {parts.cells.size} of the {parts.grid.devices.size} parts "
                f"of {parts.op.name}; give the op."
            )
    return [graph.op(item.name if isinstance(item, Op) else item.op.name) for item in items]


def op_assign(graph: Graph, target: Target, device: Device | int | Sequence[Device | int] | Mesh | Any) -> None:
    """Place parts on a device, on a mesh, or on one device each (an array that broadcasts against their shape).

    On a mesh (`cluster.mesh(dp=2, tp=4)`) the named axes of its cuts determine the place of a part: part 1 of
    `Split("batch", 2, axis="dp")` is at dp 1. Several cuts along one axis count as one, the outer first. Parts are
    replicated along an axis that does not cut them, as `Replicate` does; so these are new parts. Cuts without a name
    are on one device together. Raises InputError unless the cuts along an axis are as many as its devices.

    Backward and optimizer ops follow their forward ops unless they are assigned themselves; on a mesh an uncut update
    is cut as `graph.follow` does. `device.host` is the memory of the CPU beside a device. It can hold copies (`Insert`)
    and updates, with the weights and their optimizer state. "host" puts whole ops, followers included, on the hosts of
    the devices that they have at the end of the plan.
    """
    where = _where(graph)
    if isinstance(device, str):
        _to_hosts(graph, target, device, where)
        return
    devices = _device_ids(where, device.devices if isinstance(device, Mesh) else device)
    if isinstance(device, Mesh) and [*devices] == [*range(len(devices))]:
        graph.mesh = max(graph.mesh, dict(device.sizes), key=lambda sizes: (prod(sizes.values()), len(sizes)))
    for item in _items(target, where):
        if not isinstance(device, Mesh):
            _put(graph, _parts(graph, item), devices, where)
            continue
        if isinstance(item, Op) and not item.is_forward and not graph.grids[item.name].is_touched:
            graph.cut_as_read(item)
        for leaf in leaves(graph, item) if isinstance(item, Op) else [item]:
            parts, numbers = spread(graph, leaf, device, where)
            _put(graph, parts, devices[numbers], where)


def _put(graph: Graph, parts: Parts, devices: Ints, where: str) -> None:
    parts.check()
    try:
        parts.grid.place(parts.cells, devices)
    except ValueError:
        name, count, given = parts.op.name, parts.cells.size, devices.size
        raise InputError(
            f"op_assign at {where}: {name} has 1 part, but {given} devices were given; no op_trans cut it. Give one "
            f"device, Replicate({given}) it, or give a mesh, as cluster.mesh(tp={given}), where copies of what is not "
            "cut are made."
            if count == 1
            else f"op_assign at {where}: {name} has {count} parts, but {given} devices were given; give one device, or "
            "one for each part."
        ) from None
    if parts.op.name in graph.policy.hosted:
        graph.policy = replace(graph.policy, hosted=graph.policy.hosted - {parts.op.name})
    graph.journal.append(Entry("op_assign", parts.op.name, f"{parts.cells.size} parts", where))


def _to_hosts(graph: Graph, target: Target, device: str, where: str) -> None:
    if device != "host":
        raise InputError(f"op_assign at {where} needs devices of the cluster or 'host', not {device!r}.")
    for op in _ops(graph, target, where):
        graph.policy = replace(graph.policy, hosted=graph.policy.hosted | {op.name})
        graph.journal.append(Entry("op_assign", op.name, "to the hosts", where))


@checked
def place(
    graph: Graph,
    parameter: str | PTensor,
    parts: Algorithm | Sequence[Algorithm] | Parts,
    devices: Device | int | Sequence[Device | int] | Mesh | Any,
    ahead: int | None = None,
) -> Parts:
    """Cut and place a weight at rest, with its optimizer state. They rest where the parts of its optimizer op are; a
    frozen weight gets an op for this that changes nothing.

    place(graph, w, Split("mlp", 4), range(4)):  w and its state on every reader  ->  w[0:64] on 0, w[64:128] on 1, ...

    Several algorithms cut one after the other; `devices` are as in `op_assign`. The weight is gathered `ahead` segments
    before its first reader (0: when it is needed; default: 1). A frozen weight that is not placed rests on each of its
    readers' devices, as far as they read it.
    """
    where, name = _where(graph), parameter.name if isinstance(parameter, PTensor) else parameter
    update = _update(graph, graph.model.aliases.get(name, name), where)
    if isinstance(parts, Parts) and parts.op.name != update.name:
        raise InputError(
            f"place at {where}: {name} is at rest in parts of {update.name}, not of {parts.op.name}; give an "
            f"algorithm, or parts that op_trans makes of {update.name}."
        )
    if not isinstance(parts, Parts):
        algorithms = parts if isinstance(parts, list | tuple) else [parts]
        parts = reduce(partial(op_trans, graph), algorithms, graph.parts(update))
    op_assign(graph, parts, devices)
    if ahead is not None:
        if ahead < 0:
            raise InputError(f"place at {where}: ahead={ahead} is no number of segments; give 0, 1, 2, ...")
        weight = update.inputs[0].tensor
        graph.ask("place", update.name, f"ahead={ahead}", ahead={**graph.policy.ahead, weight: int(ahead)})
    return parts


def _update(graph: Graph, name: str, where: str) -> Op:
    """Return the op whose parts hold a parameter at rest."""
    pieces = [piece for piece, (packed, *_) in graph.model.segments.items() if packed == name]
    if pieces:
        raise InputError(f"place at {where}: {name} is packed; place its segments {', '.join(pieces)}.")
    op = graph.resting(name)
    if op is None:
        known = [tensor.name for tensor in graph.model.parameters()]
        raise InputError(f"place at {where}: {unknown('parameter', brief(name), known)}")
    return op


def _items(target: Target, where: str) -> list[Op | Parts]:
    items: list[Any] = list(target) if isinstance(target, list | tuple | Flat) else [target]
    if not items:
        raise InputError(f"{where}: a verb is given an empty list of ops; give at least one op.")
    for item in items:
        if not isinstance(item, Op | Parts):
            hint = "; graph.op(NAME) returns an op, and op.module is the module that it is in" * isinstance(item, str)
            raise InputError(f"{where}: a verb takes ops, parts, or a list of them, not {named(item)}{hint}.")
    return items


def _device_ids(where: str, devices: Any) -> Ints:
    given = np.asarray(devices, dtype=None if isinstance(devices, np.ndarray) else object)
    if np.issubdtype(given.dtype, np.integer) and (not given.size or given.min() >= 0):
        return given.astype(np.int64)
    found: Ints = np.vectorize(partial(_device_id, where), otypes=[np.int64])(given)
    return found


def _device_id(where: str, device: Any) -> int:
    if isinstance(device, Device) and fits(device.id, int) and isinstance(device.is_host, bool):
        return _device_id(where, device.id) + HOSTS * device.is_host
    if not fits(device, int) or not 0 <= device < 2**31:
        raise InputError(
            f"op_assign at {where} needs devices of the cluster or their numbers from 0, not {named(device)}."
        )
    return int(device)


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
    where = _where(graph)
    if not isinstance(turns, bool):
        raise InputError(f"op_order at {where}: turns is {named(turns)}; give True or False.")
    pairs = list(product(_groups(graph, before, where), _groups(graph, after, where)))
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
    where, known = _where(graph), Known()
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


def _groups(graph: Graph, target: Target | Group | Groups, where: str) -> Groups:
    if isinstance(target, Group | Groups):
        return Groups(()) | target
    items = _items(target, where)
    members = tuple((i.name, ()) if isinstance(i, Op) else (i.op.name, tuple(i.paths())) for i in items)
    names = list(dict.fromkeys(name for name, _ in members))
    return Groups((Group("F", members, None, ", ".join(names[:3]) + ("..." if len(names) > 3 else "")),))


def _where(graph: object) -> str:
    """Return the line at which a verb is called. Raises InputError for a graph other than the one given to the plan."""
    where = caller()
    if not isinstance(graph, Graph):
        raise InputError(f"{where}: a verb takes the graph first, not {type(graph).__name__}.")
    return where
