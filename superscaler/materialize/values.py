"""The names of values on each device, and what brings a value to its readers: sums, slices, waits."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler.ir.graph import PTensor
from superscaler.ir.mask import Box, extents, inside, intersect
from superscaler.ir.program import Accumulate, Combine, Instruction, Load, Slice, Value, Wait, Weight
from superscaler.materialize.names import Names, unique_identifiers
from superscaler.schedule.edges import Key
from superscaler.schedule.nodes import Schedule
from superscaler.schedule.transfers import BACKWARD, UPDATE, Place, Transfer

Address = tuple[int, int]


class Values:
    """The values of all devices while their code is written: who made what, under which name, and what reads it.

    A piece or reader is addressed by (number of the transfer, number in it). Methods append to `code` what a value
    needs before it can be read.
    """

    def __init__(self, schedule: Schedule, world: int) -> None:
        self.schedule = schedule
        self.model = schedule.edges.model
        self.code: list[list[Instruction]] = [[] for _ in range(world)]
        self.weights: list[dict[Value, Weight]] = [{} for _ in range(world)]
        self.identifiers = unique_identifiers(self.model.tensors)
        self._names = [Names() for _ in range(world)]
        self.from_weights = {o.tensor for op in self.model.ops if op.from_weights for o in op.outputs}
        self.piece_of: dict[Place, Address] = {}
        self.readers_of: dict[Place, list[Address]] = {}
        for number, transfer in enumerate(schedule.transfers):
            for p, piece in enumerate(transfer.pieces):
                self.piece_of.update(dict.fromkeys(piece.places, (number, p)))
            for r, reader in enumerate(transfer.readers):
                for place in reader.places:
                    self.readers_of.setdefault(place, []).append((number, r))
        self.piece_name: dict[Address, Value] = {}
        self.place_of: dict[tuple[int, Value], Place] = {}
        # What communication brings to a reader: the handle of a collective, or of messages with their boxes and names.
        self.arrived: dict[Address, Value] = {}
        self.incoming: dict[Address, list[tuple[Value, Box]]] = {}
        # What collectives left on a reader's own device, instead of its pieces there.
        self.given: dict[Address, list[tuple[Value, Box]]] = {}
        self._sums: set[tuple[int, Value]] = set()
        self._ready: dict[Address, Value] = {}
        self._totals: dict[tuple[Address, ...], Value] = {}
        self._resident: dict[tuple[int, str, Box], Value] = {}
        self._cuts: dict[tuple[int, Value, Box], Value] = {}

    # Weights at rest, inputs, constants.

    def place_weights(self) -> None:
        for tensor, op in self.schedule.edges.homes.items():
            rows = self.schedule.edges.rows[op.name]
            held = self.schedule.edges.held(rows, op.outputs[0])
            counted = set(self.schedule.edges.whole(held))
            for row, key in enumerate(rows.keys):
                box = held.box(row)
                name = self.fresh(key[0], Value(self.identifiers[tensor], part=key[2]))
                self.weights[key[0]][name] = Weight(
                    name, tensor, box, not op.is_write, row in counted and not op.is_write, op.group
                )
                self._load(key[0], name, tensor, box)
                place = self._weight_place(tensor, key)
                self.place_of[key[0], name] = place
                self.made(place, name, key[0])

    def _weight_place(self, tensor: str, key: Key) -> Place:
        return Place(UPDATE, self.schedule.edges.home_number[tensor], key, 0)

    def _load(self, rank: int, name: Value, tensor: str, box: Box) -> None:
        self.code[rank].append(Load(name, tensor, box))

    def resident(self, rank: int, tensor: PTensor, box: Box) -> Value:
        """Return the name of a slice of an input, a constant, or a frozen weight: every device can have any."""
        key = (rank, tensor.name, box)
        if key not in self._resident:
            count = sum(k[:2] == key[:2] for k in self._resident)
            name = self.fresh(rank, Value(self.identifiers[tensor.name], slice=count))
            self._resident[key] = name
            if tensor.kind != "input":
                self.weights[rank][name] = Weight(name, tensor.name, box, False, False)
            self._load(rank, name, tensor.name, box)
        return self._resident[key]

    # Values.

    def made(self, place: Place, name: Value, rank: int) -> None:
        """Record that a value exists; add it to the sum that it belongs to."""
        owner = self.piece_of.get(place)
        if owner is None:
            return
        so_far = self.piece_name.get(owner)
        if so_far is None:
            self.piece_name[owner] = name
            return
        in_place = (rank, so_far) in self._sums
        out = so_far if in_place else self.fresh(rank, so_far)
        self.code[rank].append(Accumulate(out, so_far, name, in_place))
        self._sums.add((rank, out))
        self.piece_name[owner] = out

    def value(self, place: Place) -> Value | None:
        """Return the name of what a place reads: the sum of its transfers, or None where nothing comes for it."""
        owners = tuple(self.readers_of.get(place, ()))
        if owners in self._totals:
            return self._totals[owners]
        names = [name for owner in owners if (name := self._read(owner)) is not None]
        if len(names) < 2:
            return names[0] if names else None
        transfer = self.schedule.transfers[owners[0][0]]
        box = transfer.readers[owners[0][1]].box
        tensor = self.model.tensors[transfer.tensor]
        view = extents(box)
        rank = transfer.readers[owners[0][1]].device
        out = self.fresh(rank, self.base(transfer))
        boxes = (inside(box, box),) * len(names)
        self.code[rank].append(Combine(out, tuple(names), boxes, view, tensor.local_shape(view), self.dtype(transfer)))
        self._totals[owners] = out
        return out

    def _read(self, owner: Address) -> Value | None:
        """Return the name of a reader's value, combining what came for it at the first call."""
        if owner not in self._ready:
            name = self._assemble(owner)
            if name is None:
                return None
            self._ready[owner] = name
        return self._ready[owner]

    def _assemble(self, owner: Address) -> Value | None:
        number, r = owner
        transfer = self.schedule.transfers[number]
        reader = transfer.readers[r]
        tensor = self.model.tensors[transfer.tensor]
        rank = reader.device
        if owner in self.arrived:
            return self.wait(rank, self.arrived[owner], tensor, reader.box)
        parts = list(self.given.get(owner, ()))
        for p, other in transfer.links:
            piece = transfer.pieces[p]
            if other != r or owner in self.given:
                continue
            if piece.device == rank:
                parts.append(self.common(rank, self.piece_name[number, p], tensor, piece.box, reader.box))
        parts += [(self.wait(rank, work, tensor, common), common) for work, common in self.incoming.get(owner, [])]
        if not parts and transfer.kind == BACKWARD:
            return None
        return self.placed(rank, transfer, sorted(parts, key=lambda x: (x[1], x[0])), reader.box)

    def wait(self, rank: int, work: Value, tensor: PTensor, box: Box) -> Value:
        """Return the name of what a handle brings, after waiting for it."""
        out = self.fresh(rank, work._replace(is_handle=False))
        self.code[rank].append(Wait(out, work, tensor.local_shape(extents(box))))
        return out

    def placed(self, rank: int, transfer: Transfer, parts: Sequence[tuple[Value, Box]], box: Box) -> Value:
        """Return the sum of parts of a box: nothing to do where one part is all of it."""
        if len(parts) == 1 and parts[0][1] == box:
            return parts[0][0]
        view, out = extents(box), self.fresh(rank, self.base(transfer))
        boxes = tuple(inside(some, box) for _, some in parts)
        shape = self.model.tensors[transfer.tensor].local_shape(view)
        names = tuple(name for name, _ in parts)
        self.code[rank].append(Combine(out, names, boxes, view, shape, self.dtype(transfer)))
        self._sums.add((rank, out))
        return out

    def zeros(self, rank: int, tensor: str, lo: list[int], hi: list[int]) -> Value:
        """Return the name of zeros, which a part reads where another one reads the value."""
        spec = self.model.tensors[tensor]
        view = tuple(b - a for a, b in zip(lo, hi, strict=True))
        out = self.fresh(rank, Value(self.identifiers[tensor]))
        self.code[rank].append(Combine(out, (), (), view, spec.local_shape(view), spec.dtype))
        return out

    def dtype(self, transfer: Transfer, *, trained: bool = False) -> str:
        """Return the dtype of what a transfer moves: gradients that are summed over microbatches are never halves.

        `trained`: that of the model that trains, where this is its copy in another dtype.
        """
        tensor = self.model.tensors[transfer.tensor]
        tensor = tensor.trained if trained else tensor
        is_summed = transfer.kind == BACKWARD and transfer.tensor in self.from_weights
        return tensor.wide_dtype if is_summed else tensor.dtype

    def base(self, transfer: Transfer) -> Value:
        """Return what the names of a transfer's values are like."""
        return Value(self.identifiers[transfer.tensor], transfer.kind == BACKWARD)

    def fresh(self, rank: int, like: Value) -> Value:
        return self._names[rank].fresh(like)

    def handle(self, rank: int, transfer: Transfer) -> Value:
        """Return a name for a handle of a transfer on a device."""
        return self.fresh(rank, self.base(transfer)._replace(is_handle=True))

    def common(self, rank: int, name: Value, tensor: PTensor, have: Box, want: Box) -> tuple[Value, Box]:
        """Return what a value has of a wanted box, and which part of it that is."""
        found = intersect(have, want)
        assert found is not None
        return self.cut(rank, name, tensor, have, found), found

    def cut(self, rank: int, name: Value, tensor: PTensor, have: Box, want: Box) -> Value:
        if have == want:
            return name
        if (rank, name, want) not in self._cuts:
            out = self._cuts[rank, name, want] = self.fresh(rank, name)
            shape = tensor.local_shape(extents(want))
            self.code[rank].append(Slice(out, name, extents(have), inside(want, have), shape))
        return self._cuts[rank, name, want]
