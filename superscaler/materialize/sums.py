"""Sums of gradients that several groups of devices make and keep: reduced inside a group, exchanged in slices,
gathered.

Two cases need this. The first stage makes the gradient of a tied embedding whole, the last stage in slices, as partial
sums on every data-parallel copy, and both stages keep it. A weight may rest in slices in several groups of devices; its
gradient is first reduced in slices inside each group. No single collective does either; a few steps do.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from superscaler.collectives import KINDS
from superscaler.groups import collect, group_by
from superscaler.ir.mask import Box
from superscaler.materialize.collectives import Match, match_boxes, refusal
from superscaler.materialize.steps import (
    CollectiveStep,
    Cut,
    Lowered,
    LoweringOptions,
    Message,
    Slot,
    Step,
    common,
    slots_of,
)  # fmt: skip
from superscaler.schedule.transfers import End, Transfer

T = TypeVar("T")


def reduction(transfer: Transfer, options: LoweringOptions) -> Lowered | None:
    """Return the collectives that reduce gradients for their updates, None if these would not help."""
    readers_of = collect(transfer.links)
    steps = _Steps(transfer, options)
    classes: dict[tuple[Box, tuple[int, ...]], dict[int, Slot]] = {}
    for slot in slots_of(transfer):
        holders = classes.setdefault((slot.box, tuple(readers_of[slot.item])), {})
        if holders.setdefault(slot.device, slot) != slot:
            return None
    sums: dict[int, set[int]] = {}
    for (box, numbers), held in classes.items():
        slices = steps.scatter(box, held, [transfer.readers[r] for r in numbers])
        for own, pieces in (slices or {box: held}).items():
            required = {r for r in numbers if own in (box, transfer.readers[r].box)}
            sums[steps.sum(own, pieces, {transfer.readers[r].device for r in required})] = required
    items_of = {r: {n for n, some in sums.items() if r in some} for r in range(len(transfer.readers))}
    for box, readers in collect((reader.box, r) for r, reader in enumerate(transfer.readers)).items():
        shared = [n for n in sums if sums[n].issuperset(readers) and steps.boxes[n] != box]
        for group in (
            [r for r in readers if steps.holds(shared, transfer.readers[r].device) is held] for held in (True, False)
        ):
            joined = steps.join(shared, [transfer.readers[r].device for r in group], box) if shared and group else None
            if joined is not None:
                items_of |= {r: items_of[r].difference(shared) | {joined} for r in group}
    if len(steps.boxes) == len(transfer.pieces):
        return None
    return steps.lowered([sorted(items_of[r]) for r in items_of])


def finer(transfer: Transfer, options: LoweringOptions) -> Lowered | None:
    """Return a reduce_scatter into finer slices, one a device, followed by gathers, for slices that several devices
    read; None if there are none.
    """
    steps, slots = _Steps(transfer, options), {slot.device: slot for slot in slots_of(transfer)}
    read = {reader.device: reader.box for reader in transfer.readers}
    ends = (*transfer.pieces, *transfer.readers)
    if not transfer.is_joint or slots.keys() != read.keys() or len(ends) != 2 * len(read):
        return None
    held, required = steps.extended({d: slot.box for d, slot in slots.items()}), steps.extended(read)
    firsts = {box: device for device, box in required.items()}
    cut = match_boxes({d: held[d] for d in firsts.values()}, {d: box for box, d in firsts.items()})
    if cut is None or cut.kind != "reduce_scatter" or len(firsts) == len(required):
        return None
    own = {
        device: part
        for box in firsts
        for device, part in _cut(box, cut.scatter_slot, sorted(d for d in required if required[d] == box))
    }
    how = match_boxes(held, own)
    if how is None or how.kind != "reduce_scatter":
        return None
    made = {d: steps.item(own[d], {d: slot}) for d, slot in slots.items()}
    steps.rounds[0] += steps.collectives([how], slots, {d: steps.slots[n][d] for d, n in made.items()})
    whole: dict[Box, int | None] = {}
    for box in dict.fromkeys(read.values()):
        some = [d for d in slots if read[d] == box]
        whole[box] = steps.join([made[d] for d in some], some, box)
    found = [[n] for box in read.values() if (n := whole[box]) is not None]
    return steps.lowered(found) if len(found) == len(read) else None


def by_server(transfer: Transfer, found: Match, options: LoweringOptions) -> Lowered | None:
    """Return a hierarchical sum over several servers: reduce_scatter inside each, all_reduce of equal slices between
    them, all_gather inside. None unless all servers have equally many devices, at least two.
    """
    per_server = getattr(options.costs, "devices_per_server", len(found.group))
    rows = [*group_by(found.group, lambda device: device // per_server).values()]
    first, *others = rows
    is_nested = others and len(first) > 1 and all(len(row) == len(first) for row in others)
    return _in_slices(transfer, rows, options) if found.kind == "all_reduce" and is_nested else None


def in_halves(transfer: Transfer, found: Match, options: LoweringOptions) -> Lowered | None:
    """Return the sum of a gradient that is sent in its own dtype and added in float32: a reduce_scatter, and an
    all_gather of the rounded sums. None for other transfers, and if no slot has a slice for each device.
    """
    is_narrow = options.wire(transfer, "reduce_scatter", trained=True) != options.dtype(transfer, trained=True)
    return _in_slices(transfer, [list(found.group)], options) if found.kind == "all_reduce" and is_narrow else None


def _in_slices(transfer: Transfer, rows: Sequence[Sequence[int]], options: LoweringOptions) -> Lowered | None:
    """Return a sum in slices inside each row of devices, then between the rows, gathered inside each row."""
    box, first = transfer.pieces[0].box, rows[0]
    # The outermost slot, whose slices are contiguous in memory.
    slot = next((slot for slot, (lo, hi) in enumerate(box) if (hi - lo) % len(first) == 0), None)
    if slot is None:
        return None
    own = {device: part for row in rows for device, part in _cut(box, slot, row)}
    how = [match_boxes(dict.fromkeys(row, box), {d: own[d] for d in row}) for row in rows]
    steps, held = _Steps(transfer, options), {slot.device: slot for slot in slots_of(transfer)}
    parts = dict.fromkeys(own[d] for d in held)
    made = {part: steps.item(part, {d: held[d] for d in held if own[d] == part}) for part in parts}
    outs = {d: steps.slots[made[own[d]]][d] for d in held}
    steps.rounds[0] += steps.collectives([one for one in how if one is not None], held, outs)
    whole = steps.join([steps.sum(part, steps.slots[n]) for part, n in made.items()], list(held), box)
    return None if whole is None else steps.lowered([[whole]] * len(transfer.readers))


def _cut(box: Box, slot: int, devices: Sequence[int]) -> Iterator[tuple[int, Box]]:
    """Yield each device with its part of a box along a slot."""
    (lo, hi), n = box[slot], len(devices)
    for at, device in enumerate(devices):
        ends = lo + (hi - lo) * at // n, lo + (hi - lo) * (at + 1) // n
        yield device, (*box[:slot], ends, *box[slot + 1 :])


class _Steps:
    """A builder of items and the steps that make them. An item is a piece, or the result of a step: one box on some
    devices. Each is made in the round after its sources.
    """

    def __init__(self, transfer: Transfer, options: LoweringOptions) -> None:
        self.transfer, self.options = transfer, options
        self.boxes = [piece.box for piece in transfer.pieces]
        self.slots = [{slot.device: slot} for slot in slots_of(transfer)]
        self.round_of = [-1] * len(self.boxes)
        self.rounds: list[list[Step]] = []

    def _near(self, a: int, b: int) -> int:
        return self.options.full_fold.closeness(a, b) if self.options.full_fold else 0

    def extended(self, boxes: dict[int, Box]) -> dict[int, Box]:
        return self.options.fold.extend(boxes) if self.options.fold else boxes

    def _add(self, box: Box, sources: Mapping[int, Slot], how: Sequence[Match] = ()) -> int:
        """Add the item of a box on some devices: a device takes it from its source, by a collective or in a message."""
        n = self.item(box, sources)
        if how and how[0].root >= 0:
            self.slots[n] = {d: slot for d, slot in self.slots[n].items() if d == how[0].group[how[0].root]}
        outs, steps = self.slots[n], self.rounds[self.round_of[n]]
        steps += self.collectives(how, sources, outs)
        for device, source in sources.items() if not how else ():
            if self.options.is_emitted(source.device, device):
                steps.append(Message(source, outs[device], refusal(self.transfer)))
        return n

    def item(self, box: Box, sources: Mapping[int, Slot]) -> int:
        """Add the item of a box on some devices, made in the round after its sources."""
        n, at = len(self.boxes), 1 + max(self.round_of[source.item] for source in sources.values())
        self.rounds += [[] for _ in range(at + 1 - len(self.rounds))]
        self.boxes.append(box)
        self.slots.append({device: Slot(device, n, box) for device in sources})
        self.round_of.append(at)
        return n

    def collectives(
        self, how: Sequence[Match], sources: Mapping[int, Slot], outs: Mapping[int, Slot]
    ) -> Iterator[CollectiveStep]:
        for one in how:
            emitted = [d for d in one.group if d in sources and self.options.is_emitted(d)]
            if emitted:
                yield CollectiveStep(one, tuple((sources[d], outs.get(d)) for d in emitted), KINDS[one.kind].why)

    def holds(self, numbers: Sequence[int], device: int) -> bool:
        return any(device in self.slots[n] for n in numbers)

    def sum(self, box: Box, pieces: Mapping[int, Slot], readers: Collection[int] = ()) -> int:
        """Return the item that is the sum of one piece per device, on all of these devices. If only one device reads it
        (a parameter server), it is on that device or the closest one.
        """
        if len(pieces) == 1:
            return next(iter(pieces.values())).item
        group = tuple(sorted(self.extended(dict.fromkeys(pieces, box))))
        if len(readers) != 1:
            return self._add(box, pieces, [Match("all_reduce", group)])
        (reader,) = readers
        root = max(pieces, key=lambda d: (d == reader, self._near(d, reader), -d))
        return self._add(box, pieces, [Match("reduce", group, root=group.index(root))])

    def scatter(self, whole: Box, held: Mapping[int, Slot], readers: Sequence[End]) -> dict[Box, dict[int, Slot]]:
        """Reduce the whole in slices, within each of several groups of devices that together read all slices.

        Returns, by slice, the slots of its readers with the sum in their group; an empty dict if there are no such
        groups.
        """
        required = {reader.device: reader.box for reader in readers}
        slices = sorted(set(required.values()))
        is_each = required.keys() == held.keys() and len(required) == len(readers)
        lines = self._lines(slices, required) if is_each and len(slices) > 1 else None
        extended = [self.extended({d: required[d] for d in line}) for line in lines or ()]
        how = [match_boxes(dict.fromkeys(boxes, whole), boxes) for boxes in extended]
        found = [one for one in how if one is not None and one.kind == "reduce_scatter"]
        if not found or len(found) < len(how):
            return {}
        made = {box: self.item(box, {d: held[d] for d in held if required[d] == box}) for box in slices}
        outs = {d: self.slots[made[box]][d] for d, box in required.items()}
        self.rounds[self.round_of[made[slices[0]]]] += self.collectives(found, held, outs)
        return {box: self.slots[n] for box, n in made.items()}

    def _lines(self, labels: Sequence[T], of: Mapping[int, T]) -> list[list[int]] | None:
        """Return lines of close devices with one of each label; None if the labels have different numbers of
        devices.
        """
        first, *others = labels
        lines = [[d] for d in of if of[d] == first]
        for label in others:
            left = [d for d in of if of[d] == label]
            if len(left) != len(lines):
                return None
            for line in lines:
                line.append(max(left, key=lambda d: (self._near(line[0], d), -d)))
                left.remove(line[-1])
        return lines

    def join(self, numbers: Sequence[int], devices: Sequence[int], whole: Box) -> int | None:
        """Return the item of all slices together on `devices`: a device without a slice gets one, then all gather.

        None if the slices have different numbers of devices, or are no even tiling.
        """
        has = {d: max(numbers, key=lambda n: (*self._closest(n, d), -n)) for d in devices}
        lines, how = self._lines(numbers, has), []
        for line in lines or ():
            boxes = self.extended({d: self.boxes[has[d]] for d in line})
            found = match_boxes(boxes, dict.fromkeys(boxes, whole))
            if found is None or found.kind != "all_gather":
                return None
            how.append(found)
        if not how:
            return None
        moved = {n: self._moved(n, [d for d in devices if has[d] == n]) for n in numbers}
        return self._add(whole, {d: self.slots[moved[has[d]]][d] for d in devices}, how)

    def _closest(self, n: int, device: int) -> tuple[bool, int]:
        return device in self.slots[n], max(self._near(device, d) for d in self.slots[n])

    def _moved(self, n: int, devices: Sequence[int]) -> int:
        if all(d in self.slots[n] for d in devices):
            return n
        return self._add(self.boxes[n], {d: self._source(n, devices, d) for d in devices})

    def _source(self, n: int, devices: Sequence[int], device: int) -> Slot:
        """Return the slot from which a device takes an item: its own, or the closest; equally close ones take turns."""
        owners = sorted(self.slots[n])
        if device in owners:
            return self.slots[n][device]
        most = max(self._near(device, owner) for owner in owners)
        owners = [owner for owner in owners if self._near(device, owner) == most]
        others = sorted(d for d in devices if d not in self.slots[n])
        return self.slots[n][owners[others.index(device) % len(owners)]]

    def lowered(self, items_of: Sequence[Sequence[int]]) -> Lowered:
        """Return all steps; the items that a reader adds up at the end are on its device, or are sent to it."""
        readers, last, ends = self.transfer.readers, list[Step](), list[tuple[Slot, ...]]()
        devices, item = [reader.device for reader in readers], len(self.boxes)
        for reader, items in zip(readers, items_of, strict=True):
            slots = []
            for source in (self._source(n, devices, reader.device) for n in items):
                if self.options.is_emitted(source.device, reader.device):
                    out, item = Slot(reader.device, item, common(source.box, reader.box)), item + 1
                    is_here = source.device == reader.device
                    last.append(Cut(source, out) if is_here else Message(source, out, refusal(self.transfer)))
                    slots.append(out)
            ends.append(tuple(slots))
        return Lowered((*map(tuple, self.rounds), tuple(last)), tuple(ends))
