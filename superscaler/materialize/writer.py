"""Communication as instructions, in the order of the schedule. Only this module writes sends and collectives."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from math import prod

from superscaler.collectives import KINDS, ONE, PART, TILE
from superscaler.ir.grid import HOSTS
from superscaler.ir.layout import Provenance
from superscaler.ir.mask import Box, extents
from superscaler.ir.model import PTensor, width
from superscaler.ir.program import Collective, CollectiveArg, Copy, Recv, Send, Value
from superscaler.materialize import steps
from superscaler.materialize.buckets import Buckets, Entry
from superscaler.materialize.local_tensors import Code
from superscaler.materialize.lowering import PATH, Lowering, made_here
from superscaler.materialize.steps import Cut, Join, LoweringOptions, Message, Slot, Step
from superscaler.schedule.dependencies import Node
from superscaler.schedule.transfers import BACKWARD, Transfer

# The most reduce-scatters of gradients in flight per group: one is sent while the next one is made. Those that another
# round follows are in flight until the next backward has ended, since a wait between two of them would hold up that.
FLYING = 2


class Writer:
    """A writer of the steps of transfers into the code of devices.

    Values are addressed by the number of their transfer and their slot: by name after they arrived, by handle before.
    """

    def __init__(self, transfers: Sequence[Transfer], code: Code, options: LoweringOptions) -> None:
        self.transfers, self.code, self.options = transfers, code, options
        self.buckets = Buckets(options.policy.overlaps)
        self.names: dict[tuple[int, int, int], Value] = {}
        self.works: dict[tuple[int, int, int], Value] = {}
        self.lowered = Lowering(transfers, options).lowered
        # Reduce-scatters in flight, by group. Inputs stay alive until the wait; then `on_arrival(number)` is called.
        self.on_arrival: Callable[[int], None] = lambda number: None
        self._in_flight: dict[tuple[int, ...], list[Sequence[Entry]]] = {}
        # The number of forwards and backwards so far, and the number at the start of a transfer with rounds left.
        self._works_so_far = 0
        self._begun: dict[int, int] = {}
        # Transfers with rounds left, and the number of finished rounds. Rounds follow at the first read, so that
        # nothing is waited for earlier; but the next round of reduce-scatters starts once they have arrived.
        self._left: set[int] = set()
        # By work, the transfers that it reads of which some had rounds left.
        self._awaited: dict[Hashable, list[int]] = {}
        self._done = Counter[int]()
        self._messages = self._started = self._point = 0
        # By identity of a transfer.
        self._microbatches: dict[int, int] = {}
        self._numbered = Counter[tuple[int, int, int]]()
        self._points: dict[int, int] = {}
        # The number of transfers that stay on a device or take a path.
        self.notes: Counter[Provenance] = Counter()

    def start(self, run: Sequence[Node]) -> None:
        """Start the communication that is ready at one point of the order."""
        self._point += 1
        for node in run:
            number, transfer = node.number, self.transfers[node.number]
            if transfer.is_local:
                if node.link < 1 and (copies := self._copies(transfer, (transfer.pieces[0].device,))):
                    self.notes[made_here(transfer)] += copies
                continue
            first, *left = self.lowered(number).rounds
            if node.link >= 0:
                out = len(transfer.pieces) + node.link
                first = tuple(step for step in first if isinstance(step, Message) and step.out.item == out)
            self._count_path(number)
            if left:
                self._left.add(number)
                for work in {place[:3] for reader in transfer.readers for place in reader.places}:
                    self._awaited.setdefault(work, []).append(number)
            self._start(number, first)
        self.flush(frozenset())

    def _start(self, number: int, some: Sequence[Step], is_due: bool = False) -> None:
        """Write steps of a transfer. A collective joins a bucket if that delays no reader."""
        transfer = self.transfers[number]
        is_joined = number not in self._left or self._is_joined(number)
        for step in some:
            if is_joined and isinstance(step, steps.CollectiveStep) and KINDS[step.how.kind].is_bucketed:
                # What is rounded has sources of another dtype than what is a half.
                dtype = self._wire_dtype(number, step, trained=True) + "." * self._casts(number, step)
                turn = self.options.turn(transfer)
                self.buckets.add(self._entry(number, step), transfer, dtype, self._tensor(number).largest, turn, is_due)
            else:
                self._write(number, step)

    def _is_joined(self, number: int) -> bool:
        """Return whether all rounds of a transfer may wait in buckets."""
        each = (step for some in self.lowered(number).rounds for step in some)
        is_sent = any(isinstance(step, Message) and not step.is_copy for step in each)
        return self.transfers[number].is_to_updates and not is_sent

    def _goes_on_to_hosts(self, number: int) -> bool:
        """Return whether only copies to hosts are left of a transfer."""
        left = [step for some in self.lowered(number).rounds[1:] for step in some]
        return number in self._left and all(isinstance(step, Message) and step.is_copy for step in left)

    def flush(self, ended: Set[int]) -> None:
        """Start the buckets that are due, and all buckets of devices whose backward has `ended`."""
        for bucket in list(self.buckets.take(ended)):
            self._collective(bucket)

    def turn(self, devices: Set[int], microbatch: int) -> None:
        """Release the gradients of other microbatches when devices turn to this one, and wait for the reduce-scatters
        that started first.
        """
        self._works_so_far += 1
        if self.buckets.close(devices, microbatch):
            self.flush(frozenset())
        for group, flying in self._in_flight.items():
            first = self.transfers[flying[0][0].number].microbatches if flying else {-1}
            if not {-1, microbatch} & first and not devices.isdisjoint(group):
                self._arrive(flying)

    def finish_before(self, works: Iterable[Hashable]) -> None:
        """Write the remaining rounds of all transfers to some work, given as the places that it reads begin."""
        if self._left:
            self.finish(number for work in works for number in self._awaited.pop(work, ()))

    def finish(self, numbers: Iterable[int]) -> None:
        """Write the remaining rounds of transfers, in the same order on all devices."""
        left = sorted(self._left.intersection(numbers))
        joined = [number for number in left if self._is_joined(number)]
        self._finish(joined, {piece.device for number in joined for piece in self.transfers[number].pieces})
        for number in sorted({*left}.difference(joined)):
            self._finish([number], frozenset())
        self._left.difference_update(left)

    def _finish(self, numbers: Sequence[int], ended: Set[int]) -> None:
        """Write the remaining rounds of transfers together."""
        self.flush(ended)
        while going := [n for n in numbers if self._done[n] + 1 < len(self.lowered(n).rounds)]:
            self._point += 1
            for number in going:
                self._go_on(number)
            self.flush(ended)

    def _go_on(self, number: int, is_due: bool = False) -> None:
        """Wait for a round of a transfer, and start the next one."""
        first, second, *_ = self.lowered(number).rounds[self._done[number] :]
        for step in first:
            self._receive(number, step)
        self._done[number] += 1
        self._start(number, second, is_due)

    def is_started(self, number: int, r: int) -> bool:
        """Return whether all slots that a reader of a transfer reads have been started."""
        keys = ((number, *slot[:2]) for slot in self.lowered(number).ends[r])
        return all(key in self.names or key in self.works for key in keys)

    def read(self, number: int, r: int) -> Value | None:
        """Return the value that a reader of a transfer gets; None for a gradient without a maker."""
        transfer, slots = self.transfers[number], self.lowered(number).ends[r]
        reader = transfer.readers[r]
        if len(slots) == 1 and slots[0].box == reader.box and (key := (number, *slots[0][:2])) in self.names:
            return self.names[key]
        rank, parts, on_their_way = reader.device, list[tuple[Value, Box]](), list[tuple[Value, Slot]]()
        for slot in slots:
            key = (number, slot.device, slot.item)
            if key in self.names:
                box = steps.common(slot.box, reader.box)
                parts.append((self.code.cut(rank, self.names[key], transfer.tensor, slot.box, box), box))
            else:
                on_their_way.append((self.works[key], slot))
        # In the order in which they were started.
        for work, slot in sorted(on_their_way, key=lambda found: found[0]):
            name, box = self.code.wait(rank, work, transfer.tensor, slot.box), steps.common(slot.box, reader.box)
            self.names[number, slot.device, slot.item] = name
            parts.append((self.code.cut(rank, name, transfer.tensor, slot.box, box), box))
        if not parts and transfer.kind == BACKWARD:
            return None
        return self._join(transfer, rank, sorted(parts, key=lambda part: (part[1], part[0])), reader.box)

    def _join(self, transfer: Transfer, rank: int, parts: Sequence[tuple[Value, Box]], box: Box) -> Value:
        dtype = self.options.dtype(transfer)
        return self.code.join(rank, self._like(transfer), transfer.tensor, parts, box, dtype)

    def _like(self, transfer: Transfer) -> Value:
        microbatch = self._microbatch(transfer) if self.options.microbatches else -1
        return self.code.like(transfer.tensor, transfer.kind == BACKWARD, microbatch)

    def _microbatch(self, transfer: Transfer) -> int:
        """Return the microbatch that a transfer moves, -1 if it moves none or several."""
        if id(transfer) not in self._microbatches:
            found = transfer.microbatches
            if found == {-1}:
                found = {place.key[1] for reader in transfer.readers for place in reader.places}
            self._microbatches[id(transfer)] = self.code.common(found)
        return self._microbatches[id(transfer)]

    def _handle(self, number: int, out: Slot) -> Value:
        work = self.code.fresh(out.device, self._like(self.transfers[number])._replace(is_handle=True))
        self.works[number, out.device, out.item] = work
        return work

    def _name(self, number: int, slot: Slot) -> Value:
        return self.names[number, slot.device, slot.item]

    def wait_before_update(self, number: int, owner: int) -> None:
        """Finish a transfer before an update changes its sources, and wait on that device for the steps started there.
        Updates themselves wait for messages and broadcasts.
        """
        self.finish([number])
        for step in self.lowered(number).rounds[0]:
            if not isinstance(step, steps.CollectiveStep) or KINDS[step.how.kind].held is not ONE:
                self._receive(number, step, owner)

    def _receive(self, number: int, step: Step, owner: int | None = None) -> None:
        """Wait for the result of a step, on one device or on all."""
        tensor = self.transfers[number].tensor
        outs = step.outs if isinstance(step, steps.CollectiveStep) else [step.out]
        for out in outs:
            key = number, out.device, out.item
            is_here = owner in (None, out.device % HOSTS)
            if is_here and key in self.works and key not in self.names:
                self.names[key] = self.code.wait(out.device, self.works[key], tensor, out.box)

    def _write(self, number: int, step: Step) -> None:
        transfer = self.transfers[number]
        if isinstance(step, steps.CollectiveStep):
            self._collective([self._entry(number, step)])
            return
        rank = step.out.device
        if isinstance(step, Join):
            parts = [(self._name(number, source), source.box) for source in step.sources]
            self.names[number, rank, step.out.item] = self._join(transfer, rank, parts, step.out.box)
            return
        source = self._name(number, step.source)
        name = self.code.cut(step.source.device, source, transfer.tensor, step.source.box, step.out.box)
        if isinstance(step, Cut):
            self.names[number, rank, step.out.item] = name
        else:
            self._send(number, step, name)

    def _send(self, number: int, step: Message, name: Value) -> None:
        transfer, rank, to = self.transfers[number], step.source.device, step.out.device
        shape = self._tensor(number).local_shape(extents(step.out.box))
        dtype = self.options.dtype(transfer)
        weight = prod(extents(step.out.box)) * width(dtype)
        self._started += 1
        notes, work = (self._note(transfer, step.why),), self._handle(number, step.out)
        if step.is_copy:
            self.code.write(rank, Copy(work, name, rank < to, weight, notes))
            return
        message, point = self._message(transfer, rank, to)
        self.code.write(rank, Send(name, to, message, weight, point, notes))
        self.code.write(to, Recv(work, rank, message, shape, dtype, point))

    def _message(self, transfer: Transfer, rank: int, to: int) -> tuple[int, int]:
        """Return the number of a message and that of its starting point. In a loop both depend on the microbatch."""
        self._messages += 1
        if self.options.microbatches is None:
            return self._messages, self._point
        pair = rank, to, self._microbatch(transfer)
        self._numbered[pair] += 1
        message, world = self._numbered[pair] * (self.options.microbatches.total + 1) + pair[-1], len(self.code.of)
        # The number of the first message that starts at this point.
        return message, self._points.setdefault(self._point, (message * world + rank) * world + to)

    def _collective(self, bucket: Sequence[Entry]) -> None:
        """Start the collectives of a bucket as one."""
        how, weight = bucket[0].step.how, sum(entry.bytes for entry in bucket)
        kind = KINDS[how.kind]
        first = self.transfers[bucket[0].number]
        own, dtype = self.options.dtype(first), self._wire_dtype(bucket[0].number, bucket[0].step)
        other = own if own != dtype else ""
        casts = self._casts(bucket[0].number, bucket[0].step)
        more = how.root, "" if casts else other, other if casts else ""
        largest = kind.takes_largest and self._tensor(bucket[0].number).largest
        self._started += 1
        notes = tuple(self._note(self.transfers[entry.number], entry.step.why) for entry in bucket)
        for pairs in zip(*(entry.step.slots for entry in bucket), strict=True):
            works, sources, args = list[Value | None](), list[Value | None](), list[CollectiveArg]()
            for entry, (source, out) in zip(bucket, pairs, strict=True):
                sources.append(None if source is None else self._name(entry.number, source))
                works.append(None if out is None else self._handle(entry.number, out))
                args.append(entry.step.arg(self._tensor(entry.number), source, out))
            some = tuple(works), tuple(sources), how.group, tuple(args)
            rank = next(slot.device for slot in pairs[0] if slot is not None)
            self.code.write(rank, Collective(how.kind, *some, dtype, weight, largest, notes, *more))
        if kind.ends == (PART, TILE) and self.transfers[bucket[0].number].is_to_updates:
            flying = self._in_flight.setdefault(how.group, [])
            flying.append(bucket)
            self._begun[bucket[0].number] = self._works_so_far
            while self._is_over(flying):
                self._arrive(flying)

    def _is_over(self, flying: Sequence[Sequence[Entry]]) -> bool:
        """Return whether the first bucket in flight has to arrive."""
        first = flying[0][0].number
        return self._begun[first] < self._works_so_far if first in self._left else len(flying) > FLYING

    def _arrive(self, flying: list[Sequence[Entry]]) -> None:
        """Wait for the first bucket in flight, and start the next rounds of its transfers."""
        bucket = flying.pop(0)
        for entry in bucket:
            if self._goes_on_to_hosts(entry.number):
                self.finish([entry.number])
            else:
                self._receive(entry.number, entry.step)
            if entry.number not in self._left:
                self.on_arrival(entry.number)
        going = {entry.number: None for entry in bucket if self._can_go_on(entry.number)}
        for number in going:
            self._go_on(number, is_due=True)
        if going:
            self.flush(frozenset())

    def _can_go_on(self, number: int) -> bool:
        """Return whether the second round of a transfer can start: all devices have started the first one."""
        first = self.lowered(number).rounds[0]
        outs = (out for step in first if isinstance(step, steps.CollectiveStep) for out in step.outs)
        is_started = all((number, out.device, out.item) in self.works for out in outs)
        return number in self._left and not self._done[number] and self._is_joined(number) and is_started

    def _entry(self, number: int, step: steps.CollectiveStep) -> Entry:
        elements = step.arg(self._tensor(number), *step.slots[0]).elements
        dtypes = (self._wire_dtype(number, step, trained=trained) for trained in (False, True))
        return Entry(number, step, *(elements * width(dtype) for dtype in dtypes))

    def _tensor(self, number: int) -> PTensor:
        return self.code.tensors[self.transfers[number].tensor]

    def _wire_dtype(self, number: int, step: steps.CollectiveStep, *, trained: bool = False) -> str:
        return self.options.wire_dtype(self.transfers[number], self.lowered(number), step, trained=trained)

    def _casts(self, number: int, step: steps.CollectiveStep) -> bool:
        return self.options.casts(self.transfers[number], self.lowered(number), step)

    def _note(self, transfer: Transfer, why: str) -> Provenance:
        return Provenance(transfer.tensor, transfer.kind == BACKWARD, why, None, self._started)

    def _copies(self, transfer: Transfer, devices: Sequence[int]) -> int:
        """Return the number of transfers that a compiled one stands for; 0 if another place of the fold counts it."""
        fold, own = self.options.fold, self.options.microbatches
        copies = fold.copies(devices) if fold is not None else 1
        if own is not None and 0 <= self._microbatch(transfer) < own.inner:
            # The first microbatch also counts for those that are not compiled.
            copies *= 1 + (own.total - own.few) // own.inner
        return copies

    def _count_path(self, number: int) -> None:
        transfer, found = self.transfers[number], self.lowered(number).route
        if found is not None and len(found.path.steps) > 1:
            devices = {*found.boxes(found.path.source), *found.boxes(found.path.goal)}
            if copies := self._copies(transfer, sorted(devices)):
                path = found.described(self.options.dtype(transfer), transfer.kind == BACKWARD)
                self.notes[Provenance(transfer.tensor, path.is_backward, PATH, path)] += copies
