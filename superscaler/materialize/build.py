"""Schedule -> Program: walk the global order once and write what each device does.

Every value is named when it is made; what a reader needs is combined just before its first use, so that started
communication has the time in between.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np

from superscaler.ir.graph import Op
from superscaler.ir.mask import Box
from superscaler.ir.parts import Ints
from superscaler.ir.program import (
    ONE,
    Backward,
    Device,
    Forward,
    Free,
    Function,
    Instruction,
    Loss,
    Move,
    Program,
    Update,
    Value,
    reads,
    writes,
)  # fmt: skip
from superscaler.ir.spmd import Fold
from superscaler.materialize.exchange import Exchanges
from superscaler.materialize.names import task
from superscaler.materialize.rvd.transitions import Costs
from superscaler.materialize.spmd import fold_devices
from superscaler.schedule.edges import Key
from superscaler.schedule.nodes import Node, Schedule
from superscaler.schedule.segments import Segment
from superscaler.schedule.transfers import BACKWARD, FORWARD, Place


def materialize(schedule: Schedule, world: int, costs: Costs, fold: Fold | None = None) -> Program:
    """Return the program of a complete schedule on `world` devices, whose exchanges take as long as `costs` say.

    With a fold the schedule has only the compiled places; Unfoldable says along which axis they do not tell of all.
    """
    return _Builder(schedule, world, costs, fold).build()


class _Builder(Exchanges):
    def __init__(self, schedule: Schedule, world: int, costs: Costs, fold: Fold | None = None) -> None:
        super().__init__(schedule, world, costs, fold)
        self.functions: dict[Hashable, int] = {}
        self.forms: dict[int, Ints] = {}
        self.starts: dict[int, tuple[Ints, tuple[tuple[int, ...], ...]]] = {}
        self.made_functions: list[Function] = []
        self.loss_places = self._loss_places()
        self.loss_parts: list[list[tuple[Value, bool]]] = [[] for _ in range(world)]

    def build(self) -> Program:
        self.place_weights()
        for (kind, *_), some in groupby(self.schedule.order, key=_together):
            run = list(some)
            if kind == "C":
                self.communicate(run)
                continue
            if kind == "U":
                self.reduce({node.number for node in run})
            if self.pending:
                self.finish(place for node in run for place in self._reads(node))
            for node in run:
                if kind == "U" and node.number in self.told:
                    self._update(node.number)
                elif kind != "U" and node.key[0] in self.told:
                    work = self._forward if kind == "F" else self._backward
                    work(self.schedule.segments[node.number], node.key)
        for rank, code in enumerate(self.code):
            # Global norms are sums over all devices, so devices without weights take part in the update too.
            if not any(isinstance(i, Update) for i in code):
                code.append(Update((), ()))
            parts = self.loss_parts[rank]
            code.append(Loss(tuple(name for name, _ in parts), tuple(counted for _, counted in parts)))
        devices: Sequence[Device] = tuple(
            Device(rank, tuple(self.weights[rank].values()), tuple(_with_frees(code)))
            for rank, code in enumerate(self.code)
        )
        if self.fold is not None:
            devices = fold_devices(devices, self.fold)
        moves = tuple(Move(*key, *sums) for key, sums in self.moves.items())
        paths = tuple(replace(path, tensors=tuple(of), count=of.total()) for path, of in self.taken.items())
        return Program(self.model, tuple(self.made_functions), devices, moves, paths)

    def _reads(self, node: Node) -> Iterator[Place]:
        if node.kind == "U":
            places = (self.place_of.get((node.number, name)) for name in self.weights[node.number])
            yield from (place for place in places if place is not None)
        else:
            segment = self.schedule.segments[node.number]
            count = len(segment.aliases if node.kind == "F" else segment.outputs)
            yield from (Place(node.kind, node.number, node.key, n) for n in range(count))

    # Work.

    def _forward(self, segment: Segment, key: Key) -> None:
        rank, at = key[0], segment.keys.index(key)
        inputs = []
        for number, alias in enumerate(segment.aliases):
            place = Place(FORWARD, segment.number, key, number)
            if place not in self.readers_of and alias.is_zero(at):
                inputs.append(self.zeros(rank, alias.tensor, alias.lo[at].tolist(), alias.hi[at].tolist()))
                continue
            box = tuple(zip(alias.lo[at].tolist(), alias.hi[at].tolist(), strict=True))
            name = (
                self.value(place)
                if place in self.readers_of
                else self.resident(rank, self.model.tensors[alias.tensor], box)
            )
            assert name is not None, (alias.tensor, key)
            inputs.append(name)
        outputs = tuple(
            self.fresh(rank, Value(self.identifiers[o.tensor], microbatch=key[1], part=key[2])) for o in segment.outputs
        )
        saved = tuple(n for n, o in enumerate(segment.outputs) if o.has_gradient)
        grads = tuple(a.labels is not None for a in segment.aliases)
        function = self._function(segment, at)
        starts = tuple(self._starts(segment)[0][at].tolist())
        run = Forward(task(segment.number, key), function, starts, tuple(inputs), grads, outputs, saved)
        self.code[rank].append(run)
        for number, (output, name) in enumerate(zip(segment.outputs, outputs, strict=True)):
            place = Place(FORWARD, segment.number, key, number)
            self.made(place, name, rank)
            if output.tensor == self.model.loss:
                self.loss_parts[rank].append((name, place in self.loss_places))

    def _starts(self, segment: Segment) -> tuple[Ints, tuple[tuple[int, ...], ...]]:
        """Return where the parts of a segment start [keys, coordinates], indices that move alike as one coordinate, and
        for each op the coordinate of each index.
        """
        if segment.number not in self.starts:
            columns = [self.schedule.edges.rows[op.name].lo[segment.row_of[op.name]] for op in segment.ops]
            distinct, number = np.unique(np.concatenate(columns, axis=1), axis=1, return_inverse=True)
            left = iter(number.reshape(-1).tolist())
            self.starts[segment.number] = distinct, tuple(tuple(next(left) for _ in op.indices) for op in segment.ops)
        return self.starts[segment.number]

    def _box(self, segment: Segment, op: Op, at: int) -> Box:
        rows, row = self.schedule.edges.rows[op.name], segment.row_of[op.name][at]
        return tuple(zip(rows.lo[row].tolist(), rows.hi[row].tolist(), strict=True))

    def _function(self, segment: Segment, at: int) -> int:
        key = (segment.number, self._forms(segment)[at].tobytes())
        if key not in self.functions:
            boxes = tuple(self._box(segment, op, at) for op in segment.ops)
            input_of = {(op.name, k): n for n, alias in enumerate(segment.aliases) for op, k in alias.uses}
            names = tuple(alias.tensor for alias in segment.aliases)
            outputs = tuple(o.tensor for o in segment.outputs)
            self.functions[key] = len(self.made_functions)
            where = self._starts(segment)[1]
            self.made_functions.append(Function(segment.ops, boxes, names, input_of, outputs, segment.module, where))
        return self.functions[key]

    def _forms(self, segment: Segment) -> Ints:
        """Return per key of a segment a row that is equal for parts which the same function computes."""
        if segment.number not in self.forms:
            columns = []
            for op in segment.ops:
                rows, at = self.schedule.edges.rows[op.name], segment.row_of[op.name]
                columns += [(rows.hi - rows.lo)[at], rows.lo[at][:, self.model.placed(op)]]
            self.forms[segment.number] = np.concatenate(columns, axis=1)
        return self.forms[segment.number]

    def _backward(self, segment: Segment, key: Key) -> None:
        rank = key[0]
        gradients: list[Value | None] = []
        for number, output in enumerate(segment.outputs):
            if not output.has_gradient:
                continue
            name = self.value(Place(BACKWARD, segment.number, key, number))
            row = int(segment.row_of[output.op.name][segment.keys.index(key)])
            if output.tensor == self.model.loss and self.schedule.edges.seeds_gradient(row):
                name = ONE
            gradients.append(name)
        made: list[tuple[Value | None, Place]] = []
        wide = []
        for number, alias in enumerate(segment.aliases):
            if alias.labels is None:
                continue
            place = Place(BACKWARD, segment.number, key, number)
            like = Value(self.identifiers[alias.tensor], is_gradient=True)
            made.append((self.fresh(rank, like) if place in self.piece_of else None, place))
            tensor = self.model.tensors[alias.tensor]
            wide.append(alias.tensor in self.from_weights and tensor.wide_dtype != tensor.dtype)
        outputs = tuple(n for n, _ in made)
        self.code[rank].append(Backward(task(segment.number, key), tuple(gradients), outputs, tuple(wide)))
        for name, place in made:
            if name is not None:
                self.made(place, name, rank)

    def _update(self, rank: int) -> None:
        pairs: dict[bool, list[tuple[Value, Value]]] = {True: [], False: []}
        for weight in self.weights[rank].values():
            place = self.place_of.get((rank, weight.name))
            value = self.value(place) if place is not None else None
            if value is not None:
                pairs[weight.trained].append((weight.name, value))
        self.code[rank].append(Update(*(side for some in (True, False) for side in _sides(pairs[some]))))

    def _loss_places(self) -> set[Place]:
        """Return the parts of the loss that together are its value: one replica of each addend."""
        loss = self.model.loss
        segment = next(s for s in self.schedule.segments for o in s.outputs if o.tensor == loss)
        number = [o.tensor for o in segment.outputs].index(loss)
        output = segment.outputs[number]
        keys = self.schedule.edges.rows[output.op.name].keys
        return {Place(FORWARD, segment.number, keys[r], number) for r in self.schedule.edges.loss_rows()}


def _together(node: Node) -> tuple[object, ...]:
    """Return what is equal for neighbours in the order that finish exchanges together: devices that correspond."""
    return (node.kind, node.number, *node.key[1:]) if node.kind in "FB" else (node.kind,)


def _sides(pairs: Sequence[tuple[Value, Value]]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


def _with_frees(code: Sequence[Instruction]) -> list[Instruction]:
    """Return the code with each name freed after its last use; weights and inputs stay with the runtime."""
    last: dict[Value, int] = {}
    for at, instruction in enumerate(code):
        for name in (*reads(instruction), *writes(instruction)):
            last[name] = at
    done: list[Instruction] = []
    dying: dict[int, list[Value]] = {}
    for name, at in last.items():
        dying.setdefault(at, []).append(name)
    for at, instruction in enumerate(code):
        done.append(instruction)
        names = tuple(sorted((n for n in dying.get(at, ()) if n != ONE), key=str))
        if names and at < len(code) - 1:
            done.append(Free(names))
    return done
