"""The order of communication: an order of work becomes one of actions. The buckets, rounds, waits and arrivals of
transfers are chosen here, before any instruction is written.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from itertools import groupby
from typing import NamedTuple

from superscaler.collectives import KINDS, ONE, PART, TILE
from superscaler.ir.grid import HOSTS
from superscaler.materialize.buckets import Buckets, Entry
from superscaler.materialize.lowering import Lowering
from superscaler.materialize.steps import CollectiveStep, Cut, Join, Message, Step
from superscaler.schedule.antidependencies import updates_of
from superscaler.schedule.dependencies import Node, Schedule
from superscaler.schedule.recompute_order import Work
from superscaler.schedule.transfers import BACKWARD, FORWARD, REGATHER, UPDATE

# Reduce-scatters of gradients are in flight until the next backward has ended, as those of a block under torch's FSDP2
# (_fsdp_param_group.py, post_backward): a wait between two of one backward would hold up what comes after it. Of short
# backwards so many may be in flight per group, unless another round follows them.
FLYING = 2


class Start(NamedTuple):
    """Start a message, a cut or a join of a transfer. Messages with one `point` start together."""

    number: int
    step: Message | Cut | Join
    point: int


class Bucket(NamedTuple):
    """Start the collectives of several transfers as one."""

    entries: Sequence[Entry]


class Arrive(NamedTuple):
    """Wait for the results of steps of a transfer that have started, on one device (`owner`) or on all."""

    number: int
    steps: Sequence[Step]
    owner: int | None = None


class Sum(NamedTuple):
    """Add a transfer that has arrived to its sums."""

    number: int


class EndUpdates(NamedTuple):
    """Update all weights whose gradients the nodes U before it read."""


# A node is the work of a part.
Action = Node | Start | Bucket | Arrive | Sum | EndUpdates


def actions(schedule: Schedule, lowering: Lowering) -> Iterator[Action]:
    """Yield the actions of the sampled devices in the order of a schedule."""
    order = _Order(schedule, lowering)
    for _, run in groupby(schedule.order, key=order.together):
        yield from order.actions(list(run))


class _Order:
    """The actions of one point of the order, and the communication that has not ended there."""

    def __init__(self, schedule: Schedule, lowering: Lowering) -> None:
        self.schedule, self.lowering = schedule, lowering
        self.transfers, self.options = lowering.transfers, lowering.options
        self._made: list[Action] = []
        self._point = 0
        self._buckets = Buckets(self.options.policy.overlaps)
        # The rounds that have not ended, of transfers with rounds left to start. Rounds follow at the first read, so
        # that nothing is waited for earlier; but the next round of reduce-scatters starts once they have arrived.
        self._left: dict[int, list[Sequence[Step]]] = {}
        # By work, the transfers that it reads of which some had rounds left.
        self._awaited: dict[Hashable, list[int]] = {}
        # By transfer, the collectives that wait in buckets.
        self._waiting = Counter[int]()
        # Buckets of reduce-scatters in flight, by group, each with the number of forwards and backwards before it.
        # Inputs stay alive until they arrive.
        self._in_flight: dict[tuple[int, ...], list[tuple[Sequence[Entry], int]]] = {}
        self._works_so_far = 0
        # By update, the transfers of its weight or buffer, then those of views of it.
        self._sent: dict[Work, list[int]] = {}
        for number, transfer in enumerate(self.transfers):
            for work in {place[:3]: None for end in transfer.pieces for place in end.places if place.kind == UPDATE}:
                self._sent.setdefault(work, []).append(number)
        for number, transfer in enumerate(self.transfers):
            for work in updates_of(schedule.flow, transfer, transfer.pieces):
                self._sent.setdefault(work, []).append(number)

    def together(self, node: Node) -> tuple[object, ...]:
        """Return a key, equal for neighbouring nodes that finish their exchanges together: the same work on
        corresponding devices, or the updates of one iteration.
        """
        if node.kind == UPDATE:
            return UPDATE, self.schedule.flow.by_home[node.number].iteration
        return (node.kind, node.number, *node.key[1:]) if node.is_run else (node.kind,)

    def actions(self, run: Sequence[Node]) -> list[Action]:
        """Return the actions of nodes that are together."""
        self._made = []
        if run[0].kind == "C":
            self._start(run)
            return self._made
        devices = {node.device % HOSTS for node in run}
        if run[0].kind == UPDATE:
            self._flush(devices)
        else:
            self._turn(devices, run[0].key[1])
        if self._left:
            works = (work for node in run for work in self._read_as(node))
            self._finish(number for work in works for number in self._awaited.pop(work, ()))
        for node in run:
            if self.options.is_emitted(node.device):
                self._made.append(node)
                if node.kind == UPDATE:
                    self._release(node)
        if run[0].kind == UPDATE:
            self._made.append(EndUpdates())
        return self._made

    def _read_as(self, node: Node) -> Iterator[Work]:
        """Yield the work as which a node reads values."""
        kind, number, key, _ = node
        if kind in (UPDATE, FORWARD):
            yield kind, number, key
        elif kind == self.schedule.segments[number].first_backward:
            yield from ((BACKWARD, number, key), (REGATHER, number, key))

    def _release(self, node: Node) -> None:
        """Finish the transfers of a weight before its update changes it, and wait on its device for the steps started
        there. Updates themselves wait for messages and broadcasts.
        """
        for number in self._sent.get(node[:3], ()):
            if not self.transfers[number].is_local:
                self._finish([number])
                first = self.lowering.lowered(number).rounds[0]
                some = [s for s in first if not isinstance(s, CollectiveStep) or KINDS[s.how.kind].held is not ONE]
                self._made.append(Arrive(number, some, node.device % HOSTS))

    def _start(self, run: Sequence[Node]) -> None:
        """Start the communication that is ready at one point of the order."""
        self._point += 1
        for node in run:
            number, transfer = node.number, self.transfers[node.number]
            if transfer.is_local:
                continue
            first, *left = rounds = self.lowering.lowered(number).rounds
            if node.link >= 0:
                out = len(transfer.pieces) + node.link
                first = tuple(step for step in first if isinstance(step, Message) and step.out.item == out)
            if left:
                self._left[number] = [*rounds]
                for work in {place[:3] for reader in transfer.readers for place in reader.places}:
                    self._awaited.setdefault(work, []).append(number)
            self._begin(number, first)
        self._flush(frozenset())

    def _begin(self, number: int, some: Sequence[Step], is_due: bool = False) -> None:
        """Start steps of a transfer. A collective joins a bucket if that delays no reader."""
        is_joined = self.lowering.is_joined(number)
        for step in some:
            if not isinstance(step, CollectiveStep):
                self._made.append(Start(number, step, self._point))
            elif is_joined and KINDS[step.how.kind].is_bucketed:
                self._waiting[number] += 1
                self._buckets.add(self.lowering.entry(number, step), self.transfers[number], is_due)
            else:
                self._send([self.lowering.entry(number, step)])

    def _flush(self, ended: Set[int]) -> None:
        """Start the buckets that are due, and all buckets of devices whose backward has `ended`."""
        for bucket in list(self._buckets.take(ended)):
            self._waiting.subtract(entry.number for entry in bucket)
            self._send(bucket)

    def _send(self, bucket: Sequence[Entry]) -> None:
        """Start the collectives of a bucket as one."""
        self._made.append(Bucket(bucket))
        how = bucket[0].step.how
        if KINDS[how.kind].ends == (PART, TILE) and self.transfers[bucket[0].number].is_to_updates:
            flying = self._in_flight.setdefault(how.group, [])
            flying.append((bucket, self._works_so_far))
            while self._is_over(flying):
                self._arrive(flying)

    def _is_over(self, flying: Sequence[tuple[Sequence[Entry], int]]) -> bool:
        """Return whether the first bucket in flight has to arrive."""
        bucket, begun = flying[0]
        return begun < self._works_so_far and (bucket[0].number in self._left or len(flying) > FLYING)

    def _turn(self, devices: Set[int], microbatch: int) -> None:
        """Release the gradients of other microbatches when devices turn to this one, and wait for the reduce-scatters
        that started first.
        """
        self._works_so_far += 1
        if self._buckets.close(devices, microbatch):
            self._flush(frozenset())
        for group, flying in self._in_flight.items():
            first = self.transfers[flying[0][0][0].number].microbatches if flying else {-1}
            if not {-1, microbatch} & first and not devices.isdisjoint(group):
                self._arrive(flying)

    def _arrive(self, flying: list[tuple[Sequence[Entry], int]]) -> None:
        """Wait for the first bucket in flight, and start the next rounds of its transfers."""
        bucket, _ = flying.pop(0)
        for number, step in ((entry.number, entry.step) for entry in bucket):
            if number in self._left and self.lowering.ends_on_hosts(number):
                self._finish([number])
            else:
                self._made.append(Arrive(number, (step,)))
            if number not in self._left:
                self._made.append(Sum(number))
        going = {entry.number: None for entry in bucket if self._can_go_on(entry.number)}
        for number in going:
            self._go_on(number, is_due=True)
        if going:
            self._flush(frozenset())

    def _can_go_on(self, number: int) -> bool:
        """Return whether the second round of a transfer can start: all devices have started the first one."""
        is_first = len(self._left.get(number, ())) == len(self.lowering.lowered(number).rounds)
        return is_first and self.lowering.is_joined(number) and not self._waiting[number]

    def _finish(self, numbers: Iterable[int]) -> None:
        """Do the remaining rounds of transfers, in the same order on all devices."""
        left = sorted(self._left.keys() & numbers)
        joined = [number for number in left if self.lowering.is_joined(number)]
        self._go_through(joined, {piece.device for number in joined for piece in self.transfers[number].pieces})
        for number in sorted({*left}.difference(joined)):
            self._go_through([number], frozenset())
        for number in left:
            self._left.pop(number, None)

    def _go_through(self, numbers: Sequence[int], ended: Set[int]) -> None:
        """Do the remaining rounds of transfers together."""
        self._flush(ended)
        while going := [n for n in numbers if len(self._left.get(n, ())) > 1]:
            self._point += 1
            for number in going:
                self._go_on(number)
            self._flush(ended)

    def _go_on(self, number: int, is_due: bool = False) -> None:
        """Wait for a round of a transfer, and start the next one."""
        self._made.append(Arrive(number, self._left[number].pop(0)))
        self._begin(number, self._left[number][0], is_due)
