"""The verbs `op_trans`, `op_assign`, `op_order`, and algorithms of `op_trans`: everything that a plan imports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from math import prod
from typing import Any, ParamSpec, TypeVar, cast, overload

import numpy as np

from superscaler.cluster import Cluster, Device, Mesh
from superscaler.errors import InputError, TransformError, brief, named, unknown
from superscaler.ir.graph import Graph
from superscaler.ir.grid import HOSTS, Axis, Ints
from superscaler.ir.journal import Entry, caller
from superscaler.ir.model import Op, PTensor
from superscaler.ir.orders import Action, Group, Row, parse_schedule, timetable
from superscaler.ir.parts import Block, Flat, Parts
from superscaler.ordering import Target, items_of, op_order, order, where_of
from superscaler.specs.arguments import checked, fits
from superscaler.transform.algorithms import Algorithm, Microbatch, Replicate, Shard, Split, Stage, ValueSplit
from superscaler.transform.attention_blocks import AttentionBlocks
from superscaler.transform.cut import cut
from superscaler.transform.experts import Dispatch
from superscaler.transform.losses import Decompose
from superscaler.transform.place import leaves, spread
from superscaler.transform.recompute import Recompute, Save
from superscaler.transform.rewrite import Insert, Regather, Rewrite, SplitBackward, Stale, rewrite

__all__ = [
    "Action", "Algorithm", "AttentionBlocks", "Axis", "Block", "Cluster", "Decompose", "Device", "Dispatch", "Graph",
    "Group", "InputError", "Insert", "Mesh", "Microbatch", "Op", "Parts", "Recompute", "Regather", "Replicate",
    "Rewrite", "Row", "Save", "Shard", "Split", "SplitBackward", "Stage", "Stale", "ValueSplit", "op_assign",
    "op_order", "op_trans", "order", "parse_schedule", "place", "sprogram", "timetable", "unknown",
]  # fmt: skip

P = ParamSpec("P")
R = TypeVar("R")
Regions = Sequence[Sequence[Op | Parts]]


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
    where = where_of(graph)
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
    pieces = (piece for item in items_of(cast(Target, target), where) for piece in _pieces(graph, item))
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
    items = items_of(target, where)
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
    where = where_of(graph)
    if isinstance(device, str):
        _to_hosts(graph, target, device, where)
        return
    devices = _device_ids(where, device.devices if isinstance(device, Mesh) else device)
    if isinstance(device, Mesh) and [*devices] == [*range(len(devices))]:
        graph.mesh = max(graph.mesh, dict(device.sizes), key=lambda sizes: (prod(sizes.values()), len(sizes)))
    for item in items_of(target, where):
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
    where, name = where_of(graph), parameter.name if isinstance(parameter, PTensor) else parameter
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
