"""Data flow along the edges of the graph: the parts that each part reads from, for activations, weights and gradients.

Ops that are cut and placed alike share their rows, operands that are cut alike their ends, and equal ends an edge.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from superscaler.ir.fold import Fold
from superscaler.ir.graph import Graph
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


@dataclass(frozen=True, eq=False)
class Edge:
    """What each row of a reader takes: `sources`, rows of a maker. It is compared by identity: edges between equal ends
    are one.
    """

    produced: Produced
    required: Required
    sources: list[list[int]]

    @cached_property
    def is_here(self) -> bool:
        """Return whether each row takes one row, on its own device."""
        is_one = all(len(sources) == 1 for sources in self.sources)
        return is_one and np.array_equal(self.produced.device[[s for (s,) in self.sources]], self.required.device)


class Dataflow:
    """The parts of all ops as rows, with those of their mirrors, and the edges between them.

    `makers`: for each tensor, the ports that make it (one per addend of a gradient; for a weight, the op that holds it
    at rest). `readers`: the ports that read gradients and new values. `fold`: close devices serve each other. `turns`:
    the time at which each part can run, if not empty; a reader takes replicas that are made in time.
    """

    def __init__(self, graph: Graph, fold: Fold | None = None, turns: Mapping[Unit, int] | None = None) -> None:
        self.graph, self.model, self.fold = graph, graph.model, fold
        self._turns = turns or {}
        # What layers that are cut alike share: parts, ends of edges, edges, and transfers.
        self._rows: dict[Hashable, Rows] = {}
        self._produced: dict[Hashable, Produced] = {}
        self._required: dict[Hashable, Required] = {}
        self._edges: dict[Hashable, Edge] = {}
        self._local: dict[tuple[Edge, Edge | None], bool] = {}
        self.moved: dict[Hashable, Sequence[Any]] = {}
        self._served: dict[str, list[frozenset[Hashable]]] = {}
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

    def required(self, op: Op, k: int) -> Required:
        """Return the boxes that the parts of an op read of its input `k`, without their turns."""
        rows, operand = self.rows[op.name], op.inputs[k]
        key = rows, operand.slots, self.extents[operand.tensor]
        if key not in self._required:
            self._required[key] = Required(*project(rows, operand, key[2]), rows.device, rows.microbatch)
        return self._required[key]

    def produced(self, op: Op, j: int) -> Produced:
        """Return the boxes that the parts of an op hold of its output `j`, without their turns. Parts that make the
        same addend have equal labels.
        """
        rows, operand = self.rows[op.name], op.outputs[j]
        # The mirrors of routing parts share out the addends among themselves, so all of them count, in any nesting.
        every, number = op.is_mirror and rows.routes, j if op.is_mirror and rows.has_shares else -1
        alike = rows, op.is_mirror, number, operand.slots, self.extents[operand.tensor]
        key = (*alike, op.name * every)
        if key not in self._produced:
            labels = rows.addends(j if op.is_mirror else None)
            tree = None if rows.regular or (every and not rows.has_shares) else rows.tree
            if every:
                # Routing replicas differ in the addends that they serve.
                numbers = range(len(rows)) if not rows.regular else [0] * len(rows)
                labels = tuple(zip(labels, self.served(op), numbers, strict=True))
            where = *project(rows, operand, self.extents[operand.tensor]), rows.device, rows.microbatch
            made = Produced(*where, labels, tree, op.is_mirror, number, every, self.fold)
            self._produced[key] = self._produced.setdefault((*alike, labels), made) if every else made
        return self._produced[key]

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

    def edge(self, made: Port, read: Port) -> Edge:
        """Return the edge from a maker to a reader, whose parts take each value from one of all replicas."""
        (maker, _), (reader, k) = made, read
        if reader.is_mirror and self.rows[reader.name].routes:
            return Edge(self.produced(*made), self.required(*read), self._routed(made, read))
        is_timed = bool(self._turns) and self.is_free(made, read) and (maker.is_forward or maker.is_mirror)
        return self._edge(made, read, k if self._is_shared(read) else -1, is_timed)

    def _edge(self, made: Port, read: Port, shared: int = -1, is_timed: bool = False) -> Edge:
        """Return the edge to a reader whose parts share out the addends of input `shared`, if it is not -1."""
        (maker, _), (reader, _) = made, read
        produced, required = self.produced(*made), self.required(*read)
        key = produced, required, shared, (maker.name, reader.name) if is_timed else ()
        if key not in self._edges:
            if is_timed:
                produced, required = (
                    replace(produced, turns=self.turns(maker)),
                    replace(required, turns=self.turns(reader)),
                )
            rows = self.rows[reader.name]
            places = [rows.share(row, shared) for row in range(len(rows))] if shared >= 0 else []
            sources = share_out(produced, required, places) if shared >= 0 else join(produced, required)
            self._edges[key] = Edge(produced, required, sources)
        return self._edges[key]

    def _routed(self, made: Port, read: Port) -> list[list[int]]:
        """Return, for each part of a routing mirror, the parts that hold the addends served by it."""
        (maker, k), (reader, j) = made, read
        rows, labels = self.rows[maker.name], self.produced(maker, k).labels
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
                for row in self.produced(op, j).whole:
                    first[row].add("loss")
            for n, (user, k) in enumerate(self.makers.get(gradient.tensor, ())):
                seen: set[Hashable] = set()
                produced, read = self.produced(user, k), self._edge((op, j), (self.graph.op(user.of), k)).sources
                # One branch of misaligned replicas contributes.
                for row in range(len(produced)) if produced.tree is None else branch(produced.tree, produced, -1, -1):
                    addend = (j, n, produced.labels[row])
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

    def seeds_gradient(self, loss: str, row: int) -> bool:
        """Return whether the mirror of a part of a loss starts from one. All parts do, but only one of routing
        replicas.
        """
        ((mirror, _),) = self.readers[self.model.gradient(loss)]
        return not self.rows[mirror.name].routes or "loss" in self.served(mirror)[row]

    def is_local(self, reader: Op, k: int) -> bool:
        """Return whether the edge into input `k` goes part to part on one device, and its mirrors do too."""
        maker, j = self.producers[reader.inputs[k].tensor]
        given, taken, edge = (
            self.mirrors.get(reader.name),
            self.mirrors.get(maker.name),
            self.edge((maker, j), (reader, k)),
        )
        if given is None or taken is None or not taken.inputs[j].tensor:
            return self._is_local(maker, reader, edge)
        if not self.rows[maker.name].routes:
            return self._is_local(maker, reader, edge, self.edge((given, k), (taken, j)))
        n, own = self.makers[taken.inputs[j].tensor].index((given, k)), self.produced(given, k).labels
        served = [{s for s in addends if s[:2] == (j, n)} for addends in self.served(taken)]  # type: ignore[index]
        is_served = (served[m] == {(j, n, own[r])} for r, (m, *_) in enumerate(edge.sources))
        return self._is_local(maker, reader, edge) and all(is_served)

    def _is_local(self, maker: Op, reader: Op, edge: Edge, back: Edge | None = None) -> bool:
        """Return whether an edge, and the one of its mirrors, go part to part on one device."""
        if (edge, back) not in self._local:
            made, read = self.rows[maker.name], self.rows[reader.name]
            here = {key: row for row, key in enumerate(made.keys)}
            same = [here.get(key, -1) for key in read.keys]
            is_local = len(made) == len(read) and edge.sources == [[row] for row in same]
            for mine, other in ((edge.produced.lo, edge.required.lo), (edge.produced.hi, edge.required.hi)):
                is_local = is_local and np.array_equal(mine[same], other)
            is_local = is_local and (back is None or all(back.sources[m] == [r] for r, m in enumerate(same)))
            self._local[edge, back] = is_local
        return self._local[edge, back]


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


def _equal_or_disjoint(boxes: Sequence[Hashable], served: list[set[Hashable]]) -> bool:
    owner: dict[Hashable, frozenset[Hashable]] = {}
    for box, addends in zip(boxes, served, strict=True):
        whole = frozenset(addends)
        if any(owner.setdefault((box, a), whole) != whole for a in addends):
            return False
    return True
