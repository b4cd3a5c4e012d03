"""The names of values on each device, and what brings a value to its readers: sums, slices, waits."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler.ir.graph import PTensor
from superscaler.ir.mask import Box, extents, inside, intersect
from superscaler.ir.program import Accumulate, Combine, Instruction, Load, Slice, Wait, Weight
from superscaler.materialize.names import unique_identifiers
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
        self.weights: list[dict[str, Weight]] = [{} for _ in range(world)]
        self.names = unique_identifiers(self.model.tensors)
        self.from_weights = {o.tensor for op in self.model.ops if op.from_weights for o in op.outputs}
        self.piece_of: dict[Place, Address] = {}
        self.readers_of: dict[Place, list[Address]] = {}
        for number, transfer in enumerate(schedule.transfers):
            for p, piece in enumerate(transfer.pieces):
                self.piece_of.update(dict.fromkeys(piece.places, (number, p)))
            for r, reader in enumerate(transfer.readers):
                for place in reader.places:
                    self.readers_of.setdefault(place, []).append((number, r))
        self.piece_name: dict[Address, str] = {}
        self.place_of: dict[tuple[int, str], Place] = {}
        # What communication brings to a reader: the handle of a collective, or of messages with their boxes and names.
        self.arrived: dict[Address, str] = {}
        self.incoming: dict[Address, list[tuple[str, Box, str]]] = {}
        # What collectives left on a reader's own device, instead of its pieces there.
        self.given: dict[Address, list[tuple[str, Box]]] = {}
        self._sums: set[tuple[int, str]] = set()
        self._ready: dict[Address, str] = {}
        self._totals: dict[tuple[Address, ...], str] = {}
        self._resident: dict[tuple[int, str, Box], str] = {}
        self._cuts: set[tuple[int, str]] = set()

    # Weights at rest, inputs, constants.

    def place_weights(self) -> None:
        for tensor, op in self.schedule.edges.homes.items():
            rows = self.schedule.edges.rows[op.name]
            held = self.schedule.edges.held(rows, op.outputs[0])
            counted = set(self.schedule.edges.whole(held))
            for row, key in enumerate(rows.keys):
                box = held.box(row)
                name = self.names[tensor] + (f"_p{key[2]}" if key[2] else "")
                self.weights[key[0]][name] = Weight(
                    name, tensor, box, not op.is_write, row in counted and not op.is_write, op.group
                )
                self._load(key[0], name, tensor, box)
                place = self._weight_place(tensor, key)
                self.place_of[key[0], name] = place
                self.made(place, name, key[0])

    def _weight_place(self, tensor: str, key: Key) -> Place:
        return Place(UPDATE, self.schedule.edges.home_number[tensor], key, 0)

    def _load(self, rank: int, name: str, tensor: str, box: Box) -> None:
        self.code[rank].append(Load(name, tensor, box))

    def resident(self, rank: int, tensor: PTensor, box: Box) -> str:
        """Return the name of a slice of an input, a constant, or a frozen weight: every device can have any."""
        key = (rank, tensor.name, box)
        if key not in self._resident:
            count = sum(k[:2] == key[:2] for k in self._resident)
            name = self.names[tensor.name] + (f"_s{count}" if count else "")
            self._resident[key] = name
            if tensor.kind != "input":
                self.weights[rank][name] = Weight(name, tensor.name, box, False, False)
            self._load(rank, name, tensor.name, box)
        return self._resident[key]

    # Values.

    def made(self, place: Place, name: str, rank: int) -> None:
        """Record that a value exists; add it to the sum that it belongs to."""
        owner = self.piece_of.get(place)
        if owner is None:
            return
        so_far = self.piece_name.get(owner)
        if so_far is None:
            self.piece_name[owner] = name
            return
        in_place = (rank, so_far) in self._sums
        out = so_far if in_place else f"{so_far}~sum"
        self.code[rank].append(Accumulate(out, so_far, name, in_place))
        self._sums.add((rank, out))
        self.piece_name[owner] = out

    def value(self, place: Place) -> str | None:
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
        out = f"{self.base(transfer)}~t{owners[0][0]}_{owners[0][1]}"
        pieces = tuple((name, inside(box, box)) for name in names)
        rank = transfer.readers[owners[0][1]].device
        self.code[rank].append(Combine(out, pieces, view, tensor.local_shape(view), self.dtype(transfer)))
        self._totals[owners] = out
        return out

    def _read(self, owner: Address) -> str | None:
        """Return the name of a reader's value, combining what came for it at the first call."""
        if owner not in self._ready:
            name = self._assemble(owner)
            if name is None:
                return None
            self._ready[owner] = name
        return self._ready[owner]

    def _assemble(self, owner: Address) -> str | None:
        number, r = owner
        transfer = self.schedule.transfers[number]
        reader = transfer.readers[r]
        tensor = self.model.tensors[transfer.tensor]
        rank, code = reader.device, self.code[reader.device]
        base = f"{self.base(transfer)}~r{number}_{r}"
        if owner in self.arrived:
            code.append(Wait(base, self.arrived[owner], tensor.local_shape(extents(reader.box))))
            return base
        parts = list(self.given.get(owner, ()))
        for p, other in transfer.links:
            piece = transfer.pieces[p]
            if other != r or owner in self.given:
                continue
            if piece.device == rank:
                parts.append(self.common(rank, self.piece_name[number, p], tensor, piece.box, reader.box))
        for work, common, name in self.incoming.get(owner, []):
            code.append(Wait(name, work, tensor.local_shape(extents(common))))
            parts.append((name, common))
        if not parts and transfer.kind == BACKWARD:
            return None
        return self.placed(base, rank, transfer, sorted(parts, key=lambda x: (x[1], x[0])), reader.box)

    def placed(self, out: str, rank: int, transfer: Transfer, parts: Sequence[tuple[str, Box]], box: Box) -> str:
        """Return the sum of parts of a box: nothing to do where one part is all of it."""
        if len(parts) == 1 and parts[0][1] == box:
            return parts[0][0]
        view, placed = extents(box), tuple((name, inside(some, box)) for name, some in parts)
        shape = self.model.tensors[transfer.tensor].local_shape(view)
        self.code[rank].append(Combine(out, placed, view, shape, self.dtype(transfer)))
        self._sums.add((rank, out))
        return out

    def zeros(self, rank: int, tensor: str, lo: list[int], hi: list[int]) -> str:
        """Return the name of zeros, which a part reads where another one reads the value."""
        spec = self.model.tensors[tensor]
        view = tuple(b - a for a, b in zip(lo, hi, strict=True))
        out = f"{self.names[tensor]}~z{len(self.code[rank])}"
        self.code[rank].append(Combine(out, (), view, spec.local_shape(view), spec.dtype))
        return out

    def dtype(self, transfer: Transfer, *, trained: bool = False) -> str:
        """Return the dtype of what a transfer moves: gradients that are summed over microbatches are never halves.

        `trained`: that of the model that trains, where this is its copy in another dtype.
        """
        tensor = self.model.tensors[transfer.tensor]
        tensor = tensor.trained if trained else tensor
        is_summed = transfer.kind == BACKWARD and transfer.tensor in self.from_weights
        return tensor.wide_dtype if is_summed else tensor.dtype

    def base(self, transfer: Transfer) -> str:
        return ("d_" if transfer.kind == BACKWARD else "") + self.names[transfer.tensor]

    def common(self, rank: int, name: str, tensor: PTensor, have: Box, want: Box) -> tuple[str, Box]:
        """Return what a value has of a wanted box, and which part of it that is."""
        found = intersect(have, want)
        assert found is not None
        return self.cut(rank, name, tensor, have, found), found

    def cut(self, rank: int, name: str, tensor: PTensor, have: Box, want: Box) -> str:
        if have == want:
            return name
        suffix = "_".join(str(lo) for lo, _ in inside(want, have))
        out = f"{name}~at_{suffix}_{'_'.join(map(str, extents(want)))}"
        if (rank, out) not in self._cuts:
            self._cuts.add((rank, out))
            shape = tensor.local_shape(extents(want))
            self.code[rank].append(Slice(out, name, extents(have), inside(want, have), shape))
        return out
