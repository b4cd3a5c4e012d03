"""A transfer -> its steps: one collective, exact messages, sums and joins of several groups, or a searched path.

Pure: what comes out depends on the transfer and its context only, names nothing and writes nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import prod

from superscaler.cluster.seconds import LOCAL_KINDS
from superscaler.ir.graph import width
from superscaler.ir.mask import Box, extents, intersect
from superscaler.ir.parts import HOSTS
from superscaler.materialize.collectives import REASONS, Match, match, refusal
from superscaler.materialize.context import Context
from superscaler.materialize.pricing import cheapest
from superscaler.materialize.reduction import by_server, finer, reduction
from superscaler.materialize.rvd.route import Route, is_collective, route
from superscaler.materialize.rvd.transitions import Step as PathStep
from superscaler.materialize.steps import Collective, Cut, Join, Lowered, Message, Slot, Step, common, slots_of
from superscaler.schedule.transfers import Transfer

# Why a transfer takes the steps of a searched path.
PATH = "the cheapest path to another layout"
# Why it is copied between a device and its host.
HOST = "placed on the host"


def lower(transfer: Transfer, context: Context) -> Lowered:
    """Return the steps of a transfer, on the devices whose code is written."""
    if transfer.is_local:
        return Lowered((), _linked(transfer))
    if transfer.has_host:
        return _over_owners(transfer, context)
    outer = _outer(transfer)
    if len(set(outer)) < len(outer):
        return _cut_out(transfer, outer, context)
    found, largest = match(transfer, context.fold), context.tensors[transfer.tensor].largest
    # Of what is the largest of its parts there is an all_reduce, but no other sum and no path.
    if found is not None and not (largest and found.kind in ("reduce_scatter", "reduce")):
        nested = None if largest else by_server(transfer, found, context)
        forms = [form for form in (nested, _collective(transfer, found, context)) if form is not None]
        return cheapest(forms, context, width(context.dtype(transfer, trained=True)))
    dtype = context.dtype(transfer, trained=True)
    closed = (form(transfer, context) for form in (finer, reduction)) if transfer.is_to_updates else ()
    if forms := [form for form in closed if form is not None]:
        return cheapest(forms, context, width(dtype))
    # A path is searched by the numbers of devices: those that correspond might take different ones.
    can_sum = dtype != "bool" and not largest
    path = route(transfer, context.fold, context.costs, width(dtype), context.paths) if can_sum else None
    return _messages(transfer, context) if path is None else _Path(transfer, path, context).lowered()


def _linked(transfer: Transfer) -> tuple[tuple[Slot, ...], ...]:
    """Return per reader its pieces on its own device."""
    ends: list[list[Slot]] = [[] for _ in transfer.readers]
    for p, r in transfer.links:
        piece = transfer.pieces[p]
        if piece.device == transfer.readers[r].device:
            ends[r].append(Slot(piece.device, p, piece.box))
    return tuple(map(tuple, ends))


def _outer(transfer: Transfer) -> list[int]:
    """Return for each reader the one of the largest box around its own, where both read all pieces on one device."""
    by_device: dict[int, list[int]] = {}
    for r, reader in enumerate(transfer.readers):
        by_device.setdefault(reader.device if transfer.is_joint and not transfer.is_to_updates else ~r, []).append(r)
    found = dict[int, int]()
    for some in by_device.values():
        boxes = {r: transfer.readers[r].box for r in some}
        for r in some:
            around = [o for o in some if intersect(boxes[o], boxes[r]) == boxes[r]]
            found[r] = max(around, key=lambda o: prod(extents(transfer.readers[o].box)))
    return [found[r] for r in range(len(transfer.readers))]


def _cut_out(transfer: Transfer, outer: Sequence[int], context: Context) -> Lowered:
    """A device that reads a box, and boxes in it, cuts these out of it."""
    kept = sorted(set(outer))
    links = tuple((p, n) for p in range(len(transfer.pieces)) for n in range(len(kept)))
    inner = lower(replace(transfer, readers=tuple(transfer.readers[r] for r in kept), links=links), context)
    ends = (inner.ends[kept.index(r)] for r in outer)
    meets = [
        tuple(slot for slot in slots if intersect(slot.box, reader.box) is not None)
        for slots, reader in zip(ends, transfer.readers, strict=True)
    ]
    return Lowered(inner.rounds, tuple(meets), inner.route)


def _over_owners(transfer: Transfer, context: Context) -> Lowered:
    """What goes between a device and its host is copied; all else goes between devices, before or after that."""
    pieces = tuple(replace(piece, device=piece.device % HOSTS) for piece in transfer.pieces)
    sources: list[list[int]] = [[] for _ in transfer.readers]
    for p, r in transfer.links:
        sources[r].append(p)
    # A device reads what its host does once.
    number: dict[Hashable, int] = {}
    of = [
        number.setdefault((end.device % HOSTS, end.box, tuple(sources[r])), len(number))
        for r, end in enumerate(transfer.readers)
    ]
    first = [of.index(n) for n in range(len(number))]
    readers = tuple(replace(transfer.readers[r], device=transfer.readers[r].device % HOSTS) for r in first)
    links = tuple((p, n) for n, r in enumerate(first) for p in sources[r])
    inner = lower(replace(transfer, pieces=pieces, readers=readers, links=links), context)
    ends, items = [list(inner.ends[n]) for n in of], count(len(pieces))
    given = [Message(slot, slot._replace(device=slot.device % HOSTS), HOST) for slot in slots_of(transfer)]
    taken = list[Step]()
    for r, end in enumerate(transfer.readers):
        if end.device >= HOSTS:
            outs = [Slot(end.device, next(items), common(slot.box, end.box)) for slot in ends[r]]
            taken += [Message(slot, out, HOST) for slot, out in zip(ends[r], outs, strict=True)]
            ends[r] = outs
    rounds = (tuple(step for step in given if step.is_copy), *inner.rounds, tuple(taken))
    return Lowered(tuple(filter(None, rounds)), tuple(map(tuple, ends)), inner.route)


def _collective(transfer: Transfer, how: Match, context: Context) -> Lowered:
    held = {slot.device: slot for slot in slots_of(transfer)}
    item, box = len(held), transfer.pieces[0].box
    outs = {} if how.root >= 0 else {device: Slot(device, item, box) for device in held}
    outs |= {reader.device: Slot(reader.device, item, reader.box) for reader in transfer.readers}
    told = [device for device in how.group if device in {**held, **outs} and context.is_told(device)]
    slots = tuple((held.get(device), outs.get(device)) for device in told)
    # The source of a broadcast has what it reads.
    kept = held if how.kind == "broadcast" else {}
    ends = tuple((kept.get(reader.device, outs[reader.device]),) for reader in transfer.readers)
    return Lowered(((Collective(how, slots, REASONS[how.kind]),) if slots else (),), ends)


def _messages(transfer: Transfer, context: Context) -> Lowered:
    pieces, ends, why = slots_of(transfer), [list(slots) for slots in _linked(transfer)], refusal(transfer)
    steps: list[Step] = []
    for link, (p, r) in enumerate(transfer.links):
        reader = transfer.readers[r]
        if pieces[p].device != reader.device and context.is_told(pieces[p].device, reader.device):
            out = Slot(reader.device, len(pieces) + link, common(pieces[p].box, reader.box))
            steps.append(Message(pieces[p], out, why))
            ends[r].append(out)
    return Lowered((tuple(steps),), tuple(map(tuple, ends)))


class _Path:
    """The steps of a searched path, each after the one before has arrived. `slots` has what each device holds."""

    def __init__(self, transfer: Transfer, found: Route, context: Context) -> None:
        self.transfer, self.route, self.context = transfer, found, context
        self.slots = {slot.device: slot for slot in slots_of(transfer)}
        self.items = count(len(self.slots))
        self.rounds: list[list[Step]] = [[]]

    def lowered(self) -> Lowered:
        for n in range(len(self.route.path.steps)):
            self._take(n)
        ends = tuple((self.slots[r.device],) if r.device in self.slots else () for r in self.transfer.readers)
        return Lowered(tuple(map(tuple, self.rounds)), ends, self.route)

    def _take(self, n: int) -> None:
        """Take step `n`; what came to a device alone, and not in the end, needs no join."""
        last = len(self.route.path.steps) - 1
        after = self.route.boxes(self.route.path.steps[n].layout)
        parts = self._parts(self.route.path.steps[n], after, f"step {n + 1} of {last + 1} of " if last else "")
        if any(isinstance(step, Collective | Message) for step in self.rounds[-1]):
            self.rounds.append([])
        self.slots = {}
        for device, some in parts.items():
            if n < last and len(some) == 1 and some[0].box == after[device]:
                self.slots[device] = some[0]
            else:
                self.slots[device] = self._new(device, after[device])
                self.rounds[-1].append(Join(tuple(some), self.slots[device]))

    def _parts(self, step: PathStep, after: Mapping[int, Box], many: str) -> dict[int, list[Slot]]:
        """Start a step; return what each device then has of its box: first what it kept."""
        why, is_told = f"{many}{PATH}", self.context.is_told
        sent: list[Slot] = []
        kept = list(step.kept)
        for group in step.groups:
            if is_collective(step.kind):
                some = tuple((self.slots[d], self._new(d, after[d])) for d in group if is_told(d))
                self.rounds[-1] += [Collective(Match(step.kind, group, step.take, step.give), some, why)] * bool(some)
                sent += [out for _, out in some]
            elif step.kind in LOCAL_KINDS:
                # Of a value cut into addends, the first device has the whole, others zeros.
                kept += group if step.kind == "chunk" else group[:1]
            else:
                for to in (to for to in group[1:] if is_told(group[0], to)):
                    source = self.slots[group[0]]
                    sent.append(self._new(to, common(source.box, after[to])))
                    self.rounds[-1].append(Message(source, sent[-1], why))
        cuts = [(self.slots[d], self._new(d, common(self.slots[d].box, after[d]))) for d in kept if is_told(d)]
        self.rounds[-1] += [Cut(source, out) for source, out in cuts]
        parts: dict[int, list[Slot]] = {device: [] for device in after if is_told(device)}
        for out in (*(out for _, out in cuts), *sent):
            parts[out.device].append(out)
        return parts

    def _new(self, device: int, box: Box) -> Slot:
        return Slot(device, next(self.items), box)
