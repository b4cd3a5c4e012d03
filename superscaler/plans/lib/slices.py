"""Weights that rest in slices, and copies of them nearer to their readers (hpZ of ZeRO++)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from superscaler.errors import divisors
from superscaler.groups import collect
from superscaler.plans.lib.meshes import at_place
from superscaler.plans.lib.shared import layers
from superscaler.verbs import Graph, InputError, Insert, Op, Parts, Replicate, Shard, Split, op_trans


@dataclass(frozen=True)
class Runs:
    """Cut as `Shard(shard)` does, but into `secondary` runs of slices: one on each of so many neighbours."""

    shard: int
    secondary: int
    axis: str

    def cut(self, op: Op, sizes: tuple[int, ...]) -> Any:
        slices = Shard(self.shard, self.axis).cut(op, sizes)
        if slices.index is None or len(set(slices.sizes)) > 1:
            return slices
        run = slices.sizes[0] * (self.shard // self.secondary)
        return replace(slices, sizes=(run,) * self.secondary, at=tuple(range(self.secondary)))


def check_stage(stage: int, shard: int, microbatches: int, keep: int, secondary: int) -> None:
    """Raise InputError for options of ZeRO that no model has. Copies need groups of devices that share all slices."""
    if stage not in (1, 2, 3) or keep < 0 or microbatches < 1:
        raise InputError(
            f"zero:stage={stage},keep={keep},microbatches={microbatches}: choose stage 1, 2 or 3, keep at least 0 "
            "blocks, and at least 1 microbatch."
        )
    if secondary and (stage < 3 or shard % secondary or secondary in (1, shard)):
        raise InputError(
            f"zero:stage={stage},secondary={secondary}: copies in slices need stage 3, and more than 1 and fewer than "
            f"the {shard} devices of all slices, a divisor of {shard}; choose from {divisors(shard)}."
        )


@dataclass
class Slices:
    """Weights at rest in slices over `shard` of `n` devices along an axis, with copies over `secondary` of them (0:
    none).
    """

    graph: Graph
    n: int
    shard: int
    secondary: int
    axis: str
    # The elements of whole matrices on each device of a group.
    _held: list[int] = field(default_factory=list)

    @property
    def groups(self) -> tuple[int, ...]:
        """Return the groups of devices that share all slices; with copies also those inside one that share a copy."""
        return (self.n // self.shard, *((self.shard // self.secondary,) if self.secondary else ()))

    @cached_property
    def _readers(self) -> Mapping[str, Sequence[str]]:
        return readers(self.graph)

    def cut(self, ops: Sequence[Op]) -> None:
        """Divide the batch of ops over the devices."""
        for count in (*self.groups, self.secondary or self.shard):
            op_trans(self.graph, ops, Split("batch", count, axis=self.axis))

    def rest(self, weight: str) -> Parts:
        """Cut a weight, and return its parts. One whose optimizer needs it whole is on the device with the fewest
        elements.
        """
        whole, copies = self.graph.follow(weight), self.n // self.shard
        if whole.op.is_whole:
            self._held = self._held or [0] * self.shard
            owner = self._held.index(min(self._held))
            self._held[owner] += prod(index.size for index in whole.op.indices)
            at = tuple(range(owner, self.n, self.shard))
            return op_trans(self.graph, whole, Replicate(copies, axis=self.axis, at=at))
        parts = op_trans(self.graph, whole, Replicate(copies, axis=self.axis))
        if not self.secondary:
            return op_trans(self.graph, parts, Shard(self.shard, self.axis))
        return self._nearby(parts, self._readers.get(weight, ()))

    def _nearby(self, parts: Parts, ops: Sequence[str]) -> Parts:
        """Cut a weight into slices, and let ops read copies of it, each in slices over `secondary` neighbours.

        The slices of a neighbour's piece of the copy are on the same neighbour of each group. A weight that is not cut
        evenly has no copy.
        """
        graph, axis, count = self.graph, self.axis, self.secondary
        runs = op_trans(graph, parts, Runs(self.shard, count, axis))
        cut = runs.grid.axes[-1]
        if not cut.at:
            return runs
        if ops:
            (copies,) = op_trans(graph, [graph.op(name) for name in ops], Insert(runs.op.inputs[0].tensor))
            pieces = graph.follow(copies.op)
            for group in self.groups:
                pieces = op_trans(graph, pieces, Replicate(group, axis=axis))
            slot = runs.op.inputs[0].slots.index(cut.index)
            op_trans(graph, pieces, Split(_named(copies.op, copies.op.inputs[0].slots[slot]), count, axis=axis))
        at = tuple(range(0, self.shard, count))
        return op_trans(graph, runs, Split(_named(runs.op, cut.index), self.shard // count, axis=axis, at=at))


def readers(graph: Graph) -> Mapping[str, Sequence[str]]:
    """Return the names of the ops of layers that read each weight."""
    weights = graph.model.weights
    read = ((op, dict.fromkeys(o.tensor for o in op.inputs)) for layer in layers(graph) for op in layer.ops)
    return collect((name, op.name) for op, names in read for name in names if name in weights)


def _named(op: Op, index: int | None) -> str:
    """Return an index of an op as its factor, and which of the op's indices with that factor it is."""
    factors = [own.factor for own in op.indices]
    assert index is not None
    return f"{factors[index]}@{factors[:index].count(factors[index])}"


def rest_at(graph: Graph, shard: int, axis: str, place: int | None) -> None:
    """Let the weights that are read first at a place of a pipeline rest in slices over its devices along an axis."""
    slices = Slices(graph, shard, shard, 0, axis)
    slices.cut(at_place(graph, graph.forward_ops, place))
    uses = graph.model.uses
    for weight in graph.updates:
        if at_place(graph, [uses[weight][0][0]], place):
            slices.rest(weight)
