"""A plan at a small shape: the same ops, cuts, orders and exchanges on few elements and places, so that it runs here.

Sizes of factors shrink to the needs of the cuts, the mesh to a few places along each fold axis, the microbatches to a
few. Each op runs on tensors of the new shapes, to find the factors that may shrink.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from math import lcm, prod

import numpy as np
import torch
from torch import Tensor

from superscaler.artifact import initial_values, slots_of
from superscaler.cluster import Cluster
from superscaler.compiler import Compiled
from superscaler.errors import InputError
from superscaler.ir.graph import Graph
from superscaler.ir.grid import HOSTS, Grid, Ints
from superscaler.ir.model import Model, Op
from superscaler.ir.orders import Group, Order
from superscaler.ir.program import Function, Program
from superscaler.ir.variants import resized
from superscaler.ops.inputs import bounds, ignored
from superscaler.runtime.executor import take
from superscaler.schedule.fold import leaves, restrict
from superscaler.simulate.recording import alone, callables

# Places along a fold axis (one more than are compiled, so that one is extrapolated), and microbatches.
PLACES, MICROBATCHES = 3, 4
# More devices than this take too long as threads of one process.
MOST_DEVICES = 128
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Small:
    """A plan at a small shape, the values and batch to run it on, and the shrunk sizes: (before, after) by name."""

    graph: Graph
    cluster: Cluster
    values: Mapping[str, Tensor]
    batch: Mapping[str, Tensor]
    shrunk: Mapping[str, tuple[int, int]]


def shrink(compiled: Compiled, batch: Mapping[str, Tensor] | None) -> Small:
    """Return a plan at a small shape, and a batch of first elements. Raises InputError if an op forbids it."""
    whole = compiled.graph
    graph = whole.copy() if compiled.full_fold is None else restrict(whole, compiled.full_fold, PLACES)
    _drop_microbatches(graph)
    sizes = _sizes(whole, graph)
    model = resized(graph.model, sizes)
    used = sorted({d % HOSTS for op in graph.model.ops for d in graph.grids[op.name].used()})
    if len(used) > MOST_DEVICES:
        raise InputError(
            f"the plan still needs {len(used)} devices at its smallest, but at most {MOST_DEVICES} run in one process; "
            "verify it on fewer devices."
        )
    number = np.zeros(used[-1] + 1, dtype=np.int64)
    number[used] = np.arange(len(used))
    small = graph.copy(model)
    pairs = zip(whole.model.ops, model.ops, strict=True)
    small.grids = {op.name: _refit(graph.grids[op.name], old, op, number) for old, op in pairs}
    shrunk = {name: (x.size, sizes[name]) for name, x in whole.factors.items() if sizes[name] != x.size}
    shrunk |= {"devices": (len(compiled.cluster.devices), len(used))}
    given = {n: v for n, v in whole.captured.values.items() if model.tensors[n].kind != "parameter"}
    values = initial_values(model, {n: _leading(whole.model, model, n, v) for n, v in given.items()})
    few = _batch(whole.model, model, batch or whole.captured.batch)
    return Small(small, Cluster.local(len(used)), values, few, shrunk)


def _drop_microbatches(graph: Graph) -> None:
    """Keep the first few microbatches; orders through the others lead directly between those that stay. Orders of
    single parts, and trees of parts, keep all microbatches.
    """
    is_single = any(paths for order in graph.orders for end in (order.before, order.after) for _, paths in end.members)
    if is_single or any(grid.children for grid in graph.grids.values()):
        return
    limit = MICROBATCHES
    for name, grid in graph.grids.items():
        own = [k for k, axis in enumerate(grid.axes) if axis.is_microbatch]
        for at in own[:1]:
            # Inner microbatch axes keep their size.
            limit = MICROBATCHES * prod(len(grid.axes[k].sizes) for k in own[1:])
            axis = replace(grid.axes[at], sizes=grid.axes[at].sizes[:MICROBATCHES])
            devices = grid.devices.take(range(len(axis.sizes)), at)
            graph.grids[name] = Grid((*grid.axes[:at], axis, *grid.axes[at + 1 :]), devices, {}, grid.replaced_at)
    reduced = {name: min(count, limit) for name, count in graph.policy.reduced.items()}
    graph.policy = replace(graph.policy, reduced=reduced)
    after: dict[Group, dict[Group, str]] = {}
    turns = [o for o in graph.orders if o.turns]
    for order in (o for o in graph.orders if not o.turns):
        after.setdefault(order.before, {})[order.after] = order.where
    graph.orders = [o for o in turns if max(o.before.microbatch or 0, o.after.microbatch or 0) < limit]
    for first in after:
        left, seen = [] if (first.microbatch or 0) >= limit else list(after[first].items()), set[Group]()
        while left:
            second, where = left.pop(0)
            if second in seen:
                continue
            seen.add(second)
            if (second.microbatch or 0) >= limit:
                left += after.get(second, {}).items()
            else:
                graph.orders.append(Order(first, second, where))


def _sizes(whole: Graph, graph: Graph) -> dict[str, int]:
    """Return the new size of each factor: the elements that its cuts need, or its own size if an op needs it whole."""
    parts, must = dict.fromkeys(whole.factors, 1), set[str]()
    pinned = _looked_up(whole.model, whole.captured.values)
    for op in whole.model.ops:
        if whole.grids[op.name].children and not list(leaves(whole.grids[op.name])):
            pinned |= {i.factor: f"only some parts of {op.name} are cut" for i in op.indices}
        for (outer, grid), (_, before) in zip(leaves(graph.grids[op.name]), leaves(whole.grids[op.name]), strict=True):
            for i, index in enumerate(op.indices):
                axes = [a for a in (*outer, *grid.axes) if a.index == i]
                if any(len(set(a.sizes)) > 1 for a in axes):
                    pinned.setdefault(index.factor, f"{op.name} is cut unevenly there")
                    continue
                parts[index.factor] = lcm(parts[index.factor], prod(len(a.sizes) for a in axes))
                if any(a.index == i and a.sizes != b.sizes for a, b in zip(grid.axes, before.axes, strict=True)):
                    must.add(index.factor)
    derived: dict[str, int] = {}
    while True:
        sizes = {}
        for n, (name, factor) in enumerate(whole.factors.items()):
            # Distinct leaf sizes, so that swapped factors are found.
            leaf = next((k for k in (2 + n % 2, 2) if k * parts[name] <= factor.size), 1)
            sizes[name] = factor.size if name in pinned else derived.get(name, leaf * parts[name])
        for name in must & set(pinned):
            raise InputError(
                f"the plan cannot be verified at a small shape: factor {name} of {whole.factors[name].size} is cut, "
                f"but cannot shrink, since {pinned[name]}."
            )
        # The size of a result may not scale with the operands, as that of a pad.
        free = {name for name in sizes if parts[name] == 1 and name not in pinned and name not in derived}
        new, failing = _probe(whole.model, sizes, free)
        derived |= new
        pinned |= {} if new else failing
        if not new and not failing:
            return sizes


def _looked_up(model: Model, values: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the factors that a model selects from by its own numbers, with the reason: these must not shrink.

    Safe are numbers of inputs (drawn below a bound), zeros and ones, and positions in a tensor with that factor.
    """
    safe, producers = set(bounds(model)), model.producers
    safe |= {n for n, v in values.items() if not v.is_floating_point() and v.numel() and v.min() >= 0 and v.max() < 2}
    found: dict[str, str] = {}
    for op in model.ops:
        numbers = [o for o in op.inputs if "int" in model.tensors[o.tensor].dtype]
        if not op.is_forward or not numbers or len(numbers) == len(op.inputs):
            continue
        left, sources, within = [o.tensor for o in numbers], set[str](), set[str]()
        while left:
            name = left.pop()
            made = producers[name][0] if name in producers else None
            if made is None:
                sources.add(name)
            elif made.from_data:
                left += [o.tensor for o in made.inputs]
            else:
                within |= {i.factor for i in made.indices}
        if sources <= safe and not within:
            continue
        own = {f for o in numbers for f in model.tensors[o.tensor].factors}
        for o in op.inputs:
            for f, i in zip(model.tensors[o.tensor].factors, o.slots, strict=True):
                if f not in own | within and (i is None or op.indices[i].mark != "spatial"):
                    found.setdefault(f, f"{op.name} looks it up by numbers that the model makes")
    return found


