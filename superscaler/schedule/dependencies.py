"""Dependencies between units of work: the work and the transfers of a schedule as the nodes of a graph."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise, product, zip_longest
from typing import NamedTuple

from superscaler.errors import ScheduleError
from superscaler.ir.model import Op
from superscaler.ir.orders import Group, Members, Order
from superscaler.schedule.antidependencies import last_of, of_weights, updates_of
from superscaler.schedule.dataflow import Dataflow, Key
from superscaler.schedule.recompute_order import RUNS, RecomputeOrder, Work, maker_of, reader_of
from superscaler.schedule.replicas import members as parts_of
from superscaler.schedule.segments import Segment
from superscaler.schedule.transfers import FORWARD, UPDATE, End, Transfer

# Kinds of nodes that only order others, and of nodes that are no work.
HUBS = "OE"
PASSED = f"C{HUBS}"
# What a group is, whatever its label.
GroupKey = tuple[Members, str, int | None]


class Node(NamedTuple):
    """A unit of work: F, B, I or W of a segment instance, U (the update of a part of an optimizer op, by its home
    number), or C (transfer `number`).

    `link` is the message of a transfer whose messages run separately; -1 is the whole transfer. O is the hub of an
    op_order, or the hub before a turn on a device. E is the end or the begin of a group that is ordered.
    """

    kind: str
    number: int
    key: Key = (-1, -1, -1)
    link: int = -1

    @property
    def device(self) -> int:
        """Return the device of F, B, I, W and U."""
        return self.key[0]

    @property
    def is_run(self) -> bool:
        """Return whether a segment runs."""
        return self.kind in RUNS


@dataclass(frozen=True, slots=True)
class Relaxation:
    """A constraint, given up because no order kept it, and its ops."""

    name: str
    ops: tuple[str, ...]


@dataclass(eq=False)
class Schedule:
    """Segments, the transfers between them, one global order of all nodes, and the relaxations taken."""

    flow: Dataflow
    segments: list[Segment]
    transfers: list[Transfer]
    order: list[Node] = field(default_factory=list)
    relaxations: tuple[Relaxation, ...] = ()


class DependencyGraph:
    """The dependency graph: nodes by number, edges with their reason."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.graph = schedule.flow.graph
        self.names: list[Node] = []
        self.number: dict[Node, int] = {}
        self.after: list[list[int]] = []
        self.waits: list[int] = []
        self.reason: dict[tuple[int, int], str] = {}
        self.segment_of = {op.name: s for s in schedule.segments for op in s.ops}
        # Mirrors are in the segment of their op.
        self.segment_of |= {m.name: self.segment_of[name] for name, m in schedule.flow.mirrors.items()}
        self.nexts = schedule.flow.model.nexts
        self.keys_of: dict[int, dict[int | None, list[Key]]] = {}
        for segment in schedule.segments:
            for key in segment.keys:
                self._add(Node("F", segment.number, key))
                for first, second in pairwise("F" + segment.backwards):
                    reason = "saved activations" if first == "F" else "kept gradients"
                    self.edge(Node(first, segment.number, key), Node(second, segment.number, key), reason)
        # By update, the transfers of its gradient, each with the number of its piece.
        self.gradients_of: dict[Node, list[tuple[int, Node]]] = {}
        self._add_updates()
        for number, transfer in enumerate(schedule.transfers):
            self._add_transfer(number, transfer)
        recomputed = self._delay()
        self._members: dict[GroupKey, list[Node]] = {}
        # By group, and whether it is the end.
        self._ends: dict[tuple[GroupKey, bool], Node] = {}
        for order_number, order in enumerate(self.graph.orders):
            hub = Node("O", order_number)
            before, after = (self.members(group, order.where) for group in (order.before, order.after))
            self._check_order(order, before, after)
            if order.turns:
                self._take_turns(hub, before, after)
                continue
            self._pass([self._end(order.before, before)], hub, [self._end(order.after, after, is_begin=True)])
            # Recomputed work waits for all that its backward waits for.
            entered = [v for node in after for v in recomputed.entries.get(node[:3], ())] if recomputed.entries else []
            inside = {visit for node in before for visit in recomputed.visits(node[:3])} if entered else set()
            for work in (work for visit in entered if visit not in inside for work in recomputed.runs[visit]):
                self.edge(hub, Node(*work))

    @cached_property
    def early(self) -> frozenset[int]:
        """Return the segments that run early. These are segments without weights read by other devices (such as the
        number of labels) or, in plans without an order, by other microbatches, and those that they read: run late, they
        would keep what they have made. And these are copies, but not copies of copies: those pass from device to device
        during the computation.
        """
        plain, found = {s.number for s in self.schedule.segments if all(op.from_data for op in s.ops)}, set[int]()
        read = [(t, _forwards(t.pieces), _forwards(t.readers)) for t in self.schedule.transfers if t.kind == FORWARD]

        def is_moved(t: Transfer) -> bool:
            return not t.is_local or (len(t.microbatches) > 1 and not self.graph.orders)

        sent = {n for t, made, _ in read if is_moved(t) for n in made}
        while new := plain.intersection(sent).difference(found):
            found |= new
            sent = {n for _, made, readers in read if not found.isdisjoint(readers) for n in made}
        return (self.copies - self.passed_on).union(found)

    def _add(self, node: Node) -> int:
        if node not in self.number:
            self.number[node] = len(self.names)
            self.names.append(node)
            self.after.append([])
            self.waits.append(0)
        return self.number[node]

    def edge(self, before: Node, after: Node, reason: str = "") -> None:
        self._link(self._add(before), self._add(after), reason)

    def _at(self, work: Work) -> int:
        """Return the number of the node of some work, which is added if it is new."""
        number = self.number.get((*work, -1))  # type: ignore[call-overload]
        return self._add(Node(*work)) if number is None else number

    def _link(self, a: int, b: int, reason: str = "") -> None:
        self.after[a].append(b)
        self.waits[b] += 1
        if reason and (a, b) not in self.reason:
            self.reason[a, b] = reason

    def _add_updates(self) -> None:
        flow = self.schedule.flow
        for tensor, op in flow.homes.items():
            for key in () if op.is_rest else flow.rows[op.name].keys:
                self._add(Node("U", flow.home_number[tensor], key))
        for before, after, why in of_weights(flow, self.segment_of):
            self._link(self._at(before), self._at(after), why)

    def _add_transfer(self, number: int, transfer: Transfer) -> None:
        if transfer.is_one and transfer.links:
            self._add_message(Node("C", number), transfer, transfer.pieces, transfer.readers)
            return
        for link, (p, r) in enumerate(transfer.links):
            self._add_message(Node("C", number, link=link), transfer, [transfer.pieces[p]], [transfer.readers[r]])

    def _add_message(self, node: Node, transfer: Transfer, pieces: Sequence[End], readers: Sequence[End]) -> None:
        own, segments = self._add(node), self.schedule.segments
        for piece in pieces:
            for place in piece.places:
                if place.kind != UPDATE:
                    self._link(self._at(maker_of(segments, place)), own)
                elif transfer.kind == FORWARD and not self.home(place.segment).is_rest:
                    self.edge(node, Node(*place[:3]), "sent before update")
                    older = self.schedule.flow.home_number.get(self.nexts.get(transfer.tensor, ""))
                    if older is not None:
                        self.edge(Node("U", older, place.key), node, "sent after update")
                    # An older version is set before the weight changes, which it may read in place.
                    aged = (other for end in readers if end.device == piece.device for other in end.places)
                    for other in (other for other in aged if other.kind == UPDATE):
                        self.edge(Node(*other[:3]), Node(*place[:3]), "read before update")
        for work in updates_of(self.schedule.flow, transfer, pieces):
            update, why = Node(*work), f"read before update, as {transfer.tensor}"
            self.edge(node, update, "sent before update")
            for reader in (reader for reader in readers if reader.device == update.device):
                for place in reader.places:
                    self.edge(Node(*last_of(segments, place)), update, why)
        for reader in readers:
            for place in reader.places:
                self._link(own, self._at(reader_of(segments, place)))
                if transfer.is_to_updates:
                    self.gradients_of.setdefault(Node(*place[:3]), []).append((place.number, node))

    def _delay(self) -> RecomputeOrder:
        """Let recomputed work wait for its backward, unless a plan orders it."""
        orders = self.graph.orders if self.graph.twins else ()
        groups = (group for order in orders for group in (order.before, order.after) if group.kind == "F")
        ops = (self.graph.op(name) for group in groups for name, _ in group.members)
        ordered = frozenset(op.region for op in ops if op.origin)
        recomputed = RecomputeOrder(self.graph.model, self.schedule.segments, self.schedule.transfers, ordered)
        for visit, works in recomputed.runs.items():
            for before, work in product(recomputed.waits.get(visit, ()), works):
                self._link(self._at(before), self._at(work), "recomputed when the backward reaches it")
        return recomputed

    def members(self, group: Group, where: str) -> list[Node]:
        """Return the work of a group, which is often in several orders."""
        key = _key(group)
        if key not in self._members:
            self._members[key] = self._find_members(group, where)
        return self._members[key]

    def _find_members(self, group: Group, where: str) -> list[Node]:
        found: dict[Node, None] = {}
        done: set[int] = set()
        rest = []
        running = [one for one in group.members if one[0] in self.segment_of or not self.graph.op(one[0]).is_forward]
        for name, paths in running:
            segment = self.segment_of.get(name)
            if segment is None or paths:
                rest.append((name, paths))
            elif segment.number not in done:
                # All parts of all its ops have the same keys.
                done.add(segment.number)
                keys = self._keys(segment, group.microbatch)
                kinds = self._kinds(group, segment)
                found.update(dict.fromkeys(Node(kind, segment.number, key) for key in keys for kind in kinds))
        microbatch = None if group.kind == "C" else group.microbatch
        for name, key in parts_of(self.schedule.flow, replace(group, members=tuple(rest), microbatch=microbatch)):
            segment = self.segment_of.get(name)
            if segment is None:
                found[Node("U", self.schedule.flow.home_number[self.graph.op(name).inputs[0].tensor], key)] = None
            else:
                found.update(dict.fromkeys(Node(kind, segment.number, key) for kind in self._kinds(group, segment)))
        if group.kind == "C":
            pairs = (pair for node in found for pair in self.gradients_of.get(node, ()))
            found = {transfer: None for number, transfer in pairs if group.microbatch in (None, number)}
        existing = [n for n in found if n in self.number]
        # A gradient with fewer elements than pieces has empty pieces.
        if running and not existing and group.kind != "C":
            raise ScheduleError(
                f"op_order at {where}: no part of {group} exists, so there is nothing to order; "
                "choose a microbatch that Microbatch made, and for B, I and W ops that have a backward."
            )
        return existing

    def _check_order(self, order: Order, before: Sequence[Node], after: Sequence[Node]) -> None:
        """Raise ScheduleError for an order that changes nothing."""
        if order.turns and {n.device for n in before}.isdisjoint(n.device for n in after):
            raise ScheduleError(f"op_order at {order.where}: {order}, but no device has both; leave turns=True out.")
        moved = (n for n in chain(before, after) if n.kind != "C" or not self.schedule.transfers[n.number].is_local)
        # An empty piece of a gradient has no communication, and its order no effect.
        if before and after and order.before.kind == order.after.kind == "C" and next(moved, None) is None:
            raise ScheduleError(
                f"op_order at {order.where}: {order}, but neither travels between devices; leave it out."
            )

    @staticmethod
    def _kinds(group: Group, segment: Segment) -> str:
        """Return the kinds of a segment's work that are in a group."""
        return segment.backwards if group.kind == "B" else group.kind

    def _pass(self, before: Iterable[Node], hub: Node, after: Iterable[Node]) -> None:
        for node in before:
            self.edge(node, hub)
        for node in after:
            self.edge(hub, node)

    def _end(self, group: Group, members: Sequence[Node], *, is_begin: bool = False) -> Node:
        """Return a node after all work of a group, or before it. All orders of the group share it."""
        key = _key(group), is_begin
        if key not in self._ends:
            end = self._ends[key] = Node("E", len(self._ends))
            self._pass(*(((), end, members) if is_begin else (members, end, ())))
        return self._ends[key]

    def _take_turns(self, hub: Node, first: Sequence[Node], second: Sequence[Node]) -> None:
        """Let the runs of two groups alternate on each device, with a hub between two runs."""
        sides = self._runs(first), self._runs(second)
        for device in sides[0].keys() & sides[1].keys():
            turns = chain.from_iterable(zip_longest(*(side[device] for side in sides), fillvalue=()))
            for number, (before, after) in enumerate(pairwise(filter(None, turns))):
                self._pass(before, hub._replace(key=(device, -1, -1), link=number), after)

    def _runs(self, group: Sequence[Node]) -> dict[int, list[list[Node]]]:
        """Return the work of a group by device, in order and in runs. Each run but the first starts with work that
        waits for communication.
        """
        segments, inside = self.schedule.segments, {self.number[node] for node in group}
        sent = {m for n in inside for m in self.after[n] if self.names[m].kind == "C"}
        moved = (m for m in sent if not self.schedule.transfers[self.names[m].number].is_local)
        late = {self.names[n] for m in moved for n in inside.intersection(self.after[m])}

        def turn(node: Node) -> tuple[int, bool]:
            level = segments[node.number].level
            return level if node.kind == "F" else -level, node not in late

        found: dict[int, list[list[Node]]] = {}
        for node in sorted(group, key=turn):
            runs = found.setdefault(node.device, [])
            if not runs or (node in late and turn(runs[-1][-1])[0] < turn(node)[0]):
                runs.append([])
            runs[-1].append(node)
        return found

    def _keys(self, segment: Segment, microbatch: int | None) -> list[Key]:
        """Return the keys of a segment, of one microbatch or (None) of all."""
        if segment.number not in self.keys_of:
            by_microbatch: dict[int | None, list[Key]] = {None: list(segment.keys)}
            for key in segment.keys:
                by_microbatch.setdefault(key[1], []).append(key)
            self.keys_of[segment.number] = by_microbatch
        return self.keys_of[segment.number].get(microbatch, [])

    @cached_property
    def copies(self) -> frozenset[int]:
        return frozenset(segment.number for segment in self.schedule.segments if segment.is_copy)

    @cached_property
    def passed_on(self) -> frozenset[int]:
        """Return the copies of copies, which pass from device to device in a ring."""
        segments = self.schedule.segments
        copied = {o.tensor for n in self.copies for op in segments[n].ops for o in op.outputs}
        return frozenset(n for n in self.copies if any(alias.tensor in copied for alias in segments[n].aliases))

    def home(self, number: int) -> Op:
        """Return the optimizer op of a home number."""
        return self.schedule.flow.by_home[number]

    def is_work(self, number: int) -> bool:
        return self.names[number].kind not in PASSED


def _forwards(ends: Iterable[End]) -> set[int]:
    """Return the segments whose forwards make or read something."""
    return {place.segment for end in ends for place in end.places if place.kind == FORWARD}


def _key(group: Group) -> GroupKey:
    return group.members, group.kind, group.microbatch
