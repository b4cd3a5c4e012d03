"""Schedule -> Program: walk the global order once and write what each device does.

Every value is named when it is made; what a reader needs is combined just before its first use, so that started
communication has the time in between.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import groupby
from math import prod

from superscaler.ir.graph import PTensor
from superscaler.ir.mask import Box, extents, inside, intersect
from superscaler.ir.program import (
    Accumulate,
    Backward,
    Bucket,
    Collective,
    Combine,
    Device,
    Forward,
    Free,
    Function,
    Instruction,
    Load,
    Loss,
    Program,
    Recv,
    Send,
    Slice,
    Update,
    Wait,
    Weight,
)  # fmt: skip
from superscaler.materialize.collectives import Match, match
from superscaler.materialize.names import identifier, reads, writes
from superscaler.schedule.edges import Key
from superscaler.schedule.order import Node, Schedule
from superscaler.schedule.segments import Segment
from superscaler.schedule.transfers import BACKWARD, FORWARD, UPDATE, Place, Transfer

# As large as torch DDP's default bucket: several are in flight at once, and each is far above the latency.
BUCKET_BYTES = 25 * 2**20
DTYPE_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2, "bool": 1}


def materialize(schedule: Schedule, world: int) -> Program:
    """Return the program of a complete schedule on `world` devices."""
    return _Builder(schedule, world).build()


class _Builder:
    def __init__(self, schedule: Schedule, world: int) -> None:
        self.schedule = schedule
        self.model = schedule.edges.model
        self.code: list[list[Instruction]] = [[] for _ in range(world)]
        self.weights: list[dict[str, Weight]] = [{} for _ in range(world)]
        self.piece_of: dict[Place, tuple[int, int]] = {}
        self.readers_of: dict[Place, list[tuple[int, int]]] = {}
        for number, transfer in enumerate(schedule.transfers):
            for p, piece in enumerate(transfer.pieces):
                self.piece_of.update(dict.fromkeys(piece.places, (number, p)))
            for r, reader in enumerate(transfer.readers):
                for place in reader.places:
                    self.readers_of.setdefault(place, []).append((number, r))
        self.piece_name: dict[tuple[int, int], str] = {}
        self.sums: set[tuple[int, str]] = set()
        self.incoming: dict[tuple[int, int], list[tuple[str, Box, str | None]]] = {}
        self.arrived: dict[tuple[int, int], str] = {}
        self.ready: dict[tuple[int, int], str] = {}
        self.totals: dict[tuple[tuple[int, int], ...], str] = {}
        self.loaded: dict[tuple[int, str, Box], str] = {}
        self.cuts: set[tuple[int, str]] = set()
        self.place_of: dict[tuple[int, str], Place] = {}
        self.functions: dict[Hashable, int] = {}
        self.made: list[Function] = []
        self.messages = 0
        self.loss_places = self._loss_places()
        self.loss_parts: list[list[tuple[str, bool]]] = [[] for _ in range(world)]
        self.matches: dict[int, Match | None] = {}

    def build(self) -> Program:
        self._place_weights()
        for kind, run in groupby(self.schedule.order, key=lambda node: node.kind):
            if kind == "C":
                self._communicate(list(run))
                continue
            for node in run:
                if kind == "U":
                    self._update(node.number)
                else:
                    work = self._forward if kind == "F" else self._backward
                    work(self.schedule.segments[node.number], node.key)
        for rank, code in enumerate(self.code):
            # Global norms are sums over all devices, so devices without weights take part in the update too.
            if not any(isinstance(i, Update) for i in code):
                code.append(Update(()))
            parts = self.loss_parts[rank]
            code.append(Loss(tuple(name for name, _ in parts), tuple(counted for _, counted in parts)))
        devices = tuple(
            Device(rank, tuple(self.weights[rank].values()), tuple(_with_frees(code)))
            for rank, code in enumerate(self.code)
        )
        return Program(self.model, tuple(self.made), devices)

    # Weights at rest, inputs, constants.

    def _place_weights(self) -> None:
        for tensor, op in self.schedule.edges.homes.items():
            rows = self.schedule.edges.rows[op.name]
            held = self.schedule.edges.held(rows, op.outputs[0])
            counted = set(self.schedule.edges.whole(held))
            for row, key in enumerate(rows.keys):
                box = held.box(row)
                name = identifier(tensor) + (f"_p{key[2]}" if key[2] else "")
                self.weights[key[0]][name] = Weight(name, tensor, box, True, row in counted, op.group)
                self._load(key[0], name, tensor, box)
                place = self._weight_place(tensor, key)
                self.place_of[key[0], name] = place
                self._made(place, name, key[0])

    def _weight_place(self, tensor: str, key: Key) -> Place:
        return Place(UPDATE, self.schedule.edges.home_number[tensor], key, 0)

    def _load(self, rank: int, name: str, tensor: str, box: Box) -> None:
        self.code[rank].append(Load(name, tensor, box))

    def _resident(self, rank: int, tensor: PTensor, box: Box) -> str:
        """Return the name of a slice of an input, a constant, or a frozen weight: every device can have any."""
        key = (rank, tensor.name, box)
        if key not in self.loaded:
            count = sum(k[:2] == key[:2] for k in self.loaded)
            name = identifier(tensor.name) + (f"_s{count}" if count else "")
            self.loaded[key] = name
            if tensor.kind != "input":
                self.weights[rank][name] = Weight(name, tensor.name, box, False, False)
            self._load(rank, name, tensor.name, box)
        return self.loaded[key]

    # Values.

    def _made(self, place: Place, name: str, rank: int) -> None:
        """Record that a value exists; add it to the sum that it belongs to."""
        owner = self.piece_of.get(place)
        if owner is None:
            return
        so_far = self.piece_name.get(owner)
        if so_far is None:
            self.piece_name[owner] = name
            return
        in_place = (rank, so_far) in self.sums
        out = so_far if in_place else f"{so_far}~sum"
        self.code[rank].append(Accumulate(out, so_far, name, in_place))
        self.sums.add((rank, out))
        self.piece_name[owner] = out

    def _value(self, place: Place) -> str | None:
        """Return the name of what a place reads: the sum of its transfers, or None where nothing comes for it."""
        owners = tuple(self.readers_of.get(place, ()))
        if owners in self.totals:
            return self.totals[owners]
        names = [name for owner in owners if (name := self._read(owner)) is not None]
        if len(names) < 2:
            return names[0] if names else None
        transfer = self.schedule.transfers[owners[0][0]]
        box = transfer.readers[owners[0][1]].box
        tensor = self.model.tensors[transfer.tensor]
        view = extents(box)
        out = f"{self._base(transfer)}~t{owners[0][0]}_{owners[0][1]}"
        pieces = tuple((name, inside(box, box)) for name in names)
        rank = transfer.readers[owners[0][1]].device
        self.code[rank].append(Combine(out, pieces, view, tensor.local_shape(view), tensor.dtype))
        self.totals[owners] = out
        return out

    def _read(self, owner: tuple[int, int]) -> str | None:
        """Return the name of a reader's value, combining what came for it at the first call."""
        if owner not in self.ready:
            name = self._assemble(owner)
            if name is None:
                return None
            self.ready[owner] = name
        return self.ready[owner]

    def _assemble(self, owner: tuple[int, int]) -> str | None:
        number, r = owner
        transfer = self.schedule.transfers[number]
        reader = transfer.readers[r]
        tensor = self.model.tensors[transfer.tensor]
        rank, code = reader.device, self.code[reader.device]
        base = f"{self._base(transfer)}~r{number}_{r}"
        shape = tensor.local_shape(extents(reader.box))
        if owner in self.arrived:
            code.append(Wait(base, self.arrived[owner], shape))
            return base
        parts: list[tuple[str, Box]] = []
        for p, other in transfer.links:
            piece = transfer.pieces[p]
            if other != r:
                continue
            common = intersect(piece.box, reader.box)
            assert common is not None
            if piece.device == rank:
                parts.append((self._cut(rank, self.piece_name[number, p], tensor, piece.box, common), common))
        for work, common, name in self.incoming.get(owner, []):
            assert name is not None
            code.append(Wait(name, work, tensor.local_shape(extents(common))))
            parts.append((name, common))
        if not parts:
            return None
        if len(parts) == 1 and parts[0][1] == reader.box:
            return parts[0][0]
        placed = tuple((name, inside(box, reader.box)) for name, box in sorted(parts, key=lambda x: (x[1], x[0])))
        code.append(Combine(base, placed, extents(reader.box), shape, tensor.dtype))
        self.sums.add((rank, base))
        return base

    def _base(self, transfer: Transfer) -> str:
        return ("d_" if transfer.kind == BACKWARD else "") + identifier(transfer.tensor)

    def _cut(self, rank: int, name: str, tensor: PTensor, have: Box, want: Box) -> str:
        if have == want:
            return name
        suffix = "_".join(str(lo) for lo, _ in inside(want, have))
        out = f"{name}~at_{suffix}_{'_'.join(map(str, extents(want)))}"
        if (rank, out) not in self.cuts:
            self.cuts.add((rank, out))
            shape = tensor.local_shape(extents(want))
            self.code[rank].append(Slice(out, name, extents(have), inside(want, have), shape))
        return out

    # Work.

    def _suffix(self, key: Key) -> str:
        return (f"_m{key[1]}" if key[1] >= 0 else "") + (f"_p{key[2]}" if key[2] else "")

    def _tag(self, segment: Segment, key: Key) -> str:
        return f"s{segment.number}{self._suffix(key)}"

    def _forward(self, segment: Segment, key: Key) -> None:
        rank, at = key[0], segment.keys.index(key)
        inputs = []
        for number, alias in enumerate(segment.aliases):
            place = Place(FORWARD, segment.number, key, number)
            box = tuple(zip(alias.lo[at].tolist(), alias.hi[at].tolist(), strict=True))
            name = (
                self._value(place)
                if place in self.readers_of
                else self._resident(rank, self.model.tensors[alias.tensor], box)
            )
            assert name is not None, (alias.tensor, key)
            inputs.append(name)
        outputs = tuple(f"{identifier(o.tensor)}{self._suffix(key)}" for o in segment.outputs)
        saved = tuple(n for n, o in enumerate(segment.outputs) if o.has_gradient)
        grads = tuple(a.labels is not None for a in segment.aliases)
        function = self._function(segment, at)
        code = self.code[rank]
        code.append(Forward(self._tag(segment, key), function, tuple(inputs), grads, outputs, saved, segment.module))
        for number, (output, name) in enumerate(zip(segment.outputs, outputs, strict=True)):
            place = Place(FORWARD, segment.number, key, number)
            self._made(place, name, rank)
            if output.tensor == self.model.loss:
                self.loss_parts[rank].append((name, place in self.loss_places))

    def _function(self, segment: Segment, at: int) -> int:
        rows = self.schedule.edges.rows
        boxes = []
        for op in segment.ops:
            r, row = rows[op.name], segment.row_of[op.name][at]
            boxes.append(tuple(zip(r.lo[row].tolist(), r.hi[row].tolist(), strict=True)))
        key = (segment.number, tuple(boxes))
        if key not in self.functions:
            input_of = {(op.name, k): n for n, alias in enumerate(segment.aliases) for op, k in alias.uses}
            names = tuple(alias.tensor for alias in segment.aliases)
            outputs = tuple(o.tensor for o in segment.outputs)
            self.functions[key] = len(self.made)
            self.made.append(Function(segment.ops, tuple(boxes), names, input_of, outputs, segment.module))
        return self.functions[key]

    def _backward(self, segment: Segment, key: Key) -> None:
        rank = key[0]
        gradients: list[str | None] = []
        for number, output in enumerate(segment.outputs):
            if not output.has_gradient:
                continue
            name = self._value(Place(BACKWARD, segment.number, key, number))
            row = int(segment.row_of[output.op.name][segment.keys.index(key)])
            if output.tensor == self.model.loss and self.schedule.edges.seeds_gradient(row):
                name = "one"
            gradients.append(name)
        names = []
        suffix = self._suffix(key)
        for number, alias in enumerate(segment.aliases):
            if alias.labels is None:
                continue
            place = Place(BACKWARD, segment.number, key, number)
            base = f"d_{identifier(alias.tensor)}~s{segment.number}_{number}{suffix}"
            names.append((base if place in self.piece_of else "_", place))
        self.code[rank].append(Backward(self._tag(segment, key), tuple(gradients), tuple(n for n, _ in names)))
        for name, place in names:
            if name != "_":
                self._made(place, name, rank)

    def _update(self, rank: int) -> None:
        pairs = []
        for weight in self.weights[rank].values():
            gradient = self._value(self.place_of[rank, weight.name]) if weight.trained else None
            if gradient is not None:
                pairs.append((weight.name, gradient))
        self.code[rank].append(Update(tuple(pairs)))

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
            if node.link >= 0:
                self._message(node.number, transfer, node.link)
                continue
            found = None if transfer.is_local else match(transfer)
            if found is not None and found.kind == "all_reduce":
                dtype = self.model.tensors[transfer.tensor].dtype
                reductions.setdefault((found.group, dtype), []).append(node.number)
            elif found is not None:
                self._collective(node.number, transfer, found)
            elif not transfer.is_local:
                for link in range(len(transfer.links)):
                    self._message(node.number, transfer, link)
        for (group, dtype), numbers in reductions.items():
            for bucket in self._buckets(numbers):
                self._reduce(bucket, group, dtype)

    def _bytes(self, number: int) -> int:
        transfer = self.schedule.transfers[number]
        return prod(extents(transfer.pieces[0].box)) * DTYPE_BYTES[self.model.tensors[transfer.tensor].dtype]

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
        for rank in group:
            works, sources = [], []
            for number in numbers:
                at = {piece.device: p for p, piece in enumerate(transfers[number].pieces)}
                reader = {reader.device: r for r, reader in enumerate(transfers[number].readers)}
                sources.append(self.piece_name[number, at[rank]])
                works.append(f"{self._base(transfers[number])}~c{number}w")
                self.arrived[number, reader[rank]] = works[-1]
            weight = sum(self._bytes(number) for number in numbers)
            self.code[rank].append(Bucket(tuple(works), tuple(sources), group, dtype, weight))

    def _message(self, number: int, transfer: Transfer, link: int) -> None:
        p, r = transfer.links[link]
        piece, reader = transfer.pieces[p], transfer.readers[r]
        if piece.device == reader.device:
            return
        tensor = self.model.tensors[transfer.tensor]
        common = intersect(piece.box, reader.box)
        assert common is not None
        source = self._cut(piece.device, self.piece_name[number, p], tensor, piece.box, common)
        shape = tensor.local_shape(extents(common))
        self.messages += 1
        weight = prod(shape) * DTYPE_BYTES[tensor.dtype]
        self.code[piece.device].append(Send(source, reader.device, self.messages, weight))
        name = f"{self._base(transfer)}~c{number}_{link}"
        self.code[reader.device].append(Recv(f"{name}w", piece.device, self.messages, shape, tensor.dtype))
        self.incoming.setdefault((number, r), []).append((f"{name}w", common, name))

    def _collective(self, number: int, transfer: Transfer, found: Match) -> None:
        tensor = self.model.tensors[transfer.tensor]
        held = {piece.device: (p, piece) for p, piece in enumerate(transfer.pieces)}
        readers = {reader.device: (r, reader) for r, reader in enumerate(transfer.readers)}
        for rank in found.group:
            work = f"{self._base(transfer)}~c{number}w"
            source, view = None, extents(transfer.pieces[0].box)
            if rank in held:
                p, piece = held[rank]
                source, view = self.piece_name[number, p], extents(piece.box)
            box = readers[rank][1].box if rank in readers else transfer.pieces[0].box
            local, shape = tensor.local_shape(view), tensor.local_shape(extents(box))
            weight = prod(view) * DTYPE_BYTES[tensor.dtype]
            self.code[rank].append(
                Collective(
                    found.kind,
                    work,
                    source,
                    found.group,
                    view,
                    found.take,
                    found.give,
                    local,
                    shape,
                    tensor.dtype,
                    weight,
                )
            )
            if rank in readers and not (found.kind == "broadcast" and rank in held):
                self.arrived[number, readers[rank][0]] = work


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