def _probe(model: Model, sizes: Mapping[str, int], free: Set[str]) -> tuple[dict[str, int], dict[str, str]]:
    """Run each op on tensors of the new sizes, up to the first that gives other shapes.

    Returns its sizes for free factors that no operand has, or the factors that must keep their size for it, with the
    reason.
    """
    for op, shapes in _run(model, model.ops, sizes)[:1]:
        own = None if shapes is None else _own(model, op, sizes, shapes)
        if own is not None and free >= own.keys() and all(own.values()):
            return own, {}
        touched = (f for o in (*op.inputs, *op.outputs) for f in model.tensors[o.tensor].factors)
        own_size = {f: model.factors[f].size for f in (*touched, *(i.factor for i in op.indices))}
        kept = {f: n for f, n in own_size.items() if sizes[f] != n}
        for f in list(kept):
            if not _run(model, [op], {**sizes, **kept, f: sizes[f]}):
                kept.pop(f)
        return {}, dict.fromkeys(kept, f"{op.name} ({op.target}) cannot run smaller")
    return {}, {}


def _own(model: Model, op: Op, sizes: Mapping[str, int], shapes: Sequence[Shape]) -> dict[str, int] | None:
    """Return the factors that an op resizes: dims that no operand has. None if other dims differ."""
    given = {f for o in op.inputs for f in model.tensors[o.tensor].factors}
    found: dict[str, int] = {}
    for o, shape in zip(op.outputs, shapes, strict=True):
        slots = model.tensors[o.tensor].slots
        if len(slots) != len(shape):
            return None
        for dim, n in zip(slots, shape, strict=True):
            if n != prod(sizes[f] for f in dim):
                if len(dim) != 1 or dim[0] in given:
                    return None
                found[dim[0]] = n
    return found


