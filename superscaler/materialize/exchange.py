"""How what one device made gets to those that read it: collectives, steps of several, exact messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from math import prod

from superscaler.cluster.seconds import LOCAL_KINDS
from superscaler.ir.graph import width
from superscaler.ir.mask import Box, extents
from superscaler.ir.program import Collective, Path, Recv, Send, Value, Way, links
from superscaler.ir.spmd import Fold, Unfoldable
from superscaler.materialize.collectives import REASONS, Match, match, refusal
from superscaler.materialize.reduction import Reduction, reduction
from superscaler.materialize.rvd.paths import Cache
from superscaler.materialize.rvd.route import Route, is_collective, route
from superscaler.materialize.rvd.transitions import Costs
from superscaler.materialize.values import Values
from superscaler.schedule.nodes import Node, Schedule
from superscaler.schedule.segments import SEGMENT_BYTES
from superscaler.schedule.transfers import BACKWARD, Place, Transfer

# As large as torch DDP's default bucket: several are in flight at once, and each is far above the latency.
BUCKET_BYTES = 25 * 2**20


@dataclass(slots=True)
class _Reductions:
    """Transfers whose sums start together: when others wait for one of them, or they are worth an all_reduce."""

    numbers: list[int] = field(default_factory=list)
    weight: int = 0
    is_due: bool = False

    def add(self, number: int, weight: int, *, is_late: bool) -> None:
        self.numbers.append(number)
        self.weight += weight
        self.is_due |= not is_late or self.weight >= SEGMENT_BYTES


class Exchanges(Values):
    """The communication of all devices. With a `fold` only devices whose code tells that of all are written."""

    def __init__(self, schedule: Schedule, world: int, costs: Costs, fold: Fold | None) -> None:
        super().__init__(schedule, world)
        self.fold, self.costs = fold, costs
        self.told = frozenset(range(world)) if fold is None else fold.told
        self.paths: Cache = {}
        # The all_reduces that start next, by group and dtype of the model that trains.
        self.reductions: dict[tuple[tuple[int, ...], str], _Reductions] = {}
        # Steps of a transfer that are taken when it is first read.
        self.pending: dict[int, Iterator[None]] = {}
        # How often which tensors took which path of several steps.
        self.taken: dict[Path, Counter[str]] = {}
        self.messages = self.point = 0
        # Sums of count, bytes and moved bytes of what happens alike: a `Move` each in the end.
        self.moves: dict[tuple[str, bool, str, str, tuple[int, ...], str, int], list[int]] = {}

    def communicate(self, run: Sequence[Node]) -> None:
        """Start the communication that is ready at one point of the order; all_reduces of one group share buckets."""
        self.point += 1
        for node in run:
            transfer = self.schedule.transfers[node.number]
            if transfer.is_local and node.link < 1:
                self._record(transfer, "local", "", (transfer.pieces[0].device,), _why_local(transfer))
            if node.link >= 0:
                self._message(node.number, transfer, node.link)
                continue
            found = None if transfer.is_local else match(transfer, self.fold)
            if found is not None and found.kind == "all_reduce":
                some = self.reductions.setdefault((found.group, self.dtype(transfer, trained=True)), _Reductions())
                some.add(node.number, self._bytes(node.number, trained=True), is_late=transfer.is_to_updates)
            elif found is not None:
                self._collective(node.number, transfer, found)
            elif not transfer.is_local:
                steps = reduction(transfer, self.schedule.edges.fold, self.fold) if transfer.is_to_updates else None
                if steps is not None:
                    self._begin(node.number, self._reduction(node.number, transfer, steps))
                    continue
                if (path := self._path(transfer)) is not None:
                    self._begin(node.number, self._route(node.number, transfer, path))
                    continue
                for link in range(len(transfer.links)):
                    self._message(node.number, transfer, link)
        self.reduce(frozenset())

    def reduce(self, ended: Set[int]) -> None:
        """Start the all_reduces that are due, and those that devices whose backward has `ended` add nothing to."""
        due = [key for key, some in self.reductions.items() if some.is_due or not ended.isdisjoint(key[0])]
        for key in due:
            for bucket in self._buckets(self.reductions.pop(key).numbers):
                self._reduce(bucket, key[0])

    def _record(
        self,
        transfer: Transfer,
        way: str,
        kind: str,
        group: tuple[int, ...],
        why: str,
        size: int = 0,
        moved: int = 0,
        together: int = 1,
    ) -> None:
        if not (copies := self._copies(group)):
            return
        key = (transfer.tensor, transfer.kind == BACKWARD, way, kind, () if way == "local" else group, why, together)
        sums = self.moves.setdefault(key, [0, 0, 0])
        sums[:] = (a + copies * b for a, b in zip(sums, (1, size, moved), strict=True))

    def _copies(self, group: Sequence[int]) -> int:
        """Return how often what these devices do is done, none if it is told of others."""
        return self.fold.copies(group) if self.fold is not None else 1

    def _record_collective(
        self, number: int, kind: str, group: tuple[int, ...], box: Box | None = None, why: str = "", together: int = 1
    ) -> None:
        transfer, size = self.schedule.transfers[number], self._bytes(number, box)
        moved = size * links(kind, len(group))
        self._record(transfer, "collective", kind, group, why or REASONS[kind], size, moved, together)

    def _bytes(self, number: int, box: Box | None = None, *, trained: bool = False) -> int:
        transfer = self.schedule.transfers[number]
        return prod(extents(box or transfer.pieces[0].box)) * width(self.dtype(transfer, trained=trained))

    def _buckets(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the transfers in runs that fill a bucket each; a tensor larger than a bucket goes alone."""
        buckets: list[list[int]] = []
        room = 0
        for number in numbers:
            size = self._bytes(number, trained=True)
            if size > room:
                buckets.append([])
                room = BUCKET_BYTES
            buckets[-1].append(number)
            room -= size
        return buckets

    def _reduce(self, numbers: Sequence[int], group: tuple[int, ...]) -> None:
        transfers = self.schedule.transfers
        dtype = self.dtype(transfers[numbers[0]])
        if len(numbers) == 1:
            self._collective(numbers[0], transfers[numbers[0]], Match("all_reduce", group))
            return
        for number in numbers:
            self._record_collective(number, "all_reduce", group, together=len(numbers))
        for rank in self.told.intersection(piece.device for piece in transfers[numbers[0]].pieces):
            works, sources, ways = [], [], []
            for number in numbers:
                transfer = transfers[number]
                at = {piece.device: p for p, piece in enumerate(transfer.pieces)}
                reader = {reader.device: r for r, reader in enumerate(transfer.readers)}
                sources.append(self.piece_name[number, at[rank]])
                works.append(self.handle(rank, transfer))
                box = transfer.pieces[at[rank]].box
                ways.append(self._way(transfer, Match("all_reduce", group), box, box))
                self.arrived[number, reader[rank]] = works[-1]
            weight = sum(self._bytes(number) for number in numbers)
            how = "all_reduce", tuple(works), tuple(sources), group, tuple(ways)
            self.code[rank].append(Collective(*how, dtype, weight))

    def _message(self, number: int, transfer: Transfer, link: int) -> None:
        p, r = transfer.links[link]
        piece, reader = transfer.pieces[p], transfer.readers[r]
        if piece.device != reader.device and self._is_told(piece.device, reader.device):
            tensor = self.model.tensors[transfer.tensor]
            source, common = self.common(piece.device, self.piece_name[number, p], tensor, piece.box, reader.box)
            work = self._send(transfer, piece.device, reader.device, source, common)
            self.incoming.setdefault((number, r), []).append((work, common))

    def _is_told(self, *devices: int) -> bool:
        """Tell whether the code of devices between which a message goes is written: of all of them, or of none."""
        found = self.told.issuperset(devices)
        if not found and not self.told.isdisjoint(devices):
            assert self.fold is not None
            raise Unfoldable(self.fold.spanned(devices)[0])
        return found

    def _send(self, transfer: Transfer, rank: int, to: int, source: Value, box: Box, why: str = "") -> Value:
        """Send a box of a tensor to a device; return the name of the handle there."""
        shape, dtype = self.model.tensors[transfer.tensor].local_shape(extents(box)), self.dtype(transfer)
        self.messages += 1
        weight = prod(shape) * width(dtype)
        self._record(transfer, "messages", "send", (rank, to), why or refusal(transfer), weight, weight)
        self.code[rank].append(Send(source, to, self.messages, weight, self.point))
        work = self.handle(to, transfer)
        self.code[to].append(Recv(work, rank, self.messages, shape, dtype, self.point))
        return work

    def _collective(self, number: int, transfer: Transfer, found: Match) -> None:
        self._record_collective(number, found.kind, found.group)
        held = {piece.device: (p, piece) for p, piece in enumerate(transfer.pieces)}
        readers = {reader.device: (r, reader) for r, reader in enumerate(transfer.readers)}
        for rank in self.told.intersection((*held, *readers)):
            source, have = None, transfer.pieces[0].box
            if rank in held:
                source, have = self.piece_name[number, held[rank][0]], held[rank][1].box
            box = readers[rank][1].box if rank in readers else transfer.pieces[0].box
            work = self._start(rank, transfer, found, source, have, box)
            if rank in readers and not (found.kind == "broadcast" and rank in held):
                self.arrived[number, readers[rank][0]] = work

    def _start(self, rank: int, transfer: Transfer, how: Match, source: Value | None, have: Box, want: Box) -> Value:
        """Start a collective on a device; return the name of its handle."""
        dtype, work = self.dtype(transfer), self.handle(rank, transfer)
        ways, weight = (self._way(transfer, how, have, want),), prod(extents(have)) * width(dtype)
        self.code[rank].append(Collective(how.kind, (work,), (source,), how.group, ways, dtype, weight))
        return work

    def _way(self, transfer: Transfer, how: Match, have: Box, want: Box) -> Way:
        tensor, view = self.model.tensors[transfer.tensor], extents(have)
        return Way(view, how.take, how.give, tensor.local_shape(view), tensor.local_shape(extents(want)))

    def finish(self, places: Iterable[Place]) -> None:
        """Take the steps that are left of all transfers to these places, in one order on all devices."""
        numbers = {number for place in places for number, _ in self.readers_of.get(place, ())}
        for number in sorted(numbers & self.pending.keys()):
            self.point += 1
            for _ in self.pending.pop(number):
                self.point += 1

    def _begin(self, number: int, steps: Iterator[None]) -> None:
        """Start the first step; the others follow at the first read, so that nothing is waited for before."""
        next(steps, None)
        self.pending[number] = steps

    def _reduction(self, number: int, transfer: Transfer, steps: Reduction) -> Iterator[None]:
        """Make all items step by step; what a reader adds up in the end is there, or comes in a message. Yields before
        each wait.
        """
        tensor = self.model.tensors[transfer.tensor]
        names: dict[tuple[int, int], Value] = {}
        for _, level in groupby(sorted(range(len(steps.items)), key=steps.level), key=steps.level):
            works: list[tuple[int, int, Value]] = []
            for n in level:
                item = steps.items[n]
                for how in item.how:
                    first = next(rank for rank in how.group if rank in item.of)
                    self._record_collective(number, how.kind, how.group, steps.items[item.of[first][0]].box)
                for rank, (m, source) in item.of.items():
                    if m < 0:
                        if (number, n) in self.piece_name:
                            names[n, rank] = self.piece_name[number, n]
                    elif self._is_told(source, rank):
                        have = steps.items[m].box
                        collective = next((how for how in item.how if rank in how.group), None)
                        if collective is None:
                            work = self._send(transfer, source, rank, names[m, source], have)
                        else:
                            work = self._start(rank, transfer, collective, names[m, rank], have, item.box)
                        works.append((n, rank, work))
            if works:
                yield
            for n, rank, work in works:
                names[n, rank] = self.wait(rank, work, tensor, steps.items[n].box)
        for r, (reader, pairs) in enumerate(zip(transfer.readers, steps.reads, strict=True)):
            self.given[number, r] = []
            for n, rank in pairs:
                if not self._is_told(rank, reader.device):
                    continue
                name, common = self.common(rank, names[n, rank], tensor, steps.items[n].box, reader.box)
                if rank == reader.device:
                    self.given[number, r].append((name, common))
                else:
                    work = self._send(transfer, rank, reader.device, name, common)
                    self.incoming.setdefault((number, r), []).append((work, common))

    def _path(self, transfer: Transfer) -> Route | None:
        dtype = self.dtype(transfer, trained=True)
        return None if dtype == "bool" else route(transfer, self.fold, self.costs, width(dtype), self.paths)

    def _route(self, number: int, transfer: Transfer, found: Route) -> Iterator[None]:
        """Take the steps of a path, each after the one before has arrived. Yields before each wait."""
        tensor, path = self.model.tensors[transfer.tensor], found.path
        names = {
            piece.device: self.piece_name[number, p]
            for p, piece in enumerate(transfer.pieces)
            if (number, p) in self.piece_name
        }
        before = found.boxes(path.source)
        copies = self._copies(sorted({*before, *found.boxes(path.goal)}))
        if len(path.steps) > 1 and copies:
            dtype = self.dtype(transfer)
            steps = found.steps(width(dtype))
            taken = Path(transfer.kind == BACKWARD, extents(found.whole), dtype, path.source, steps)
            self.taken.setdefault(taken, Counter())[transfer.tensor] += copies
        for n, step in enumerate(path.steps):
            after = found.boxes(step.layout)
            parts: dict[int, list[tuple[Value, Box]]] = {rank: [] for rank in after if rank in self.told}
            waits: list[tuple[int, Value, Box]] = []
            many = f"step {n + 1} of {len(path.steps)} of " if len(path.steps) > 1 else ""
            why = f"{many}the cheapest path to another layout"
            for group in step.groups:
                if is_collective(step.kind):
                    self._record_collective(number, step.kind, group, before[group[0]], why)
                    how = Match(step.kind, group, step.take, step.give)
                    for rank in self.told.intersection(group):
                        work = self._start(rank, transfer, how, names[rank], before[rank], after[rank])
                        waits.append((rank, work, after[rank]))
                elif step.kind in LOCAL_KINDS:
                    for rank in self.told.intersection(group):
                        is_kept = step.kind == "chunk" or rank == group[0]
                        if is_kept:
                            name = self.cut(rank, names[rank], tensor, before[rank], after[rank])
                            parts[rank].append((name, after[rank]))
                else:
                    for to in (to for to in group[1:] if self._is_told(group[0], to)):
                        name, common = self.common(group[0], names[group[0]], tensor, before[group[0]], after[to])
                        waits.append((to, self._send(transfer, group[0], to, name, common, why), common))
            for rank in self.told.intersection(step.kept):
                parts[rank].append(self.common(rank, names[rank], tensor, before[rank], after[rank]))
            if waits:
                yield
            for rank, work, box in waits:
                parts[rank].append((self.wait(rank, work, tensor, box), box))
            names = {rank: self.placed(rank, transfer, some, after[rank]) for rank, some in parts.items()}
            before = after
        for r, reader in enumerate(transfer.readers):
            if reader.device in names:
                self.given[number, r] = [(names[reader.device], reader.box)]


def _why_local(transfer: Transfer) -> str:
    several = len(transfer.links) > len(transfer.readers) or any(len(piece.places) > 1 for piece in transfer.pieces)
    return "summed or joined where it is read" if several else "made where it is read"
