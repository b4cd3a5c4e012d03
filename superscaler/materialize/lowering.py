"""The lowering of a transfer to steps: the candidate forms, and the cheapest of them by the formulas of the cluster."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from math import prod

from superscaler.cluster.seconds import LOCAL_KINDS
from superscaler.collectives import KINDS, ONE
from superscaler.groups import collect
from superscaler.ir.grid import HOSTS
from superscaler.ir.layout import Provenance
from superscaler.ir.mask import Box, extents, inside, intersect
from superscaler.ir.model import width
from superscaler.materialize.buckets import Entry
from superscaler.materialize.collectives import Match, match, refusal
from superscaler.materialize.fold import check_steps
from superscaler.materialize.rvd.route import Route, priced, route
from superscaler.materialize.rvd.transitions import COLLECTIVES
from superscaler.materialize.rvd.transitions import Step as PathStep
from superscaler.materialize.steps import (
    CollectiveStep,
    Cut,
    Join,
    Lowered,
    LoweringOptions,
    Message,
    Slot,
    Step,
    common,
    slots_of,
)  # fmt: skip
from superscaler.materialize.sums import by_server, finer, in_halves, reduction
from superscaler.schedule.transfers import BACKWARD, Transfer

# A preferred form may take this many times the seconds of the cheapest one.
NEARLY = 1.01
Groups = dict[tuple[int, ...], int]


def cheapest(forms: Sequence[Lowered], options: LoweringOptions, itemsize: int) -> Lowered:
    """Return the cheapest form of a transfer; among forms within NEARLY of it, the last one."""
    prices = [seconds(form, options, itemsize) for form in forms] if len(forms) > 1 else [0.0]
    return [form for form, price in zip(forms, prices, strict=True) if price <= min(prices) * NEARLY][-1]


def seconds(lowered: Lowered, options: LoweringOptions, itemsize: int) -> float:
    """Return the seconds of all rounds in turn. Steps of one kind in a round run simultaneously. Latencies that buckets
    share are left out.
    """
    costs, total = priced(options.costs), 0.0
    everything = [step for steps in lowered.rounds for step in steps if not isinstance(step, Cut | Join)]
    is_shared = all(isinstance(step, CollectiveStep) and KINDS[step.how.kind].is_bucketed for step in everything)
    for steps in lowered.rounds:
        for kind, groups in _started(steps, options).items():
            each = partial(costs.seconds, kind, list(groups))
            total += each(max(groups.values()) * itemsize) - (each(0) if is_shared else 0.0)
    return total


def _started(steps: tuple[Step, ...], options: LoweringOptions) -> dict[str, Groups]:
    """Return, for each kind, its groups on all devices of a fold, each with the elements of its largest source."""
    found: dict[str, Groups] = {}
    for step in steps:
        if isinstance(step, CollectiveStep):
            kind, group, boxes = step.how.kind, step.how.group, [source.box for source in step.sources]
        elif isinstance(step, Message):
            kind, group, boxes = "messages", (step.source.device, step.out.device), [step.out.box]
        else:
            continue
        everywhere = [group] if options.fold is None else options.fold.everywhere(group)
        found.setdefault(kind, {}).update(dict.fromkeys(everywhere, max(prod(extents(box)) for box in boxes)))
    return found


# The reason for the steps of a searched path.
PATH = "the cheapest path to another layout"
# The reason for a copy between a device and its host.
HOST = "placed on the host"


def made_here(transfer: Transfer) -> Provenance:
    """Return the note of a transfer that stays on its device."""
    several = len(transfer.links) > len(transfer.readers) or any(len(piece.places) > 1 for piece in transfer.pieces)
    why = "summed or joined where it is read" if several else "made where it is read"
    return Provenance(transfer.tensor, transfer.kind == BACKWARD, why)


class Lowering:
    """The lowering of the transfers of a plan; those of equal layers and microbatches are lowered once."""

    def __init__(self, transfers: Sequence[Transfer], options: LoweringOptions) -> None:
        self.transfers, self.options = transfers, options
        self._by_number: dict[int, Lowered] = {}
        # Those of the layers of a model are often equal.
        self._by_form: dict[Hashable, Lowered] = {}
        # With the corner of the boxes of the ends: those of the microbatches are elsewhere in their tensor.
        self._by_ends: dict[Hashable, tuple[Lowered, Box]] = {}

    def lowered(self, number: int) -> Lowered:
        """Return the steps of a transfer."""
        if number not in self._by_number:
            transfer, options = self.transfers[number], self.options
            wire = options.wire(transfer, "reduce_scatter", trained=True)
            of = options.dtype(transfer, trained=True), wire, options.tensors[transfer.tensor].largest
            alike = transfer.like, *of
            if alike not in self._by_form:
                self._by_form[alike] = self._moved(transfer, of)
            self._by_number[number] = self._by_form[alike]
        return self._by_number[number]

    def is_joined(self, number: int) -> bool:
        """Return whether all rounds of a transfer may wait in buckets."""
        rounds = self.lowered(number).rounds
        is_sent = any(isinstance(step, Message) and not step.is_copy for steps in rounds for step in steps)
        return len(rounds) == 1 or (self.transfers[number].is_to_updates and not is_sent)

    def ends_on_hosts(self, number: int) -> bool:
        """Return whether a transfer only copies to hosts after its first round."""
        left = (step for steps in self.lowered(number).rounds[1:] for step in steps)
        return all(isinstance(step, Message) and step.is_copy for step in left)

    def entry(self, number: int, step: CollectiveStep) -> Entry:
        """Return a collective of a transfer as it is sent."""
        transfer, form, how, of = self.transfers[number], self.lowered(number), step.how, self.options
        tensor, turn, casts = of.tensors[transfer.tensor], of.turn(transfer), of.casts(transfer, form, step)
        dtype, trained = (of.wire_dtype(transfer, form, step, trained=trained) for trained in (False, True))
        like = how.group, how.kind, how.root, trained, casts, tensor.largest, turn
        size = step.arg(tensor, *step.slots[0]).elements
        return Entry(number, step, dtype, casts, like, size * width(dtype), size * width(trained), turn != ())

    def _moved(self, transfer: Transfer, of: Hashable) -> Lowered:
        """Return the steps of a transfer; those of an earlier one with equal ends elsewhere in its tensor are moved."""
        if transfer.is_local:
            return lower(transfer, self.options)
        sides = transfer.pieces, transfer.readers
        corner = tuple(map(min, zip(*(end.box for some in sides for end in some), strict=True)))
        ends = (tuple((end.device, inside(end.box, corner)) for end in some) for some in sides)
        classes = tuple(map(transfer.classes.index, transfer.classes))
        key = (*ends, transfer.links, classes, transfer.is_to_updates, of)
        if key not in self._by_ends:
            self._by_ends[key] = lower(transfer, self.options), corner
            if self.options.fold is not None:
                check_steps(self._by_ends[key][0], self.options.fold)
        found, at = self._by_ends[key]
        return found.moved([lo - start for (lo, _), (start, _) in zip(corner, at, strict=True)])


def lower(transfer: Transfer, options: LoweringOptions) -> Lowered:
    """Return the steps of a transfer, on the sampled devices."""
    if transfer.is_local:
        return Lowered((), _linked(transfer))
    if transfer.has_host:
        return _over_owners(transfer, options)
    outer = _outer(transfer)
    if len(set(outer)) < len(outer):
        return _cut_out(transfer, outer, options)
    found, largest = match(transfer, options.fold), options.tensors[transfer.tensor].largest
    # The largest of parts is not made along a path, and not by all collectives that sum.
    if found is not None and not (largest and KINDS[found.kind].sums and not KINDS[found.kind].takes_largest):
        if not largest and (narrow := in_halves(transfer, found, options)):
            return narrow
        nested = None if largest else by_server(transfer, found, options)
        forms = [form for form in (nested, _collective(transfer, found, options)) if form is not None]
        return cheapest(forms, options, width(options.dtype(transfer, trained=True)))
    dtype = options.dtype(transfer, trained=True)
    closed = (form(transfer, options) for form in (finer, reduction)) if transfer.is_to_updates else ()
    if forms := [form for form in closed if form is not None]:
        return cheapest(forms, options, width(dtype))
    # A path depends on the numbers of devices, so corresponding devices might take different paths.
    can_sum = dtype != "bool" and not largest
    path = route(transfer, options.fold, options.costs, width(dtype), options.paths) if can_sum else None
    return _messages(transfer, options) if path is None else _Path(transfer, path, options).lowered()


def _linked(transfer: Transfer) -> tuple[tuple[Slot, ...], ...]:
    """Return, for each reader, the pieces on its own device."""
    ends: list[list[Slot]] = [[] for _ in transfer.readers]
    for p, r in transfer.links:
        piece = transfer.pieces[p]
        if piece.device == transfer.readers[r].device:
            ends[r].append(Slot(piece.device, p, piece.box))
    return tuple(map(tuple, ends))


def _outer(transfer: Transfer) -> list[int]:
    """Return, for each reader, the reader on its device with the largest box around its own, if both read all
    pieces.
    """
    is_whole = transfer.is_joint and not transfer.is_to_updates
    by_device = collect((reader.device if is_whole else ~r, r) for r, reader in enumerate(transfer.readers))
    found = dict[int, int]()
    for some in by_device.values():
        boxes = {r: transfer.readers[r].box for r in some}
        for r in some:
            around = [o for o in some if intersect(boxes[o], boxes[r]) == boxes[r]]
            found[r] = max(around, key=lambda o: prod(extents(transfer.readers[o].box)))
    return [found[r] for r in range(len(transfer.readers))]


def _cut_out(transfer: Transfer, outer: Sequence[int], options: LoweringOptions) -> Lowered:
    """Return the steps for devices that read a box and also boxes inside it: the inner ones are cut out on the
    device.
    """
    kept = sorted(set(outer))
    links = tuple((p, n) for p in range(len(transfer.pieces)) for n in range(len(kept)))
    inner = lower(replace(transfer, readers=tuple(transfer.readers[r] for r in kept), links=links), options)
    ends = (inner.ends[kept.index(r)] for r in outer)
    meets = [
        tuple(slot for slot in slots if intersect(slot.box, reader.box) is not None)
        for slots, reader in zip(ends, transfer.readers, strict=True)
    ]
    return Lowered(inner.rounds, tuple(meets), inner.route)


def _over_owners(transfer: Transfer, options: LoweringOptions) -> Lowered:
    """Return the steps of a transfer with hosts: copies between a device and its host, before or after steps between
    devices.
    """
    pieces = tuple(replace(piece, device=piece.device % HOSTS) for piece in transfer.pieces)
    sources: list[list[int]] = [[] for _ in transfer.readers]
    for p, r in transfer.links:
        sources[r].append(p)
    # A device and its host read the same box once.
    number: dict[Hashable, int] = {}
    of = [
        number.setdefault((end.device % HOSTS, end.box, tuple(sources[r])), len(number))
        for r, end in enumerate(transfer.readers)
    ]
    first = [of.index(n) for n in range(len(number))]
    readers = tuple(replace(transfer.readers[r], device=transfer.readers[r].device % HOSTS) for r in first)
    links = tuple((p, n) for n, r in enumerate(first) for p in sources[r])
    inner = lower(replace(transfer, pieces=pieces, readers=readers, links=links), options)
    ends, items = [list(inner.ends[n]) for n in of], count(len(pieces))
    given = [Message(slot, slot._replace(device=slot.device % HOSTS), HOST) for slot in slots_of(transfer)]
    taken = list[Step]()
    for r, end in enumerate(transfer.readers):
        if end.device >= HOSTS and options.is_emitted(end.device):
            outs = [Slot(end.device, next(items), common(slot.box, end.box)) for slot in ends[r]]
            taken += [Message(slot, out, HOST) for slot, out in zip(ends[r], outs, strict=True)]
            ends[r] = outs
    copied = tuple(step for step in given if step.is_copy and options.is_emitted(step.out.device))
    rounds = tuple(filter(None, (copied, *inner.rounds, tuple(taken))))
    return Lowered(rounds or ((),), tuple(map(tuple, ends)), inner.route)


def _collective(transfer: Transfer, how: Match, options: LoweringOptions) -> Lowered:
    held = {slot.device: slot for slot in slots_of(transfer)}
    item, box = len(held), transfer.pieces[0].box
    outs = {} if how.root >= 0 else {device: Slot(device, item, box) for device in held}
    outs |= {reader.device: Slot(reader.device, item, reader.box) for reader in transfer.readers}
    emitted = [device for device in how.group if device in {**held, **outs} and options.is_emitted(device)]
    slots = tuple((held.get(device), outs.get(device)) for device in emitted)
    # The source of a broadcast already has its value.
    kept = held if KINDS[how.kind].held is ONE else {}
    ends = tuple((kept.get(reader.device, outs[reader.device]),) for reader in transfer.readers)
    return Lowered(((CollectiveStep(how, slots, KINDS[how.kind].why),) if slots else (),), ends)


def _messages(transfer: Transfer, options: LoweringOptions) -> Lowered:
    pieces, ends, why = slots_of(transfer), [list(slots) for slots in _linked(transfer)], refusal(transfer)
    steps: list[Step] = []
    for link, (p, r) in enumerate(transfer.links):
        reader = transfer.readers[r]
        if pieces[p].device != reader.device and options.is_emitted(pieces[p].device, reader.device):
            out = Slot(reader.device, len(pieces) + link, common(pieces[p].box, reader.box))
            steps.append(Message(pieces[p], out, why))
            ends[r].append(out)
    return Lowered((tuple(steps),), tuple(map(tuple, ends)))


class _Path:
    """The steps of a searched path; each starts after the one before has arrived. `slots`: the slot of each device."""

    def __init__(self, transfer: Transfer, found: Route, options: LoweringOptions) -> None:
        self.transfer, self.route, self.options = transfer, found, options
        self.slots = {slot.device: slot for slot in slots_of(transfer)}
        self.items = count(len(self.slots))
        self.rounds: list[list[Step]] = [[]]

    def lowered(self) -> Lowered:
        for n in range(len(self.route.path.steps)):
            self._take(n)
        ends = tuple((self.slots[r.device],) if r.device in self.slots else () for r in self.transfer.readers)
        return Lowered(tuple(map(tuple, self.rounds)), ends, self.route)

    def _take(self, n: int) -> None:
        """Write step `n`. An intermediate value that arrives in one piece needs no join."""
        last = len(self.route.path.steps) - 1
        after = self.route.boxes(self.route.path.steps[n].layout)
        parts = self._parts(self.route.path.steps[n], after, f"step {n + 1} of {last + 1} of " if last else "")
        if any(isinstance(step, CollectiveStep | Message) for step in self.rounds[-1]):
            self.rounds.append([])
        self.slots = {}
        for device, some in parts.items():
            if n < last and len(some) == 1 and some[0].box == after[device]:
                self.slots[device] = some[0]
            else:
                self.slots[device] = self._new(device, after[device])
                self.rounds[-1].append(Join(tuple(some), self.slots[device]))

    def _parts(self, step: PathStep, after: Mapping[int, Box], many: str) -> dict[int, list[Slot]]:
        """Start a step; return the parts of each device's box after it, the kept ones first."""
        why, is_emitted = f"{many}{PATH}", self.options.is_emitted
        sent: list[Slot] = []
        kept = list(step.kept)
        for group in step.groups:
            if step.kind in COLLECTIVES:
                some = tuple((self.slots[d], self._new(d, after[d])) for d in group if is_emitted(d))
                how = Match(step.kind, group, step.gather_slot, step.scatter_slot)
                self.rounds[-1] += [CollectiveStep(how, some, why)] * bool(some)
                sent += [out for _, out in some]
            elif step.kind in LOCAL_KINDS:
                # When a value is cut into addends, the first device keeps the whole, and the others get zeros.
                kept += group if step.kind == "chunk" else group[:1]
            else:
                for to in (to for to in group[1:] if is_emitted(group[0], to)):
                    source = self.slots[group[0]]
                    sent.append(self._new(to, common(source.box, after[to])))
                    self.rounds[-1].append(Message(source, sent[-1], why))
        cuts = [(self.slots[d], self._new(d, common(self.slots[d].box, after[d]))) for d in kept if is_emitted(d)]
        self.rounds[-1] += [Cut(source, out) for source, out in cuts]
        parts: dict[int, list[Slot]] = {device: [] for device in after if is_emitted(device)}
        for out in (*(out for _, out in cuts), *sent):
            parts[out.device].append(out)
        return parts

    def _new(self, device: int, box: Box) -> Slot:
        return Slot(device, next(self.items), box)
