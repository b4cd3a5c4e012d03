"""Data flow along the edges of the graph: the parts that each part reads from, for activations, weights and gradients.

The joins are made once per pair of grids: edges with equal makers, readers and slots share them.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from superscaler.ir.fold import Fold
from superscaler.ir.graph import Graph
from superscaler.ir.grid import Ints
from superscaler.ir.model import Op, Operand
from superscaler.ir.parts import Rows
from superscaler.ir.variants import unread_twins
from superscaler.ops.table import row_of
from superscaler.schedule.joins import Produced, Required, branch, join, project, share_out

Labels = tuple[Hashable, ...]
Key = tuple[int, int, int]
# (op, key): a part.
Unit = tuple[str, Key]
# (op, number): an op as the producer of an output, or as the consumer of an input.
Port = tuple[Op, int]


class Dataflow:
    """The parts of all ops as rows, with those of their mirrors, and the joins between them.

    `makers`: for each tensor, the ports that make it (one per addend of a gradient; for a weight, the op that holds it
    at rest). `readers`: the ports that read gradients and new values. `fold`: close devices serve each other. `turns`:
    the time at which each part can run, if not empty; a reader takes replicas that are made in time.
    """

    def __init__(self, graph: Graph, fold: Fold | None = None, turns: Mapping[Unit, int] | None = None) -> None:
        self.graph, self.model, self.fold = graph, graph.model, fold
        self._turns = turns or {}
        self._rows: dict[Hashable, Rows] = {}
        self._faces: dict[Hashable, tuple[Ints, Ints]] = {}
        self._joins: dict[Hashable, list[list[int]]] = {}
        self._wholes: dict[Hashable, list[int]] = {}
        # By the identity of a join and of the devices of its ends.
        self._here: dict[tuple[int, int, int], bool] = {}
        self._local: dict[Hashable, bool] = {}
        self._labels: dict[Hashable, Labels] = {}
        # The transfers of tensors that are cut alike, with what they join.
        self.moved: dict[Hashable, tuple[Any, Sequence[Any]]] = {}
        self._served: dict[str, list[frozenset[Hashable]]] = {}
        self._interned: dict[Labels, Labels] = {}
        self.rows = {op.name: self._expand(op) for op in self.model.ops}
        self.mirrors = {op.name: self.model.mirror(op) for op in self.model.ops if op.has_mirror}
        self.rows |= {mirror.name: self.rows[name] for name, mirror in self.mirrors.items()}
        self.producers = self.model.producers
        self.extents = {name: tensor.extents for name, tensor in self.model.tensors.items()}
        self.makers: dict[str, list[Port]] = {tensor: [end] for tensor, end in self.producers.items()}
        self.readers: dict[str, list[Port]] = {}
        self._find_ports()

    def _find_ports(self) -> None:
        for op in self.model.ops:
            if not op.is_forward:
                tensor = op.inputs[0].tensor
                self.makers[tensor] = [(op, 0)]
                if op.is_rest:
                    continue
                if not op.is_write:
                    # An optimizer op has its gradient as second input.
                    gradient = Operand(self.model.gradient(tensor), op.inputs[0].slots)
                    op = replace(op, inputs=(op.inputs[0], gradient))
                self.readers.setdefault(op.inputs[1].tensor, []).append((op, 1))
        for tensor, uses in self.model.uses.items():
            if name := self.model.gradient(tensor):
                self.extents[name] = self.extents[tensor]
                self.makers.setdefault(name, []).extend((self.mirrors[op.name], k) for op, k in uses if op.has_mirror)
        for mirror in self.mirrors.values():
            for j, operand in enumerate(mirror.inputs):
                if operand.tensor:
                    self.readers.setdefault(operand.tensor, []).append((mirror, j))

    def _expand(self, op: Op) -> Rows:
        key = self.graph.grids[op.name].signature(), tuple((i.size, i.follows) for i in op.indices)
        if key not in self._rows:
            self._rows[key] = self.graph.rows(op)
        return self._rows[key]

    @cached_property
    def homes(self) -> dict[str, Op]:
        """Return the home op of each weight and changed buffer: its optimizer op, the op that sets it, or the op at
        whose parts a frozen weight rests.
        """
        return {op.inputs[0].tensor: op for op in self.model.ops if not op.is_forward}

    @cached_property
    def home_number(self) -> dict[str, int]:
        """Return a number below -1 for each weight with a home; places use it for the weight's optimizer op."""
        return {tensor: -2 - n for n, tensor in enumerate(self.homes)}

    @cached_property
    def by_home(self) -> dict[int, Op]:
        """Return the optimizer op of each home number."""
        return {self.home_number[tensor]: op for tensor, op in self.homes.items()}

    @cached_property
    def unread(self) -> frozenset[str]:
        """Return the recomputed tensors whose values nobody needs."""
        return unread_twins(self.model)

    @cached_property
    def bases(self) -> dict[str, str]:
        """Return, for each view of a weight or buffer that changes, that weight or buffer. Views of views count."""
        found = {tensor: "" for tensor, op in self.homes.items() if not op.is_rest}
        for op in self.model.forward_ops:
            if row_of(op.target).is_view and (read := op.inputs[0].tensor) in found:
                found |= {output.tensor: found[read] or read for output in op.outputs}
        return {tensor: base for tensor, base in found.items() if base}

    def face(self, op: Op, operand: Operand) -> tuple[Ints, Ints]:
        rows, extents = self.rows[op.name], self.extents[operand.tensor]
        key = (id(rows), operand.slots, extents)
        if key not in self._faces:
            self._faces[key] = project(rows, operand, extents)
        return self._faces[key]

    def required(self, op: Op, k: int) -> Required:
        """Return the boxes that the parts of an op read of its input `k`."""
        rows = self.rows[op.name]
        return Required(*self.face(op, op.inputs[k]), rows.device, rows.microbatch, turns=self.turns(op))

    def produced(self, op: Op, j: int) -> Produced:
        """Return the boxes that the parts of an op hold of its output `j`."""
        # The mirrors of routing parts share out the addends among themselves, so all of them count, in any nesting.
        rows = self.rows[op.name]
        every = op.is_mirror and rows.routes
        tree = None if rows.regular or (every and not rows.has_shares) else rows.tree
        where = *self.face(op, op.outputs[j]), rows.device, rows.microbatch
        summed = op.is_mirror, j if op.is_mirror else -1, every
        return Produced(*where, self.labels(op, j), tree, *summed, self.fold, turns=self.turns(op))

    def turns(self, op: Op) -> Sequence[float]:
        """Return the time at which each part of an op runs (infinite: never); empty if no times are known."""
        return [self._turns.get((op.name, key), float("inf")) for key in self.rows[op.name].keys] if self._turns else ()

    def is_gathered_again(self, tensor: str) -> bool:
        """Return whether a tensor rests between steps, or is a copy of one that does, and is gathered again for ops
        that are recomputed or regathered.
        """
        weight = self.model.origin(tensor) if self.is_copy(tensor) else tensor
        return weight in self.homes and weight not in self.graph.policy.gathered_once

    def is_copy(self, tensor: str) -> bool:
        """Return whether a tensor is a copy of another one."""
        return tensor in self.producers and self.producers[tensor][0].is_copy

    def is_free(self, made: Port, read: Port) -> bool:
        """Return whether any replica may serve an input: not if parts share it out, or if mirrors follow their
        readers.
        """
        (maker, _), (reader, _) = made, read
        if reader.is_mirror:
            return not self.rows[reader.name].routes
        follows = self.rows[maker.name].routes and maker.has_mirror
        return not follows and not self._is_shared(read)

    def _is_shared(self, read: Port) -> bool:
        reader, k = read
        return reader.is_forward and self.rows[reader.name].is_shared(k)

    def join(self, made: Port, read: Port) -> list[list[int]]:
        """Return, for each part of a reader, the parts of a maker that it takes: one of all replicas."""
        (maker, j), (reader, k) = made, read
        rows = self.rows[reader.name]
        if reader.is_mirror and rows.routes:
            return self._routed(made, read)
        if not self._is_shared(read):
            return self._whole(made, read, self.is_free(made, read))
        key = (id(self.rows[maker.name]), maker.outputs[j].slots, id(rows), reader.inputs[k].slots, k)
        if key not in self._joins:
            places = [rows.share(row, k) for row in range(len(rows))]
            self._joins[key] = share_out(self.produced(maker, j), self.required(reader, k), places)
        return self._joins[key]

    def is_here(self, made: Port, read: Port) -> bool:
        """Return whether each part of a reader takes its input from one part, on its own device."""
        joined, (maker, _), (reader, _) = self.join(made, read), made, read
        device, here = self.rows[maker.name].device, self.rows[reader.name].device
        key = id(joined), id(device), id(here)
        if key not in self._here:
            is_one = all(len(sources) == 1 for sources in joined)
            self._here[key] = is_one and np.array_equal(device[[source for (source,) in joined]], here)
        return self._here[key]

    def _whole(self, made: Port, read: Port, is_timed: bool = False) -> list[list[int]]:
        """Return, for each part, the parts that it would take an input from if no part shared it out."""
        (maker, j), (reader, k) = made, read
        is_timed = is_timed and bool(self._turns) and (maker.is_forward or maker.is_mirror)
        names = (maker.name, reader.name) if is_timed else ()
        ends = (id(self.rows[maker.name]), maker.outputs[j].slots, id(self.rows[reader.name]), reader.inputs[k].slots)
        key = (*ends, id(self.labels(maker, j)), maker.is_mirror, names)
        if key not in self._joins:
            produced, required = self.produced(maker, j), self.required(reader, k)
            self._joins[key] = join(produced if is_timed else replace(produced, turns=()), required)
        return self._joins[key]

    def _routed(self, made: Port, read: Port) -> list[list[int]]:
        """Return, for each part of a routing mirror, the parts that hold the addends served by it."""
        (maker, k), (reader, j) = made, read
        rows, labels = self.rows[maker.name], self.labels(maker, k)
        number = self.makers[maker.outputs[k].tensor].index(made)
        found: list[list[int]] = []
        for key, served in zip(self.rows[reader.name].keys, self.served(reader), strict=True):
            chosen: dict[Hashable, int] = {}
            for row in self.in_order(rows):
                label = labels[row]
                if (j, number, label) in served and (label not in chosen or rows.keys[row][:2] == key[:2]):
                    chosen[label] = row
            found.append(list(chosen.values()))
        return found

    def in_order(self, rows: Rows) -> list[int]:
        """Return rows sorted by key. The order is the same at corresponding devices, whatever their numbers."""
        fold, keys = self.fold, rows.keys
        by_key = (lambda row: (fold.places[keys[row][0]], keys[row])) if fold else keys.__getitem__
        return sorted(range(len(rows)), key=by_key)

    def labels(self, op: Op, j: int) -> Labels:
        """Return a label per part; parts that make the same addend of output `j` have equal labels."""
        rows = self.rows[op.name]
        routed = rows.routes and op.is_mirror
        key = (op.name if routed else id(rows), j if rows.has_shares and op.is_mirror else -1)
        if key not in self._labels:
            labels = tuple(rows.addends(j if op.is_mirror else None))
            if routed:
                # Routing replicas differ in the addends that they serve.
                numbers = range(len(rows)) if not rows.regular else [0] * len(rows)
                labels = tuple(zip(labels, self.served(op), numbers, strict=True))
            self._labels[key] = self._interned.setdefault(labels, labels)
        return self._labels[key]

    def served(self, mirror: Op) -> list[frozenset[Hashable]]:
        """Return, for each part of a routing mirror, the addends (input, maker, label) that it reads.

        Replicas that serve equal addends are copies of each other. If the sets overlap otherwise, each addend goes to
        the replica that its first part reads.
        """
        if mirror.name in self._served:
            return self._served[mirror.name]
        op, rows = self.graph.op(mirror.of), self.rows[mirror.name]
        served: list[set[Hashable]] = [set() for _ in rows.boxes]
        first: list[set[Hashable]] = [set() for _ in served]
        for j, gradient in enumerate(mirror.inputs):
            if gradient.tensor in map(self.model.gradient, self.model.losses):
                for addends in served:
                    addends.add("loss")
                for row in self.whole(op, j):
                    first[row].add("loss")
            for n, (user, k) in enumerate(self.makers.get(gradient.tensor, ())):
                seen: set[Hashable] = set()
                labels, read = self.labels(user, k), self._whole((op, j), (self.graph.op(user.of), k))
                produced = self.produced(user, k)
                # One branch of misaligned replicas contributes.
                for row in range(len(produced)) if produced.tree is None else branch(produced.tree, produced, -1, -1):
                    addend = (j, n, labels[row])
                    for source in read[row]:
                        served[source].add(addend)
                        if addend not in seen:
                            first[source].add(addend)
                    seen.add(addend)
        if rows.regular and rows.has_shares:
            first = _equalized(rows, first)
        elif rows.regular and _equal_or_disjoint(rows.addends(), served):
            first = served
        found = self._served[mirror.name] = list(map(frozenset, first))
        return found

    def whole(self, op: Op, j: int) -> list[int]:
        """Return parts of an op that make its whole output `j` together, each element once."""
        output, name = op.outputs[j], op.name if self._turns else ""
        key = id(self.rows[op.name]), output.slots, self.extents[output.tensor], id(self.labels(op, j)), name
        if key not in self._wholes:
            made, nowhere = self.produced(op, j), np.full(1, -1, dtype=np.int64)
            everything = Required(made.lo.min(0, keepdims=True), made.hi.max(0, keepdims=True), nowhere, nowhere)
            self._wholes[key] = join(made, everything)[0]
        return self._wholes[key]

    def seeds_gradient(self, loss: str, row: int) -> bool:
        """Return whether the mirror of a part of a loss starts from one. All parts do, but only one of routing
        replicas.
        """
        ((mirror, _),) = self.readers[self.model.gradient(loss)]
        return not self.rows[mirror.name].routes or "loss" in self.served(mirror)[row]

    def is_local(self, reader: Op, k: int) -> bool:
        """Return whether the edge into input `k` goes part to part on one device, and its mirrors do too."""
        tensor = reader.inputs[k].tensor
        maker, j = self.producers[tensor]
        made, given, taken = self.rows[maker.name], self.mirrors.get(reader.name), self.mirrors.get(maker.name)
        if made.routes or self._turns:
            return self._is_local(maker, j, reader, k)
        back = id(self.labels(given, k)) if given and taken and taken.inputs[j].tensor else 0
        ends = id(made), maker.outputs[j].slots, id(self.rows[reader.name]), reader.inputs[k].slots, k
        key = *ends, self.extents[tensor], id(self.labels(maker, j)), back
        if key not in self._local:
            self._local[key] = self._is_local(maker, j, reader, k)
        return self._local[key]

    def _is_local(self, maker: Op, j: int, reader: Op, k: int) -> bool:
        made, read = self.rows[maker.name], self.rows[reader.name]
        if made is not read and sorted(made.keys) != sorted(read.keys):
            return False
        here = dict(zip(made.keys, range(len(made)), strict=True))
        same = [here[key] for key in read.keys]
        if self.join((maker, j), (reader, k)) != [[row] for row in same]:
            return False
        (mlo, mhi), (rlo, rhi) = self.face(maker, maker.outputs[j]), self.face(reader, reader.inputs[k])
        if not (np.array_equal(mlo[same], rlo) and np.array_equal(mhi[same], rhi)):
            return False
        given, taken = self.mirrors.get(reader.name), self.mirrors.get(maker.name)
        if given is None or taken is None or not taken.inputs[j].tensor:
            return True
        if not made.routes:
            back = self.join((given, k), (taken, j))
            return all(back[m] == [r] for r, m in enumerate(same))
        n, own = self.makers[taken.inputs[j].tensor].index((given, k)), self.labels(given, k)
        served = [{s for s in addends if s[:2] == (j, n)} for addends in self.served(taken)]  # type: ignore[index]
        return all(served[m] == {(j, n, own[r])} for r, m in enumerate(same))


def _equalized(rows: Rows, first: list[set[Hashable]]) -> list[set[Hashable]]:
    """Return the served addends such that all parts of a value, replica by replica, serve the same ones."""
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
