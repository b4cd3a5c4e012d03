"""Data that flows along the edges of the origin graph: who reads whose part, forward and backward.

The work is done once per pair of grids: two edges whose producers, consumers and slots are equal share the answer.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np

from superscaler.ir.graph import Op, Operand
from superscaler.ir.parts import Ints, Rows
from superscaler.ir.spmd import Fold
from superscaler.ir.transformed import Graph
from superscaler.schedule.cover import Held, Wanted, branch, join, project, share_out

Labels = tuple[Hashable, ...]
Key = tuple[int, int, int]
Unit = tuple[str, str, Key]


class Edges:
    """The parts of all ops as rows, and the joins between them.

    Devices that are close, if a `fold` tells, serve each other. `turns`, if not empty, says when each work (kind, op,
    key) can run: readers take replicas that are made in time.
    """

    def __init__(self, graph: Graph, fold: Fold | None = None, turns: Mapping[Unit, int] | None = None) -> None:
        self.graph = graph
        self.fold = fold
        self._turns = turns or {}
        self.model = graph.model
        self.producers = self.model.producers()
        self.uses = self.model.uses()
        self._rows: dict[Hashable, Rows] = {}
        self._faces: dict[Hashable, tuple[Ints, Ints]] = {}
        self._joins: dict[Hashable, list[list[int]]] = {}
        self._labels: dict[Hashable, Labels] = {}
        self._served: dict[str, list[frozenset[Hashable]]] = {}
        self._interned: dict[Labels, Labels] = {}
        self.rows = {op.name: self._expand(op) for op in self.model.ops}

    def _expand(self, op: Op) -> Rows:
        grid = self.graph.grids[op.name]
        key = (grid.signature(), tuple(i.size for i in op.indices))
        if key not in self._rows:
            self._rows[key] = self.graph.rows(op)
        return self._rows[key]

    @cached_property
    def written(self) -> dict[str, list[Op]]:
        """Return for each tensor that buffers are set to the ops that do so."""
        found: dict[str, list[Op]] = {}
        for op in self.model.ops:
            if op.is_write:
                found.setdefault(op.inputs[1].tensor, []).append(op)
        return found

    @cached_property
    def homes(self) -> dict[str, Op]:
        """Return for each trained weight its optimizer op, and for each changed buffer the op that sets it."""
        return {op.inputs[0].tensor: op for op in self.model.ops if not op.is_forward}

    @cached_property
    def home_number(self) -> dict[str, int]:
        """Return for each weight with a home a number below -1, which stands for its optimizer op in places."""
        return {tensor: -2 - n for n, tensor in enumerate(self.homes)}

    def face(self, rows: Rows, operand: Operand) -> tuple[Ints, Ints]:
        extents = self.model.tensors[operand.tensor].extents
        key = (id(rows), operand.slots, extents)
        if key not in self._faces:
            self._faces[key] = project(rows, operand, extents)
        return self._faces[key]

    def wanted(self, rows: Rows, operand: Operand) -> Wanted:
        return Wanted(*self.face(rows, operand), rows.device, rows.microbatch)

    def held(self, rows: Rows, operand: Operand, labels: Labels | None = None, k: int = -1) -> Held:
        """Return what parts hold of an operand: of its value (labels None), or of the gradient of input `k`."""
        # The mirrors of routing parts share out the addends among themselves, so all of them count, in any nesting.
        every = labels is not None and rows.routes
        tree = None if rows.regular or (every and not rows.has_shares) else rows.tree
        marks = tuple(rows.addends()) if labels is None else labels
        where = *self.face(rows, operand), rows.device, rows.microbatch
        return Held(*where, marks, tree, labels is not None, k, every, self.fold)

    def turns(self, kind: str, op: Op) -> Sequence[float]:
        """Return when the parts of an op run (infinite: never), or nothing if no turns are known."""
        rows = self.rows[op.name]
        return [self._turns.get((kind, op.name, key), float("inf")) for key in rows.keys] if self._turns else ()

    def is_replicated(self, name: str) -> bool:
        """Tell whether some parts of an op repeat others."""
        addends = self.rows[name].addends()
        return len(set(addends)) < len(addends) or not self.rows[name].regular

    def maker(self, tensor: str) -> tuple[Op, int]:
        """Return what makes a tensor and as which output: its producer, or the op with which a weight lives."""
        return self.producers[tensor] if tensor in self.producers else (self.homes[tensor], 0)

    def is_free(self, producer: Op, consumer: Op, k: int) -> bool:
        """Tell whether any replica may serve input `k`: not if parts share it out, or if mirrors follow who reads."""
        follows = self.rows[producer.name].routes and producer.has_mirror
        return not follows and not self.rows[consumer.name].is_shared(k)

    def forward(self, consumer: Op, k: int) -> list[list[int]]:
        """Return for each part of `consumer` the parts of what makes its input `k` that this is read from."""
        operand = consumer.inputs[k]
        producer, j = self.maker(operand.tensor)
        made, read = self.rows[producer.name], self.rows[consumer.name]
        shared = read.is_shared(k)
        is_timed = bool(self._turns) and producer.is_forward and self.is_free(producer, consumer, k)
        names = (producer.name, consumer.name) if is_timed else ()
        key = (id(made), producer.outputs[j].slots, id(read), operand.slots, k if shared else -1, names)
        if key not in self._joins:
            held = self.held(made, producer.outputs[j])
            wanted = self.wanted(read, operand)
            if is_timed:
                held = replace(held, turns=self.turns("F", producer))
                wanted = replace(wanted, turns=self.turns("F", consumer))
            self._joins[key] = (
                share_out(held, wanted, [read.share(r, k) for r in range(len(read))]) if shared else join(held, wanted)
            )
        return self._joins[key]

    def backward(self, consumer: Op, k: int) -> list[list[int]]:
        """Return for each (copying) part of the producer the parts of `consumer` whose addends its mirror reads."""
        operand = consumer.inputs[k]
        producer, j = self.producers[operand.tensor]
        made, read, labels = self.rows[producer.name], self.rows[consumer.name], self.labels(consumer, k)
        names = (producer.name, consumer.name) if self._turns else ()
        key = ("B", id(made), producer.outputs[j].slots, id(read), operand.slots, id(labels), names)
        if key not in self._joins:
            held = replace(self.held(read, operand, labels, k), turns=self.turns("B", consumer))
            wanted = replace(self.wanted(made, producer.outputs[j]), turns=self.turns("B", producer))
            self._joins[key] = join(held, wanted)
        return self._joins[key]

    def labels(self, op: Op, k: int) -> Labels:
        """Return a label per part; parts whose mirrors compute the same addend of input `k` have the same label."""
        rows = self.rows[op.name]
        routed = rows.routes and op.has_mirror
        key = (op.name if routed else id(rows), k if rows.has_shares else -1)
        if key not in self._labels:
            labels = tuple(rows.addends(k))
            if routed:
                # Replicas that route are told apart by the addends that they serve.
                apart = range(len(rows)) if not rows.regular else [0] * len(rows)
                labels = tuple(zip(labels, self.served(op), apart, strict=True))
            self._labels[key] = self._interned.setdefault(labels, labels)
        return self._labels[key]

    def gradient_uses(self, tensor: str) -> list[tuple[Op, int]]:
        """Return the uses of a tensor that contribute to its gradient."""
        if not self.model.tensors[tensor].requires_grad:
            return []
        return [(op, k) for op, k in self.uses[tensor] if op.has_mirror]

    def served(self, op: Op) -> list[frozenset[Hashable]]:
        """Return for each part of a routing op the addends (use, label) of its output that its mirror reads.

        Replicas that serve equal addends are copies of each other; where the sets overlap otherwise, each addend goes
        to the replica that its first part reads.
        """
        if op.name in self._served:
            return self._served[op.name]
        served: list[set[Hashable]] = [set() for _ in self.rows[op.name].boxes]
        first: list[set[Hashable]] = [set() for _ in served]
        for j, output in enumerate(op.outputs):
            if output.tensor == self.model.loss:
                for addends in served:
                    addends.add("loss")
                for row in self.loss_rows():
                    first[row].add("loss")
            for n, (consumer, k) in enumerate(self.gradient_uses(output.tensor)):
                seen: set[Hashable] = set()
                labels, read = self.labels(consumer, k), self.whole_reads(consumer, k)
                for row in self._one_tiling(consumer, k):
                    addend = (j, n, labels[row])
                    for source in read[row]:
                        served[source].add(addend)
                        if addend not in seen:
                            first[source].add(addend)
                    seen.add(addend)
        rows = self.rows[op.name]
        if rows.regular and rows.has_shares:
            first = _alike(rows, first)
        elif rows.regular and _equal_or_disjoint(rows.addends(), served):
            first = served
        found = self._served[op.name] = list(map(frozenset, first))
        return found

    def loss_rows(self) -> list[int]:
        """Return the parts of the loss that together are its value: one replica of each addend."""
        op, j = self.producers[self.model.loss]
        return self.whole(self.held(self.rows[op.name], op.outputs[j]))

    @staticmethod
    def whole(held: Held) -> list[int]:
        """Return rows that together are the whole tensor, each element once."""
        nowhere = np.full(1, -1, dtype=np.int64)
        return join(held, Wanted(held.lo.min(0, keepdims=True), held.hi.max(0, keepdims=True), nowhere, nowhere))[0]

    def seeds_gradient(self, row: int) -> bool:
        """Tell whether the mirror of a part of the loss starts from one: all do, but of routing replicas one."""
        op, _ = self.producers[self.model.loss]
        return not self.rows[op.name].routes or "loss" in self.served(op)[row]

    def _one_tiling(self, consumer: Op, k: int) -> list[int]:
        """Return the parts of a consumer that contribute to a gradient: of misaligned replicas one branch."""
        held = self.held(self.rows[consumer.name], consumer.inputs[k], self.labels(consumer, k), k)
        return list(range(len(held))) if held.tree is None else branch(held.tree, held, -1, -1)

    def whole_reads(self, consumer: Op, k: int) -> list[list[int]]:
        """Return what each part of a consumer would read if none shared out its input: whom its gradient concerns."""
        rows, operand = self.rows[consumer.name], consumer.inputs[k]
        if not rows.is_shared(k):
            return self.forward(consumer, k)
        producer, j = self.producers[operand.tensor]
        return join(self.held(self.rows[producer.name], producer.outputs[j]), self.wanted(rows, operand))

    def is_local(self, consumer: Op, k: int) -> bool:
        """Tell whether the edge into input `k` needs nothing, forward and backward: part to part on one device."""
        operand = consumer.inputs[k]
        producer, j = self.producers[operand.tensor]
        made, read = self.rows[producer.name], self.rows[consumer.name]
        if made is not read and sorted(made.keys) != sorted(read.keys):
            return False
        here = dict(zip(made.keys, range(len(made)), strict=True))
        same = [here[key] for key in read.keys]
        if self.forward(consumer, k) != [[row] for row in same]:
            return False
        (mlo, mhi), (rlo, rhi) = self.face(made, producer.outputs[j]), self.face(read, operand)
        if not (np.array_equal(mlo[same], rlo) and np.array_equal(mhi[same], rhi)):
            return False
        if (consumer, k) not in self.gradient_uses(operand.tensor) or not producer.has_mirror:
            return True
        if not made.routes:
            back = self.backward(consumer, k)
            return all(back[m] == [r] for r, m in enumerate(same))
        n, own = self.gradient_uses(operand.tensor).index((consumer, k)), self.labels(consumer, k)
        served = [{s for s in addends if s[:2] == (j, n)} for addends in self.served(producer)]  # type: ignore[index]
        return all(served[m] == {(j, n, own[r])} for r, m in enumerate(same))


def _alike(rows: Rows, first: list[set[Hashable]]) -> list[set[Hashable]]:
    """Return who serves which addends so that the parts of a value, replica by replica, serve the same ones."""
    owner: dict[Hashable, Hashable] = {}
    for box, branch_, addends in zip(rows.boxes, rows.branch.tolist(), first, strict=True):
        for addend in addends:
            owner.setdefault((box, addend), branch_)
    mine: dict[Hashable, set[Hashable]] = {}
    for (box, addend), branch_ in owner.items():  # type: ignore[misc]
        mine.setdefault((box, branch_), set()).add(addend)
    return [mine.get(key, set()) for key in zip(rows.boxes, rows.branch.tolist(), strict=True)]


def _equal_or_disjoint(boxes: list[Hashable], served: list[set[Hashable]]) -> bool:
    owner: dict[Hashable, frozenset[Hashable]] = {}
    for box, addends in zip(boxes, served, strict=True):
        whole = frozenset(addends)
        if any(owner.setdefault((box, a), whole) != whole for a in addends):
            return False
    return True
