"""Schedule -> Program: walk the global order once and write what each device does.

Every value is named when it is made; what a reader needs is combined just before its first use, so that started
communication has the time in between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from itertools import groupby
from math import prod

import numpy as np

from superscaler.ir.fold import Fold, Unfoldable
from superscaler.ir.graph import RANDOM, Op
from superscaler.ir.mask import Box, extents, inside, intersect
from superscaler.ir.parts import Ints
from superscaler.ir.program import (
    Backward,
    Bucket,
    Collective,
    Combine,
    Device,
    Forward,
    Free,
    Function,
    Instruction,
    Loss,
    Move,
    Path,
    Program,
    Recv,
    Send,
    Update,
    Wait,
    links,
)  # fmt: skip
from superscaler.materialize.collectives import REASONS, Match, match, refusal
from superscaler.materialize.folded import fold_devices
from superscaler.materialize.names import reads, suffix, tag, writes
from superscaler.materialize.paths import Cache
from superscaler.materialize.reduction import Reduction, reduction
from superscaler.materialize.route import LOCAL, Route, is_collective, route
from superscaler.materialize.transitions import Costs
from superscaler.materialize.values import Values
from superscaler.schedule.edges import Key
from superscaler.schedule.nodes import Node, Schedule
from superscaler.schedule.segments import Segment
from superscaler.schedule.transfers import BACKWARD, FORWARD, Place, Transfer

# As large as torch DDP's default bucket: several are in flight at once, and each is far above the latency.
BUCKET_BYTES = 25 * 2**20
DTYPE_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "bool": 1}


def materialize(schedule: Schedule, world: int, costs: Costs, fold: Fold | None = None) -> Program:
    """Return the program of a complete schedule on `world` devices, whose exchanges take as long as `costs` say.

    With a fold the schedule has only the compiled places; Unfoldable says along which axis they do not tell of all.
    """
    return _Builder(schedule, world, costs, fold).build()


class _Builder(Values):
    def __init__(self, schedule: Schedule, world: int, costs: Costs, fold: Fold | None = None) -> None:
        super().__init__(schedule, world)
        self.fold, self.costs = fold, costs
        self.paths: Cache = {}
        self.exchanges: dict[Path, Counter[str]] = {}
        self.told = frozenset(range(world)) if fold is None else fold.told
        self.functions: dict[Hashable, int] = {}
        self.forms: dict[int, Ints] = {}
        self.made_functions: list[Function] = []
        self.messages = 0
        self.loss_places = self._loss_places()
        self.moves: dict[tuple[str, bool, str, str, tuple[int, ...], str], list[int]] = {}
        self.loss_parts: list[list[tuple[str, bool]]] = [[] for _ in range(world)]

    def build(self) -> Program:
        self.place_weights()
        for kind, run in groupby(self.schedule.order, key=lambda node: node.kind):
            if kind == "C":
                self._communicate(list(run))
                continue
            for node in run:
                if kind == "U" and node.number in self.told:
                    self._update(node.number)
                elif kind != "U" and node.key[0] in self.told:
                    work = self._forward if kind == "F" else self._backward
                    work(self.schedule.segments[node.number], node.key)
        for rank, code in enumerate(self.code):
            # Global norms are sums over all devices, so devices without weights take part in the update too.
            if not any(isinstance(i, Update) for i in code):
                code.append(Update(()))
            parts = self.loss_parts[rank]
            code.append(Loss(tuple(name for name, _ in parts), tuple(counted for _, counted in parts)))
        devices: Sequence[Device] = tuple(
            Device(rank, tuple(self.weights[rank].values()), tuple(_with_frees(code)))
            for rank, code in enumerate(self.code)
        )
        if self.fold is not None:
            devices = fold_devices(devices, self.fold)
        moves = tuple(Move(*key, *sums) for key, sums in self.moves.items())
        paths = tuple(replace(path, tensors=tuple(of), count=of.total()) for path, of in self.exchanges.items())
        return Program(self.model, tuple(self.made_functions), devices, moves, paths)

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
        outputs = tuple(f"{self.names[o.tensor]}{suffix(key)}" for o in segment.outputs)
        saved = tuple(n for n, o in enumerate(segment.outputs) if o.has_gradient)
        grads = tuple(a.labels is not None for a in segment.aliases)
        function = self._function(segment, at)
        code = self.code[rank]
        name, draws = tag(segment.number, key), self._draws(segment, at)
        code.append(Forward(name, function, tuple(inputs), grads, outputs, saved, segment.module, draws))
        for number, (output, name) in enumerate(zip(segment.outputs, outputs, strict=True)):
            place = Place(FORWARD, segment.number, key, number)
            self.made(place, name, rank)
            if output.tensor == self.model.loss:
                self.loss_parts[rank].append((name, place in self.loss_places))

    def _draws(self, segment: Segment, at: int) -> tuple[Box, ...]:
        return tuple(self._box(segment, op, at) for op in segment.ops if op.target in RANDOM)

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
            self.made_functions.append(Function(segment.ops, boxes, names, input_of, outputs, segment.module))
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
        gradients: list[str | None] = []
        for number, output in enumerate(segment.outputs):
            if not output.has_gradient:
                continue
            name = self.value(Place(BACKWARD, segment.number, key, number))
            row = int(segment.row_of[output.op.name][segment.keys.index(key)])
            if output.tensor == self.model.loss and self.schedule.edges.seeds_gradient(row):
                name = "one"
            gradients.append(name)
        names, wide = [], []
        for number, alias in enumerate(segment.aliases):
            if alias.labels is None:
                continue
            place = Place(BACKWARD, segment.number, key, number)
            base = f"d_{self.names[alias.tensor]}~s{segment.number}_{number}{suffix(key)}"
            names.append((base if place in self.piece_of else "_", place))
            tensor = self.model.tensors[alias.tensor]
            wide.append(alias.tensor in self.from_weights and tensor.wide_dtype != tensor.dtype)
        outputs = tuple(n for n, _ in names)
        self.code[rank].append(Backward(tag(segment.number, key), tuple(gradients), outputs, tuple(wide)))
        for name, place in names:
            if name != "_":
                self.made(place, name, rank)

    def _update(self, rank: int) -> None:
        pairs: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
        for weight in self.weights[rank].values():
            place = self.place_of.get((rank, weight.name))
            value = self.value(place) if place is not None else None
            if value is not None:
                pairs[weight.trained].append((weight.name, value))
        self.code[rank].append(Update(tuple(pairs[True]), tuple(pairs[False])))

    def _loss_places(self) -> set[Place]:
        """Return the parts of the loss that together are its value: one replica of each addend."""
        loss = self.model.loss
        segment = next(s for s in self.schedule.segments for o in s.outputs if o.tensor == loss)
        number = [o.tensor for o in segment.outputs].index(loss)
        output = segment.outputs[number]
        keys = self.schedule.edges.rows[output.op.name].keys
        return {Place(FORWARD, segment.number, keys[r], number) for r in self.schedule.edges.loss_rows()}

    # Communication.

    def _communicate(self, run: Sequence[Node]) -> None:
        """Start the communication that is ready at one point of the order; all_reduces of one group share buckets."""
        reductions: dict[tuple[tuple[int, ...], str], list[int]] = {}
        for node in run:
            transfer = self.schedule.transfers[node.number]
            if transfer.is_local and node.link < 1:
                self._record(transfer, "local", "", (transfer.pieces[0].device,), _why_local(transfer))
            if node.link >= 0:
                self._message(node.number, transfer, node.link)
                continue
            found = None if transfer.is_local else match(transfer, self.fold)
            if found is not None and found.kind == "all_reduce":
                reductions.setdefault((found.group, self.dtype(transfer)), []).append(node.number)
            elif found is not None:
                self._collective(node.number, transfer, found)
            elif not transfer.is_local:
                steps = reduction(transfer, self.schedule.edges.fold, self.fold) if transfer.is_to_updates else None
                if steps is not None:
                    self._reduction(node.number, transfer, steps)
                    continue
                if (path := self._path(transfer)) is not None:
                    self._route(node.number, transfer, path)
                    continue
                for link in range(len(transfer.links)):
                    self._message(node.number, transfer, link)
        for (group, dtype), numbers in reductions.items():
            for bucket in self._buckets(numbers):
                self._reduce(bucket, group, dtype)

    def _record(
        self, transfer: Transfer, way: str, kind: str, group: tuple[int, ...], why: str, size: int = 0, moved: int = 0
    ) -> None:
        if not (copies := self._copies(group)):
            return
        key = (transfer.tensor, transfer.kind == BACKWARD, way, kind, () if way == "local" else group, why)
        sums = self.moves.setdefault(key, [0, 0, 0])
        sums[:] = (a + copies * b for a, b in zip(sums, (1, size, moved), strict=True))

    def _copies(self, group: Sequence[int]) -> int:
        """Return how often what these devices do is done, none if it is told of others."""
        return self.fold.copies(group) if self.fold is not None else 1

    def _record_collective(
        self, number: int, kind: str, group: tuple[int, ...], box: Box | None = None, why: str = ""
    ) -> None:
        transfer, size = self.schedule.transfers[number], self._bytes(number, box)
        self._record(transfer, "collective", kind, group, why or REASONS[kind], size, size * links(kind, len(group)))

    def _bytes(self, number: int, box: Box | None = None) -> int:
        transfer = self.schedule.transfers[number]
        return prod(extents(box or transfer.pieces[0].box)) * DTYPE_BYTES[self.dtype(transfer)]

    def _buckets(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the transfers in runs that fill a bucket each; a tensor larger than a bucket goes alone."""
        buckets: list[list[int]] = []
        room = 0
        for number in numbers:
            size = self._bytes(number)
            if size > room:
                buckets.append([])
                room = BUCKET_BYTES
            buckets[-1].append(number)
            room -= size
        return buckets

    def _reduce(self, numbers: Sequence[int], group: tuple[int, ...], dtype: str) -> None:
        transfers = self.schedule.transfers
        if len(numbers) == 1:
            self._collective(numbers[0], transfers[numbers[0]], Match("all_reduce", group))
            return
        for number in numbers:
            self._record_collective(number, "all_reduce", group)
        for rank in self.told.intersection(piece.device for piece in transfers[numbers[0]].pieces):
            works, sources = [], []
            for number in numbers:
                at = {piece.device: p for p, piece in enumerate(transfers[number].pieces)}
                reader = {reader.device: r for r, reader in enumerate(transfers[number].readers)}
                sources.append(self.piece_name[number, at[rank]])
                works.append(f"{self.base(transfers[number])}~c{number}w")
                self.arrived[number, reader[rank]] = works[-1]
            weight = sum(self._bytes(number) for number in numbers)
            self.code[rank].append(Bucket(tuple(works), tuple(sources), group, dtype, weight))

    def _message(self, number: int, transfer: Transfer, link: int) -> None:
        p, r = transfer.links[link]
        piece, reader = transfer.pieces[p], transfer.readers[r]
        if piece.device != reader.device and self._is_told(piece.device, reader.device):
            common = intersect(piece.box, reader.box)
            assert common is not None
            tensor = self.model.tensors[transfer.tensor]
            source = self.cut(piece.device, self.piece_name[number, p], tensor, piece.box, common)
            work = self._send(transfer, f"{number}_{link}", piece.device, reader.device, source, common)
            self.incoming.setdefault((number, r), []).append((work, common, work[:-1]))

    def _is_told(self, *devices: int) -> bool:
        """Tell whether the code of devices between which a message goes is written: of all of them, or of none."""
        found = self.told.issuperset(devices)
        if not found and not self.told.isdisjoint(devices):
            assert self.fold is not None
            raise Unfoldable(self.fold.spanned(devices)[0])
        return found

    def _send(self, transfer: Transfer, label: str, rank: int, to: int, source: str, box: Box, why: str = "") -> str:
        """Send a box of a tensor to a device; return the name of the handle there."""
        shape, dtype = self.model.tensors[transfer.tensor].local_shape(extents(box)), self.dtype(transfer)
        self.messages += 1
        weight = prod(shape) * DTYPE_BYTES[dtype]
        self._record(transfer, "messages", "send", (rank, to), why or refusal(transfer), weight, weight)
        self.code[rank].append(Send(source, to, self.messages, weight))
        work = f"{self.base(transfer)}~c{label}w"
        self.code[to].append(Recv(work, rank, self.messages, shape, dtype))
        return work

    def _collective(self, number: int, transfer: Transfer, found: Match) -> None:
        self._record_collective(number, found.kind, found.group)
        held = {piece.device: (p, piece) for p, piece in enumerate(transfer.pieces)}
        readers = {reader.device: (r, reader) for r, reader in enumerate(transfer.readers)}
        for rank in self.told.intersection((*held, *readers)):
            work = f"{self.base(transfer)}~c{number}w"
            source, have = None, transfer.pieces[0].box
            if rank in held:
                source, have = self.piece_name[number, held[rank][0]], held[rank][1].box
            box = readers[rank][1].box if rank in readers else transfer.pieces[0].box
            self._start(rank, transfer, found, work, source, have, box)
            if rank in readers and not (found.kind == "broadcast" and rank in held):
                self.arrived[number, readers[rank][0]] = work

    def _start(
        self, rank: int, transfer: Transfer, how: Match, work: str, source: str | None, have: Box, want: Box
    ) -> None:
        tensor, dtype, view = self.model.tensors[transfer.tensor], self.dtype(transfer), extents(have)
        local, shape = tensor.local_shape(view), tensor.local_shape(extents(want))
        weight = prod(view) * DTYPE_BYTES[dtype]
        self.code[rank].append(
            Collective(how.kind, work, source, how.group, view, how.take, how.give, local, shape, dtype, weight)
        )

    def _reduction(self, number: int, transfer: Transfer, steps: Reduction) -> None:
        """Make all items step by step; what a reader adds up in the end is there, or comes in a message."""
        tensor, base = self.model.tensors[transfer.tensor], self.base(transfer)
        names: dict[tuple[int, int], str] = {}
        for n, item in enumerate(steps.items):
            shape = tensor.local_shape(extents(item.box))
            for how in item.how:
                first = next(rank for rank in how.group if rank in item.of)
                self._record_collective(number, how.kind, how.group, steps.items[item.of[first][0]].box)
            works = []
            for rank, (m, source) in item.of.items():
                if not self._is_told(source, rank):
                    continue
                if m < 0:
                    names[n, rank] = self.piece_name[number, n]
                    continue
                have, work = steps.items[m].box, f"{base}~c{number}_{n}w"
                collective = next((how for how in item.how if rank in how.group), None)
                if collective is None:
                    work = self._send(transfer, f"{number}_{n}", source, rank, names[m, source], have)
                else:
                    self._start(rank, transfer, collective, work, names[m, rank], have, item.box)
                works.append((rank, work))
            for rank, work in works:
                names[n, rank] = work[:-1]
                self.code[rank].append(Wait(work[:-1], work, shape))
        for r, (reader, pairs) in enumerate(zip(transfer.readers, steps.reads, strict=True)):
            self.given[number, r] = []
            for n, rank in pairs:
                if not self._is_told(rank, reader.device):
                    continue
                box, name = steps.items[n].box, names[n, rank]
                common = intersect(box, reader.box)
                assert common is not None
                name = self.cut(rank, name, tensor, box, common)
                if rank == reader.device:
                    self.given[number, r].append((name, common))
                else:
                    work = self._send(transfer, f"{number}_{n}_{r}", rank, reader.device, name, common)
                    self.incoming.setdefault((number, r), []).append((work, common, work[:-1]))

    def _path(self, transfer: Transfer) -> Route | None:
        dtype = self.dtype(transfer)
        return None if dtype == "bool" else route(transfer, self.fold, self.costs, DTYPE_BYTES[dtype], self.paths)

    def _route(self, number: int, transfer: Transfer, found: Route) -> None:
        """Take the steps of a path, each after the one before has arrived."""
        tensor, base, path = self.model.tensors[transfer.tensor], self.base(transfer), found.path
        names = {piece.device: self.piece_name.get((number, p), "") for p, piece in enumerate(transfer.pieces)}
        before = found.boxes(path.source)
        copies = self._copies(sorted({*before, *found.boxes(path.goal)}))
        if len(path.steps) > 1 and copies:
            dtype = self.dtype(transfer)
            steps = found.steps(DTYPE_BYTES[dtype])
            taken = Path(transfer.kind == BACKWARD, extents(found.whole), dtype, path.source, steps)
            self.exchanges.setdefault(taken, Counter())[transfer.tensor] += copies
        for n, step in enumerate(path.steps):
            after = found.boxes(step.layout)
            parts: dict[int, list[tuple[str, Box]]] = {rank: [] for rank in after if rank in self.told}
            waits: list[tuple[int, str, Box]] = []
            why = f"step {n + 1} of {len(path.steps)} of the cheapest path to another layout"
            for group in step.groups:
                if is_collective(step.kind):
                    self._record_collective(number, step.kind, group, before[group[0]], why)
                    how = Match(step.kind, group, step.take, step.give)
                    for rank in self.told.intersection(group):
                        work = f"{base}~c{number}_{n}w"
                        self._start(rank, transfer, how, work, names[rank], before[rank], after[rank])
                        waits.append((rank, work, after[rank]))
                elif step.kind in LOCAL:
                    for rank in self.told.intersection(group):
                        is_kept = step.kind == "chunk" or rank == group[0]
                        name = self.cut(rank, names[rank], tensor, before[rank], after[rank]) if is_kept else ""
                        parts[rank] += [(name, after[rank])] if is_kept else []
                else:
                    for to in (to for to in group[1:] if self._is_told(group[0], to)):
                        common = intersect(before[group[0]], after[to])
                        assert common is not None
                        name = self.cut(group[0], names[group[0]], tensor, before[group[0]], common)
                        label = f"{number}_{n}_{group[0]}"
                        waits.append((to, self._send(transfer, label, group[0], to, name, common, why), common))
            for rank in self.told.intersection(step.kept):
                common = intersect(before[rank], after[rank])
                assert common is not None
                parts[rank].append((self.cut(rank, names[rank], tensor, before[rank], common), common))
            for rank, work, box in waits:
                self.code[rank].append(Wait(work[:-1], work, tensor.local_shape(extents(box))))
                parts[rank].append((work[:-1], box))
            names = {
                rank: self._placed(f"{base}~p{number}_{n}", rank, transfer, some, after[rank])
                for rank, some in parts.items()
            }
            before = after
        for r, reader in enumerate(transfer.readers):
            if reader.device in names:
                self.given[number, r] = [(names[reader.device], reader.box)]

    def _placed(self, out: str, rank: int, transfer: Transfer, parts: Sequence[tuple[str, Box]], box: Box) -> str:
        """Return the sum of parts of a box: nothing to do where one part is all of it."""
        if len(parts) == 1 and parts[0][1] == box:
            return parts[0][0]
        view, placed = extents(box), tuple((name, inside(some, box)) for name, some in parts)
        shape = self.model.tensors[transfer.tensor].local_shape(view)
        self.code[rank].append(Combine(out, placed, view, shape, self.dtype(transfer)))
        return out


def _why_local(transfer: Transfer) -> str:
    several = len(transfer.links) > len(transfer.readers) or any(len(piece.places) > 1 for piece in transfer.pieces)
    return "summed or joined where it is read" if several else "made where it is read"


def _with_frees(code: Sequence[Instruction]) -> list[Instruction]:
    """Return the code with each name freed after its last use; weights and inputs stay with the runtime."""
    last: dict[str, int] = {}
    for at, instruction in enumerate(code):
        for name in (*reads(instruction), *writes(instruction)):
            last[name] = at
    done: list[Instruction] = []
    dying: dict[int, list[str]] = {}
    for name, at in last.items():
        dying.setdefault(at, []).append(name)
    for at, instruction in enumerate(code):
        done.append(instruction)
        names = tuple(sorted(n for n in dying.get(at, ()) if n not in ("_", "one")))
        if names and at < len(code) - 1:
            done.append(Free(names))
    return done
