"""The steps of a lowered transfer (collectives, messages, cuts, joins), and the options of a lowering."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from superscaler.collectives import KINDS
from superscaler.ir.fold import Fold, Unfoldable
from superscaler.ir.grid import HOSTS
from superscaler.ir.mask import Box, extents, intersect
from superscaler.ir.model import PTensor
from superscaler.ir.orders import Policy
from superscaler.ir.program import CollectiveArg
from superscaler.materialize.collectives import Match
from superscaler.materialize.rvd.route import Route
from superscaler.materialize.rvd.search import Cache
from superscaler.materialize.rvd.transitions import Costs
from superscaler.schedule.steady_state import Microbatches
from superscaler.schedule.transfers import BACKWARD, UPDATE, Transfer


@dataclass(frozen=True)
class LoweringOptions:
    """Tensors, costs and folds that a lowering depends on.

    `from_weights`: tensors that depend on weights only. `full_fold`: the fold before any axis was given up. `fold`: the
    fold of the plan; transfers show its sampled places. `policy`: with `sends_halves`, gradients of halves are sent as
    halves to slices of their sums, and so are the sums to their other readers. `rounded`: for each weight that is
    rounded before it is gathered, what it then is. `microbatches`: those by which values and messages are named.
    `turns`: the orders of communication that an update is in, by home number and piece. `paths`: a cache of searched
    paths.
    """

    tensors: Mapping[str, PTensor]
    from_weights: frozenset[str]
    costs: Costs
    full_fold: Fold | None = None
    fold: Fold | None = None
    policy: Policy = field(default_factory=Policy)
    rounded: Mapping[str, PTensor] = field(default_factory=dict)
    microbatches: Microbatches | None = None
    turns: Mapping[tuple[int, int], Hashable] = field(default_factory=dict)
    paths: Cache = field(default_factory=dict)

    def dtype(self, transfer: Transfer, *, trained: bool = False) -> str:
        """Return the dtype in which a transfer moves its tensor. Gradients that are summed over microbatches are never
        halves.

        `trained`: return the dtype of the trained model, which determines the form, if this model is a retyped copy.
        """
        tensor = self.tensors[transfer.tensor]
        tensor = tensor.trained if trained else tensor
        is_summed = transfer.kind == BACKWARD and transfer.tensor in self.from_weights
        return tensor.wide_dtype if is_summed else tensor.dtype

    def wire(self, transfer: Transfer, kind: str, *, trained: bool = False) -> str:
        """Return the dtype in which a collective sends the tensor of a transfer."""
        is_narrow = self.policy.sends_halves and KINDS[kind].narrows and transfer.is_to_updates
        return self._rounded(transfer, trained) if is_narrow else self.dtype(transfer, trained=trained)

    def _rounded(self, transfer: Transfer, trained: bool) -> str:
        tensor = self.rounded.get(transfer.tensor, self.tensors[transfer.tensor])
        return (tensor.trained if trained else tensor).dtype

    def wire_dtype(self, transfer: Transfer, form: Lowered, step: CollectiveStep, *, trained: bool = False) -> str:
        """Return the dtype in which a step of a transfer sends its tensor."""
        is_rounded = self.casts(transfer, form, step)
        return self._rounded(transfer, trained) if is_rounded else self.wire(transfer, step.how.kind, trained=trained)

    def casts(self, transfer: Transfer, form: Lowered, step: CollectiveStep) -> bool:
        """Return whether a step gathers a weight for readers that only round it, and nothing comes after it."""
        if transfer.tensor not in self.rounded or transfer.kind == BACKWARD or step not in form.rounds[-1]:
            return False
        is_read = all(place.kind != UPDATE for reader in transfer.readers for place in reader.places)
        gathers = [one for one in form.rounds[-1] if isinstance(one, CollectiveStep) and KINDS[one.how.kind].rounds]
        made = {out for one in gathers for out in one.outs}
        pairs = zip(transfer.readers, form.ends, strict=True)
        ends = [slots for reader, slots in pairs if self.is_emitted(reader.device)]
        return is_read and step in gathers and all(len(slots) == 1 and slots[0] in made for slots in ends)

    def turn(self, transfer: Transfer) -> Hashable:
        """Return the orders of communication that a transfer is in."""
        place = transfer.readers[0].places[0]
        return self.turns.get((place.segment, place.number), ()) if transfer.is_to_updates else ()

    def is_emitted(self, *devices: int) -> bool:
        """Return whether these devices, or those of these hosts, are sampled, so that their code is emitted. Raises
        Unfoldable if only some of them are.
        """
        if self.fold is None:
            return True
        owners = {device % HOSTS for device in devices}
        if not owners <= self.fold.sampled and not owners.isdisjoint(self.fold.sampled):
            raise Unfoldable(self.fold.spanned(devices)[0])
        return owners <= self.fold.sampled


class Slot(NamedTuple):
    """A box of the tensor on a device. `item` distinguishes the values of a transfer; the first items are its
    pieces.
    """

    device: int
    item: int
    box: Box

    def __str__(self) -> str:
        """Return device, item and box as text.

        >>> str(Slot(1, 3, ((0, 4), (8, 16))))
        '1.3[0:4, 8:16]'
        """
        return f"{self.device}.{self.item}[{', '.join(f'{lo}:{hi}' for lo, hi in self.box)}]"


@dataclass(frozen=True, slots=True)
class CollectiveStep:
    """A collective with the source of each device (None for a broadcast's receivers) and its result (None for devices
    without one).
    """

    how: Match
    slots: tuple[tuple[Slot | None, Slot | None], ...]
    why: str

    @property
    def sources(self) -> list[Slot]:
        return [source for source, _ in self.slots if source is not None]

    @property
    def outs(self) -> list[Slot]:
        return [out for _, out in self.slots if out is not None]

    def changed(self, change: Callable[[Slot], Slot]) -> CollectiveStep:
        slots = tuple((source and change(source), out and change(out)) for source, out in self.slots)
        return CollectiveStep(self.how, slots, self.why)

    def __str__(self) -> str:
        how = self.how
        along = f" along {how.gather_slot}" if how.gather_slot >= 0 else ""
        to = f" to {how.scatter_slot}" if how.scatter_slot >= 0 else ""
        over = ", ".join(map(str, how.group))
        return f"{how.kind}{along}{to} over {over}: {_sum(self.sources)} -> {_sum(self.outs)}"

    def arg(self, tensor: PTensor, source: Slot | None, out: Slot | None) -> CollectiveArg:
        """Return the layout change of a device with these slots. One without source or result gets that of the
        others.
        """
        held, got = source or self.sources[0], out or self.outs[0]
        view, how = extents(held.box), self.how
        local, shape = tensor.local_shape(view), tensor.local_shape(extents(got.box))
        return CollectiveArg(view, how.gather_slot, how.scatter_slot, local, shape, how.sizes)


@dataclass(frozen=True, slots=True)
class Message:
    """A message: the box of `out` goes to its device."""

    source: Slot
    out: Slot
    why: str

    @property
    def is_copy(self) -> bool:
        """Return whether it goes between a device and its host."""
        return self.source.device ^ HOSTS == self.out.device

    def changed(self, change: Callable[[Slot], Slot]) -> Message:
        return Message(change(self.source), change(self.out), self.why)

    def __str__(self) -> str:
        return f"send {self.source} -> {self.out}"


@dataclass(frozen=True, slots=True)
class Cut:
    """A box cut out of another one on its device."""

    source: Slot
    out: Slot

    def changed(self, change: Callable[[Slot], Slot]) -> Cut:
        return Cut(change(self.source), change(self.out))

    def __str__(self) -> str:
        return f"cut {self.source} -> {self.out}"


@dataclass(frozen=True, slots=True)
class Join:
    """A sum of slots on a device, each placed at its box in zeros."""

    sources: tuple[Slot, ...]
    out: Slot

    def changed(self, change: Callable[[Slot], Slot]) -> Join:
        return Join(tuple(map(change, self.sources)), change(self.out))

    def __str__(self) -> str:
        return f"join {_sum(self.sources)} -> {self.out}"


Step = CollectiveStep | Message | Cut | Join


@dataclass(frozen=True, slots=True)
class Lowered:
    """The rounds of steps of a transfer. The steps of a round start together, after all messages of the round before
    arrived.

    `ends`: the slots that each reader joins when it is first read. `route`: the searched path, if the rounds follow
    one.
    """

    rounds: tuple[tuple[Step, ...], ...]
    ends: tuple[tuple[Slot, ...], ...]
    route: Route | None = None

    def moved(self, by: Sequence[int]) -> Lowered:
        """Return the steps of a transfer whose boxes are elsewhere in its tensor, by so much in each slot."""
        if not any(by):
            return self
        known: dict[Box, Box] = {}

        def box(old: Box) -> Box:
            if old not in known:
                known[old] = tuple((lo + far, hi + far) for (lo, hi), far in zip(old, by, strict=True))
            return known[old]

        def slot(old: Slot) -> Slot:
            return Slot(old.device, old.item, box(old.box))

        rounds = tuple(tuple(step.changed(slot) for step in steps) for steps in self.rounds)
        ends = tuple(tuple(map(slot, slots)) for slots in self.ends)
        return Lowered(rounds, ends, self.route and replace(self.route, whole=box(self.route.whole)))

    def __str__(self) -> str:
        lines = [f"round {n}: {step}" for n, steps in enumerate(self.rounds) for step in steps]
        return "\n".join([*lines, *(f"reader {r}: {_sum(slots)}" for r, slots in enumerate(self.ends))])


def slots_of(transfer: Transfer) -> list[Slot]:
    """Return the slots of a transfer's pieces."""
    return [Slot(piece.device, p, piece.box) for p, piece in enumerate(transfer.pieces)]


def common(have: Box, want: Box) -> Box:
    """Return the intersection of two boxes that meet."""
    found = intersect(have, want)
    assert found is not None
    return found


def _sum(slots: Iterable[Slot]) -> str:
    return " + ".join(map(str, slots)) or "nothing"
