"""Segments: maximal runs of forward ops of one device with no communication between them or their mirrors.

A segment ends once the gradients of its weights are large enough to be sent, so that they travel while others are
computed. All parts of a segment's ops share the same keys (device, microbatch, ordinal), so a segment has one instance
per key. The level of an op is the number of cut edges on the longest path to it. Ops of one segment have one level, so
no path leaves a segment and comes back.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TypeVar

import numpy as np

from superscaler.errors import ScheduleError
from superscaler.errors import some as listed
from superscaler.groups import collect, group_by
from superscaler.ir.graph import Graph
from superscaler.ir.grid import Ints
from superscaler.ir.layout import layout_of
from superscaler.ir.mask import Box
from superscaler.ir.model import Op, width
from superscaler.ir.names import common_module, first
from superscaler.ir.parts import Rows, block_of, rows_under
from superscaler.schedule.dataflow import Dataflow, Key, Labels
from superscaler.schedule.joins import Turn

# Bytes that are worth an all_reduce: far above the latency, and few for the last one, which nothing hides.
SEGMENT_BYTES = 6 * 2**20
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Alias:
    """A tensor that a segment reads from outside: one alias per box and, with a gradient, per addend status.

    `lo`, `hi`: [keys, slots]. `labels`: per key, as in `Produced`; None without a gradient. `shares`: per key, the
    part's place among the parts that share out the addends. `is_weight`: made of weights alone.
    """

    tensor: str
    uses: tuple[tuple[Op, int], ...]
    lo: Ints
    hi: Ints
    labels: Labels | None
    rows: Rows
    keys_at: Ints
    shares: tuple[Turn, ...] | None
    is_weight: bool

    @cached_property
    def boxes(self) -> list[Box]:
        """Return the box of each key."""
        sides = zip(self.lo.tolist(), self.hi.tolist(), strict=True)
        return [tuple(zip(lo, hi, strict=True)) for lo, hi in sides]

    def box(self, key: int) -> Box:
        return self.boxes[key]

    def is_zero(self, key: int) -> bool:
        """Return whether a part reads zeros, because another part of the value reads the tensor."""
        return self.shares is not None and any(at > 0 for at, _ in self.shares[key])


@dataclass(frozen=True, slots=True)
class Output:
    """A tensor that a segment makes and others read. `has_gradient`: its gradient comes back."""

    tensor: str
    op: Op
    slot: int
    has_gradient: bool


@dataclass(eq=False)
class Segment:
    """A run of forward ops. `position`: of its first op in the model (of the original, for recomputed ops). `level`:
    larger than the level of every segment that it reads.
    """

    number: int
    position: int
    level: int
    ops: tuple[Op, ...]
    keys: tuple[Key, ...]
    aliases: tuple[Alias, ...] = ()
    outputs: tuple[Output, ...] = ()
    row_of: dict[str, Ints] = field(default_factory=dict)
    regathered: tuple[int, ...] = ()

    @cached_property
    def at(self) -> Mapping[Key, int]:
        """Return the position of each key."""
        return {key: at for at, key in enumerate(self.keys)}

    @cached_property
    def key_rows(self) -> Ints:
        """Return the keys as rows [keys, 3]."""
        return np.array(self.keys, dtype=np.int64).reshape(-1, 3)

    @property
    def has_mirror(self) -> bool:
        return any(op.has_mirror for op in self.ops)

    @cached_property
    def backwards(self) -> str:
        """Return the kinds of its backward work: B, or I and W if it is split."""
        return "" if not self.has_mirror else "IW" if self.ops[0].split else "B"

    @cached_property
    def gradient_kinds(self) -> Mapping[int, str]:
        """Return, for each alias with a gradient, the kind of work that makes it; in a split backward W for weights,
        else I.
        """
        halves = ("B", "B") if self.backwards == "B" else ("I", "W")
        return {n: halves[a.is_weight] for n, a in enumerate(self.aliases) if a.labels is not None}

    @cached_property
    def first_backward(self) -> str:
        """Return the kind of work that takes the gradients of outputs; in a split backward, the first half that makes
        one.
        """
        return min(self.gradient_kinds.values(), default="")

    @property
    def last_kind(self) -> str:
        """Return the last kind of its work; its inputs are held until then."""
        return (self.backwards or "F")[-1]

    @property
    def is_copy(self) -> bool:
        """Return whether the segment copies tensors; gradients pass it by."""
        return self.ops[0].is_copy

    @property
    def region(self) -> str:
        """Return the region with which the segment is recomputed, '' if it is not."""
        return self.ops[0].region if self.ops[0].origin else ""

    @property
    def module(self) -> str:
        """Return the module path that all its ops share."""
        return common_module(op.module for op in self.ops)


def find_segments(flow: Dataflow, alone: frozenset[str]) -> list[Segment]:
    """Group the forward ops into segments, in order. Ops named in `alone` each get a segment of their own."""
    ops = flow.model.forward_ops
    marks, stretches = _signatures(flow.graph), _stretches(flow)
    local: dict[tuple[str, str], bool] = {}
    levels: dict[str, int] = {}
    for op in ops:
        levels[op.name] = 0
        for k, operand in enumerate(op.inputs):
            if operand.tensor not in flow.producers:
                continue
            producer, _ = flow.producers[operand.tensor]
            free = marks[op.name] == marks[producer.name] and not {op.name, producer.name} & alone
            joins = free and op.from_data == producer.from_data and flow.is_local(op, k)
            joins &= stretches[op.name] == stretches[producer.name]
            # A gradient that another op takes further, as those of blocks of attention, leaves the segment.
            is_graded = op.has_mirror and flow.model.tensors[operand.tensor].requires_grad
            joins &= producer.has_mirror or not is_graded
            local[producer.name, op.name] = joins and local.get((producer.name, op.name), True)
            levels[op.name] = max(levels[op.name], levels[producer.name] + (not joins))
    _sink(ops, local, levels)
    parent = {op.name: op.name for op in ops}
    for (source, reader), joins in local.items():
        if joins and levels[source] == levels[reader]:
            parent[root(parent, reader)] = root(parent, source)
    # Recomputed ops without a backward that make values for nobody do not run.
    run = (op for op in ops if op.has_mirror or any(o.tensor not in flow.unread for o in op.outputs))
    members = group_by(run, lambda op: root(parent, op.name))
    position = {op.name: at for at, op in enumerate(ops)}
    groups = ((group[0].origin or group[0].name, tuple(group)) for group in members.values())
    segments = [
        _segment(flow, number, position[name], levels[group[0].name], group)
        for number, (name, group) in enumerate(groups)
    ]
    _find_outputs(flow, segments)
    return segments


def check_regathers(flow: Dataflow, segments: Sequence[Segment]) -> None:
    """Raise ScheduleError for a `Regather` that changes nothing, because `keep_gathered` keeps what its ops read."""
    regathered = (s for s in segments if flow.graph.policy.gathered_once and s.ops[0].regather)
    for region, some in group_by(regathered, lambda segment: segment.ops[0].regather).items():
        read = {flow.model.origin(alias.tensor) for segment in some for alias in segment.aliases}
        kept = sorted(read & flow.graph.policy.gathered_once)
        if kept and not any(segment.regathered for segment in some):
            entries = flow.graph.journal
            names = {name for segment in some for op in segment.ops for name in (op.name, first(op.name))}
            asked = next(e for e in reversed(entries) if e.detail == "Regather()" and e.op in names)
            keeping = next(e for e in reversed(entries) if e.verb == "keep_gathered")
            raise ScheduleError(
                f"op_trans at {asked.where}: Regather gathers nothing again for the backward of {region}, since "
                f"keep_gathered at {keeping.where} keeps {listed(kept, 3)} until the last reader, so it changes "
                "nothing; leave one of the two out."
            )


def _stretches(flow: Dataflow) -> dict[str, int]:
    """Number the ops, whole blocks alike: the number grows once a device has enough gradients to be worth a sum."""
    found: dict[str, int] = {}
    of_block: dict[str, int] = {}
    counted: set[str] = set()
    number = weight = 0
    for op in flow.model.forward_ops:
        block = block_of(op.module) or op.name
        if block not in of_block and weight >= SEGMENT_BYTES and flow.graph.policy.overlaps:
            number, weight = number + 1, 0
        found[op.name] = of_block.setdefault(block, number)
        for operand in op.inputs:
            tensor = flow.model.tensors[operand.tensor]
            if operand.tensor not in flow.homes or not tensor.requires_grad or operand.tensor in counted:
                continue
            counted.add(operand.tensor)
            layout = layout_of(flow.graph.grids[op.name], operand, True, is_gradient=True)
            if layout is None or layout.shape[1] > 1:
                size = prod(tensor.shape) * width(tensor.trained.dtype)
                weight += size // (1 if layout is None else prod(layout.shape[2]))
    return found


def _sink(ops: Sequence[Op], local: Mapping[tuple[str, str], bool], levels: dict[str, int]) -> None:
    """Raise ops that depend on weights only (casts) to the level of their readers; nothing else determines when they
    run.
    """
    readers = collect(local)
    for op in reversed(ops):
        if op.from_weights and op.name in readers:
            levels[op.name] = min(levels[r] - (not local[op.name, r]) for r in readers[op.name])


def root(parent: dict[T, T], name: T) -> T:
    """Return the representative of a member in a union-find forest."""
    while parent[name] != name:
        parent[name] = parent[parent[name]]
        name = parent[name]
    return name


def _signatures(graph: Graph) -> dict[str, frozenset[Hashable]]:
    """Return, for each op, its orders, region and split: ops with equal signatures may share a segment."""
    found: dict[str, set[Hashable]] = {}
    regions = {op.name: op.region for op in graph.model.ops}
    for op in graph.model.ops:
        found[op.name] = {(op.region, regions.get(op.origin), op.split, op.regather, op.is_copy)}
    # The groups of a stage have equal members in all microbatches, which are looked at once.
    members = dict.fromkeys(group.members for order in graph.orders for group in (order.before, order.after))
    for number, some in enumerate(members):
        for name, paths in some:
            found[name].add((number, tuple(rows_under(graph.grids[name], path) for path in paths)))
    return {name: frozenset(signature) for name, signature in found.items()}


def _segment(flow: Dataflow, number: int, position: int, level: int, ops: tuple[Op, ...]) -> Segment:
    own = flow.rows[ops[0].name]
    keys = tuple(own.keys[row] for row in flow.in_order(own))
    segment = Segment(number, position, level, ops, keys)
    for op in ops:
        at = {key: row for row, key in enumerate(flow.rows[op.name].keys)}
        segment.row_of[op.name] = np.array([at[key] for key in keys], dtype=np.int64)
    segment.aliases = _aliases(flow, segment)
    if ops[0].regather and segment.has_mirror:
        comes = (flow.is_gathered_again(a.tensor) or _is_gathered(flow, a) for a in segment.aliases)
        segment.regathered = tuple(n for n, is_regathered in enumerate(comes) if is_regathered)
    return segment


def _is_gathered(flow: Dataflow, alias: Alias) -> bool:
    """Return whether each part reads more of an activation than any part of its maker holds, all with the whole
    value.
    """
    if alias.tensor not in flow.producers or alias.tensor in flow.unread:
        return False
    produced = flow.produced(*flow.producers[alias.tensor])
    rows = range(len(produced.lo))
    is_whole = len(produced.replicas(rows)) == len(set(map(produced.corners, rows)))
    return is_whole and (produced.hi - produced.lo).prod(axis=1).max() < (alias.hi - alias.lo).prod(axis=1).min()


def _aliases(flow: Dataflow, segment: Segment) -> tuple[Alias, ...]:
    made = {o.tensor for op in segment.ops for o in op.outputs}
    found: dict[Hashable, Alias] = {}
    for op in segment.ops:
        rows, at = flow.rows[op.name], segment.row_of[op.name]
        for k, operand in enumerate(op.inputs):
            if operand.tensor in made:
                continue
            required, tensor = flow.required(op, k), flow.model.tensors[operand.tensor]
            lo, hi = required.lo[at], required.hi[at]
            addends = flow.produced(flow.mirrors[op.name], k).labels if op.has_mirror and tensor.requires_grad else None
            labels = None if addends is None else _normal([addends[row] for row in at])
            tree = None if rows.regular else rows
            shares = tuple(rows.share(row, k) for row in at.tolist()) if rows.is_shared(k) else None
            status = (operand.tensor, lo.tobytes(), hi.tobytes(), labels, tree, shares)
            is_weight = operand.tensor not in flow.producers or flow.producers[operand.tensor][0].from_weights
            own = operand.tensor, (), lo, hi, labels, rows, at, shares, is_weight
            # Another op may list the same parts in another order: rows and keys_at stay those of the first use.
            known = found.setdefault(status, Alias(*own))
            found[status] = replace(known, uses=(*known.uses, (op, k)))
    # Weights with a gradient come last, one after the other.
    return tuple(sorted(found.values(), key=lambda alias: alias.labels is not None and alias.is_weight))


def _normal(labels: list[Hashable]) -> Labels:
    """Rename labels in order of their first appearance, so that equal partitions are equal."""
    number: dict[Hashable, int] = {}
    return tuple(number.setdefault(label, len(number)) for label in labels)


def _find_outputs(flow: Dataflow, segments: list[Segment]) -> None:
    read = {a.tensor for s in segments for a in s.aliases} | set(flow.readers)
    gradient, losses = flow.model.gradient, flow.model.losses
    with_gradient = {gradient(a.tensor) for s in segments for a in s.aliases if a.labels is not None}
    with_gradient |= set(map(gradient, losses))
    for segment in segments:
        found = [
            Output(o.tensor, op, j, op.has_mirror and gradient(o.tensor) in with_gradient)
            for op in segment.ops
            for j, o in enumerate(op.outputs)
        ]
        # The gradient of a recomputed tensor may come from readers of the original one.
        segment.outputs = tuple(o for o in found if o.tensor in read or o.tensor in losses or o.has_gradient)