def _run(model: Model, ops: Sequence[Op], sizes: Mapping[str, int]) -> list[tuple[Op, list[Shape] | None]]:
    """Return the ops, with their shapes, that go wrong at new sizes; None: one that fails there, not at its own."""
    small = resized(model, sizes)
    own = {op.name: op for op in small.ops}
    chosen = [op for op in ops if op.is_forward]
    functions = [alone(own[op.name]) for op in chosen]
    found: list[tuple[Op, list[Shape] | None]] = []
    runs = callables(Program(small, tuple(functions), ()), "meta")
    for op, function, run in zip(chosen, functions, runs, strict=True):
        shapes = _shapes(small, function, run)
        if shapes == [small.tensors[o.tensor].shape for o in op.outputs]:
            continue
        if shapes is None and sizes and any(s is None for _, s in _run(model, [op], {})):
            continue
        found.append((op, shapes))
    return found


def _shapes(model: Model, function: Function, run: Callable[..., Sequence[Tensor]]) -> list[Shape] | None:
    """Return the shapes of a function's results on tensors without data, None if it fails."""
    tensors = (model.tensors[name] for name in function.inputs)
    given = [torch.empty(t.shape, dtype=getattr(torch, t.dtype), device="meta") for t in tensors]
    try:
        return [tuple(x.shape) for x in run(*given)]
    except Exception:
        # An operator of the user may raise any exception at sizes that it does not take.
        return None


def _refit(grid: Grid, old: Op, op: Op, number: Ints, inner: Sequence[int] = ()) -> Grid:
    """Return a grid whose cuts fit the new sizes of their indices, on renumbered devices."""
    left, axes = list(inner or (i.size for i in op.indices)), []
    for axis in grid.axes:
        at = axis.index
        if at is not None and op.indices[at].size != old.indices[at].size:
            left[at] //= len(axis.sizes)
            axis = replace(axis, sizes=(left[at],) * len(axis.sizes))
        axes.append(axis)
    children = {cell: _refit(child, old, op, number, left) for cell, child in grid.children.items()}
    host = np.where(grid.devices >= HOSTS, HOSTS, 0)
    return Grid(tuple(axes), number[grid.devices - host] + host, children, grid.replaced_at)


def _leading(whole: Model, small: Model, name: str, value: Tensor) -> Tensor:
    """Return the first elements of a tensor along each slot."""
    return take(value, slots_of(whole, name), tuple((0, size) for size in small.tensors[name].extents))


def _batch(whole: Model, small: Model, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch for the small model: first elements of the example, or drawn numbers for one on meta."""
    limits, uncounted, found = bounds(small), ignored(small), {}
    generator = torch.Generator().manual_seed(0)
    for name, value in batch.items():
        tensor = small.tensors.get(name)
        if tensor is None:
            continue
        limit = limits.get(name)
        if not value.is_meta:
            value = _leading(whole, small, name, value)
            found[name] = _within(value, limit, uncounted.get(name, -1)) if limit else value
        elif value.is_floating_point():
            found[name] = torch.randn(tensor.shape, generator=generator, dtype=value.dtype)
        else:
            found[name] = torch.randint(0, limit or 2, tensor.shape, generator=generator).to(value.dtype)
    return found


def _within(value: Tensor, limit: int, uncounted: int) -> Tensor:
    """Return numbers below a limit, and labels that do not count in every third place: a mean of none is nan."""
    third = (torch.arange(value.numel(), device=value.device) % 3 == 2).view(value.shape)
    is_kept, other = torch.where(value == uncounted, third, value < 0), value % limit
    return torch.where(is_kept, value, torch.where(other == uncounted, (other + 1) % limit, other))
