"""Communication as instructions: the actions of transfers, printed one by one. Only this module writes sends and
collectives.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import prod

from superscaler.collectives import KINDS
from superscaler.ir.grid import HOSTS
from superscaler.ir.layout import Provenance
from superscaler.ir.mask import Box, extents
from superscaler.ir.model import PTensor, width
from superscaler.ir.program import Collective, CollectiveArg, Copy, Recv, Send, Value
from superscaler.materialize.actions import Arrive, Bucket, Start
from superscaler.materialize.local_tensors import Code
from superscaler.materialize.lowering import PATH, Lowering, made_here
from superscaler.materialize.steps import CollectiveStep, Cut, Join, Message, Slot, common
from superscaler.schedule.dependencies import Node
from superscaler.schedule.transfers import BACKWARD, Transfer


class Writer:
    """A writer of actions of transfers into the code of devices.

    Values are addressed by the number of their transfer and their slot: by name after they arrived, by handle before.
    """

    def __init__(self, lowering: Lowering, code: Code) -> None:
        self.lowering, self.code = lowering, code
        self.transfers, self.options = lowering.transfers, lowering.options
        self.names: dict[tuple[int, int, int], Value] = {}
        self.works: dict[tuple[int, int, int], Value] = {}
        self._messages = self._started = 0
        self._microbatches: dict[int, int] = {}
        # By (sender, receiver, microbatch), and by point.
        self._numbered = Counter[tuple[int, int, int]]()
        self._points: dict[int, int] = {}

    def is_started(self, number: int, r: int) -> bool:
        """Return whether all slots that a reader of a transfer reads have been started."""
        keys = ((number, *slot[:2]) for slot in self.lowering.lowered(number).ends[r])
        return all(key in self.names or key in self.works for key in keys)

    def read(self, number: int, r: int) -> Value | None:
        """Return the value that a reader of a transfer gets; None for a gradient without a maker."""
        transfer, slots = self.transfers[number], self.lowering.lowered(number).ends[r]
        reader = transfer.readers[r]
        if len(slots) == 1 and slots[0].box == reader.box and (key := (number, *slots[0][:2])) in self.names:
            return self.names[key]
        rank, parts, on_their_way = reader.device, list[tuple[Value, Box]](), list[tuple[Value, Slot]]()
        for slot in slots:
            key = (number, slot.device, slot.item)
            if key in self.names:
                box = common(slot.box, reader.box)
                parts.append((self.code.cut(rank, self.names[key], transfer.tensor, slot.box, box), box))
            else:
                on_their_way.append((self.works[key], slot))
        # In the order in which they were started.
        for work, slot in sorted(on_their_way, key=lambda found: found[0]):
            name, box = self.code.wait(rank, work, transfer.tensor, slot.box), common(slot.box, reader.box)
            self.names[number, slot.device, slot.item] = name
            parts.append((self.code.cut(rank, name, transfer.tensor, slot.box, box), box))
        if not parts and transfer.kind == BACKWARD:
            return None
        return self._join(number, rank, sorted(parts, key=lambda part: (part[1], part[0])), reader.box)

    def _join(self, number: int, rank: int, parts: Sequence[tuple[Value, Box]], box: Box) -> Value:
        transfer = self.transfers[number]
        return self.code.join(rank, self._like(number), transfer.tensor, parts, box, self.options.dtype(transfer))

    def _like(self, number: int) -> Value:
        transfer, microbatch = self.transfers[number], self._microbatch(number) if self.options.microbatches else -1
        return self.code.like(transfer.tensor, transfer.kind == BACKWARD, microbatch)

    def _microbatch(self, number: int) -> int:
        """Return the microbatch that a transfer moves, -1 if it moves none or several."""
        if number not in self._microbatches:
            transfer = self.transfers[number]
            found = transfer.microbatches
            if found == {-1}:
                found = {place.key[1] for reader in transfer.readers for place in reader.places}
            self._microbatches[number] = self.code.common(found)
        return self._microbatches[number]

    def _handle(self, number: int, out: Slot) -> Value:
        work = self.code.fresh(out.device, self._like(number)._replace(is_handle=True))
        self.works[number, out.device, out.item] = work
        return work

    def _name(self, number: int, slot: Slot) -> Value:
        return self.names[number, slot.device, slot.item]

    def arrive(self, action: Arrive) -> None:
        """Wait for the results of steps."""
        number, tensor = action.number, self.transfers[action.number].tensor
        for step in action.steps:
            for out in step.outs if isinstance(step, CollectiveStep) else [step.out]:
                key, is_here = (number, out.device, out.item), action.owner in (None, out.device % HOSTS)
                if is_here and key in self.works and key not in self.names:
                    self.names[key] = self.code.wait(out.device, self.works[key], tensor, out.box)

    def start(self, action: Start) -> None:
        """Start a message, or make a value of others on its device."""
        number, step = action.number, action.step
        rank, key = step.out.device, (number, step.out.device, step.out.item)
        if isinstance(step, Join):
            parts = [(self._name(number, source), source.box) for source in step.sources]
            self.names[key] = self._join(number, rank, parts, step.out.box)
            return
        source, tensor = self._name(number, step.source), self.transfers[number].tensor
        name = self.code.cut(step.source.device, source, tensor, step.source.box, step.out.box)
        if isinstance(step, Cut):
            self.names[key] = name
        else:
            self._send(number, step, name, action.point)

    def _send(self, number: int, step: Message, name: Value, point: int) -> None:
        transfer, rank, to = self.transfers[number], step.source.device, step.out.device
        shape = self._tensor(number).local_shape(extents(step.out.box))
        dtype = self.options.dtype(transfer)
        weight = prod(extents(step.out.box)) * width(dtype)
        self._started += 1
        notes, work = (self._note(transfer, step.why),), self._handle(number, step.out)
        if step.is_copy:
            self.code.write(rank, Copy(work, name, rank < to, weight, notes))
            return
        message, at = self._message(number, rank, to, point)
        self.code.write(rank, Send(name, to, message, weight, at, notes))
        self.code.write(to, Recv(work, rank, message, shape, dtype, at))

    def _message(self, number: int, rank: int, to: int, point: int) -> tuple[int, int]:
        """Return the number of a message and that of its starting point. In a loop both depend on the microbatch."""
        self._messages += 1
        if self.options.microbatches is None:
            return self._messages, point
        pair = rank, to, self._microbatch(number)
        self._numbered[pair] += 1
        message, world = self._numbered[pair] * (self.options.microbatches.total + 1) + pair[-1], len(self.code.of)
        # The number of the first message that starts at this point.
        return message, self._points.setdefault(point, (message * world + rank) * world + to)

    def collective(self, action: Bucket) -> None:
        """Start the collectives of a bucket as one."""
        bucket, first = action.entries, action.entries[0]
        how, weight, own = first.step.how, sum(entry.bytes for entry in bucket), self.transfers[first.number]
        # The dtype of the sources and results, if it is another one than that in which they are sent.
        other = "" if self.options.dtype(own) == first.dtype else self.options.dtype(own)
        more = how.root, "" if first.casts else other, other if first.casts else ""
        largest = KINDS[how.kind].takes_largest and self._tensor(first.number).largest
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
            self.code.write(rank, Collective(how.kind, *some, first.dtype, weight, largest, notes, *more))

    def _tensor(self, number: int) -> PTensor:
        return self.code.tensors[self.transfers[number].tensor]

    def _note(self, transfer: Transfer, why: str) -> Provenance:
        return Provenance(transfer.tensor, transfer.kind == BACKWARD, why, None, self._started)

    def notes(self, order: Iterable[Node]) -> Counter[Provenance]:
        """Return the number of transfers that stay on a device or take a path."""
        found = Counter[Provenance]()
        for node in (node for node in order if node.kind == "C"):
            number, transfer = node.number, self.transfers[node.number]
            if transfer.is_local:
                if node.link < 1 and (copies := self._copies(number, (transfer.pieces[0].device,))):
                    found[made_here(transfer)] += copies
            elif (route := self.lowering.lowered(number).route) is not None and len(route.path.steps) > 1:
                devices = {*route.boxes(route.path.source), *route.boxes(route.path.goal)}
                if copies := self._copies(number, sorted(devices)):
                    path = route.described(self.options.dtype(transfer), transfer.kind == BACKWARD)
                    found[Provenance(transfer.tensor, path.is_backward, PATH, path)] += copies
        return found

    def _copies(self, number: int, devices: Sequence[int]) -> int:
        """Return the number of transfers that a compiled one stands for; 0 if another place of the fold counts it."""
        fold, own = self.options.fold, self.options.microbatches
        copies = fold.copies(devices) if fold is not None else 1
        if own is not None and 0 <= self._microbatch(number) < own.inner:
            # The first microbatch also counts for those that are not compiled.
            copies *= 1 + (own.total - own.few) // own.inner
        return copies
