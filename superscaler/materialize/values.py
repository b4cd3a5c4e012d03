"""Values that parts make and read: their names, and the transfers that move them."""

from collections.abc import Sequence

from superscaler.ir.mask import Box
from superscaler.ir.program import Value
from superscaler.materialize.writer import Writer
from superscaler.schedule.transfers import BACKWARD, End, Place

EndOf = tuple[int, int]


def _ends_at(sides: Sequence[Sequence[End]]) -> dict[Place, tuple[EndOf, ...]]:
    """Return, for each place, its ends on one side of all transfers."""
    found = dict[Place, tuple[EndOf, ...]]()
    for number, ends in enumerate(sides):
        for at, end in enumerate(ends):
            for place in end.places:
                found[place] = (*found.get(place, ()), (number, at))
    return found


class Values:
    """The ends of transfers by place. A piece or reader is addressed by (number of the transfer, position in it)."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.code, self.transfers = writer, writer.code, writer.transfers
        self.pieces_of = _ends_at([transfer.pieces for transfer in self.transfers])
        self.readers_of = _ends_at([transfer.readers for transfer in self.transfers])
        self._read: dict[EndOf, Value | None] = {}
        self._totals: dict[tuple[EndOf, ...], Value] = {}
        self._sums: dict[EndOf, bool] = {}
        # The sums so far.
        self._so_far: dict[tuple[EndOf, ...], Value] = {}

    def made(self, place: Place, name: Value, rank: int, box: Box | None = None) -> None:
        """Record that a value exists, and add it to its sums. `box`: given if the value may be sent in pieces."""
        whole = name
        for number, p in self.pieces_of.get(place, ()):
            names, key, transfer = self.writer.names, (number, rank, p), self.transfers[number]
            name = whole if box is None else self.code.cut(rank, whole, transfer.tensor, box, transfer.pieces[p].box)
            names[key] = self.code.add(rank, names[key], name) if key in names else name

    def total(self, place: Place, tensor: str, box: Box) -> Value | None:
        """Return the sum that a backward adds a gradient to: all gradients of the same box with one reader. None for a
        gradient that is a value of its own.
        """
        (number, p), *others = self.pieces_of.get(place, ((-1, 0),))
        if others or not self._is_sum(number, p) or box != self.transfers[number].pieces[p].box:
            return None
        places, key = self.transfers[number].pieces[p].places, (number, place.key[0], p)
        if key not in self.writer.names:
            microbatch = self.code.common(other.key[1] for other in places) if self.code.inner else -1
            self.writer.names[key] = self.code.fresh(place.key[0], self.code.like(tensor, True, microbatch))
        return self.writer.names[key]

    def _is_sum(self, number: int, p: int) -> bool:
        """Return whether a piece is a sum whose values are in no other piece."""
        if (number, p) not in self._sums:
            places = self.transfers[number].pieces[p].places if number >= 0 else ()
            self._sums[number, p] = len(places) > 1 and all(len(self.pieces_of[place]) == 1 for place in places)
        return self._sums[number, p]

    def value(self, place: Place) -> Value | None:
        """Return the name of the value read at a place: the sum of its transfers, None if nothing arrives."""
        owners = self.readers_of.get(place, ())
        if len(owners) == 1:
            return self._of(owners[0])
        if owners in self._totals:
            return self._totals[owners]
        so_far = [self._so_far[owners]] if owners in self._so_far else []
        names = so_far + [name for owner in owners if (name := self._of(owner)) is not None]
        if len(names) < 2:
            return names[0] if names else None
        transfer = self.transfers[owners[0][0]]
        reader = self._end(place)
        like, parts = self.code.like(transfer.tensor, transfer.kind == BACKWARD), [(name, reader.box) for name in names]
        if self.code.inner:
            like = like._replace(microbatch=self.code.common(name.microbatch for name in names))
        dtype = self.writer.options.dtype(transfer)
        self._totals[owners] = self.code.join(reader.device, like, transfer.tensor, parts, reader.box, dtype)
        return self._totals[owners]

    def gradient(self, place: Place, count: int, box: Box) -> Value | None:
        """Return the name of the gradient that an update reads, joined from `count` pieces; None if nothing arrives."""
        places = [own for n in range(count) if (own := place._replace(number=n)) in self.readers_of]
        parts = [(name, self._end(own).box) for own in places if (name := self.value(own)) is not None]
        if len(parts) < 2:
            return parts[0][0] if parts else None
        transfer = self.transfers[self.readers_of[places[0]][0][0]]
        like, dtype = self.code.like(transfer.tensor, is_gradient=True), self.writer.options.dtype(transfer)
        return self.code.join(place.key[0], like, transfer.tensor, parts, box, dtype)

    def _end(self, place: Place) -> End:
        number, r = self.readers_of[place][0]
        return self.transfers[number].readers[r]

    def add_up(self, number: int) -> None:
        """Add an arrived transfer to its sums."""
        for r, reader in enumerate(self.transfers[number].readers):
            owners = self.readers_of[reader.places[0]]
            # Collectives of other groups may be in buckets that wait.
            if len(owners) < 2 or not self.writer.is_started(number, r):
                continue
            if (name := self._of((number, r))) is not None:
                so_far = self._so_far.get(owners)
                self._so_far[owners] = name if so_far is None else self.code.add(reader.device, so_far, name)
                self._read[number, r] = None

    def _of(self, owner: EndOf) -> Value | None:
        """Return the name of a reader's value; the first call joins the slots that arrived for it."""
        if owner not in self._read:
            self._read[owner] = self.writer.read(*owner)
        return self._read[owner]
