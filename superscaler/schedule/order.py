"""Validation and completion: one global order of all work on all devices, or the shortest cycle that forbids it."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from superscaler.errors import ScheduleError
from superscaler.ir.fold import Fold
from superscaler.ir.mask import Mask
from superscaler.ir.parts import UNASSIGNED
from superscaler.ir.transformed import Graph, Group, Order
from superscaler.ir.work import Work
from superscaler.schedule.alternatives import find_turns, members
from superscaler.schedule.edges import Edges, Key
from superscaler.schedule.grid import Row, draw
from superscaler.schedule.homes import place_updates
from superscaler.schedule.segments import Segment, find_segments
from superscaler.schedule.transfers import FORWARD, UPDATE, End, Place, Transfer, find_transfers


class Node(NamedTuple):
    """A unit of work: F or B of a segment instance, U (the updates of a device), or C (transfer `number`).

    For a transfer that is not one, `link` is the message; -1 is the whole transfer. O is the hub of an op_order, P the
    update by the part `key` of op `number` where an op_order names it: U comes before it, and runs it.
    """

    kind: str
    number: int
    key: Key = (-1, -1, -1)
    link: int = -1

    @property
    def device(self) -> int:
        """The device of F, B and P."""
        return self.key[0]


@dataclass(eq=False)
class Schedule:
    """What runs when: the segments, the transfers between them, and one global order of all nodes."""

    edges: Edges
    segments: list[Segment]
    transfers: list[Transfer]
    order: list[Node] = field(default_factory=list)


def complete(graph: Graph, fold: Fold | None = None) -> Schedule:
    """Return a schedule of a transformed graph, whose optimizer ops are placed if they are not yet.

    `fold` tells which devices are close. Raises ScheduleError when an op is unassigned or no order exists.
    """
    check_assigned(graph)
    place_updates(graph)
    edges = Edges(graph, fold)
    alone: frozenset[str] = frozenset()
    is_searched = False
    while True:
        segments = find_segments(edges, alone)
        schedule = Schedule(edges, segments, find_transfers(edges, segments))
        nodes = _Nodes(schedule)
        schedule.order = nodes.sort()
        if len(schedule.order) == len(nodes.names):
            schedule.order = [n for n in schedule.order if n.kind not in "OP"]
            return schedule
        # A cycle through a segment of several ops may vanish when its ops run apart; one through single ops is real.
        cycle = nodes.shortest_cycle(schedule.order)
        merged = {op.name for n in cycle if n.kind in "FB" for op in segments[n.number].ops}
        if any(len(segments[n.number].ops) > 1 for n in cycle if n.kind in "FB"):
            alone |= merged
            continue
        # Nor is one through a replica, if its readers can take another.
        if not is_searched and any(edges.is_replicated(name) for name in merged):
            edges, is_searched = Edges(graph, fold, find_turns(edges)), True
            continue
        raise ScheduleError(nodes.explain(cycle, schedule.order))


def check_assigned(graph: Graph) -> None:
    """Raise ScheduleError naming the ops that no op_assign placed. Untouched optimizer ops follow their weights."""
    missing = []
    for op in graph.ops:
        grid = graph.grids[op.name]
        if not op.is_forward and not grid.axes and not grid.children and int(grid.devices) < 0:
            continue
        if UNASSIGNED in grid.used():
            missing.append((op, int((graph.rows(op).device < 0).sum())))
    if missing:
        lines = [f"  {op.name} ({op.module or op.target}): {count} parts" for op, count in missing[:8]]
        more = [f"  and {len(missing) - 8} more"] if len(missing) > 8 else []
        raise ScheduleError(
            f"{len(missing)} of {len(graph.ops)} ops have parts on no device; call op_assign for:\n"
            + "\n".join(lines + more)
        )


class _Nodes:
    """The dependency graph: nodes by number, edges with their reason."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.graph = schedule.edges.graph
        self.names: list[Node] = []
        self.number: dict[Node, int] = {}
        self.after: list[list[int]] = []
        self.waits: list[int] = []
        self.reason: dict[tuple[int, int], str] = {}
        self._op_number = {op.name: number for number, op in enumerate(self.graph.ops)}
        self.segment_of = {op.name: s for s in schedule.segments for op in s.ops}
        self.keys_of: dict[int, dict[int | None, list[Key]]] = {}
        for segment in schedule.segments:
            for key in segment.keys:
                self._add(Node("F", segment.number, key))
                if segment.has_mirror:
                    self._add(Node("B", segment.number, key))
                    self._edge(Node("F", segment.number, key), Node("B", segment.number, key), "saved activations")
        self._add_updates()
        for number, transfer in enumerate(schedule.transfers):
            self._add_transfer(number, transfer)
        for order_number, order in enumerate(self.graph.orders):
            hub = Node("O", order_number)
            self._add(hub)
            before, after = (self._members(group, order.where) for group in (order.before, order.after))
            self._check_updates_last(order, before, after)
            for node in before:
                self._edge(node, hub, f"op_order, {order.where}")
            for node in after:
                self._edge(hub, node, f"op_order, {order.where}")

    def _add(self, node: Node) -> int:
        if node not in self.number:
            self.number[node] = len(self.names)
            self.names.append(node)
            self.after.append([])
            self.waits.append(0)
        return self.number[node]

    def _edge(self, before: Node, after: Node, reason: str = "") -> None:
        a, b = self._add(before), self._add(after)
        self.after[a].append(b)
        self.waits[b] += 1
        if reason and (a, b) not in self.reason:
            self.reason[a, b] = reason

    def _add_updates(self) -> None:
        """Every read of a weight on a device comes before its update there (anti-dependencies)."""
        devices = {
            int(d) for op in self.schedule.edges.homes.values() for d in self.schedule.edges.rows[op.name].device
        }
        for segment in self.schedule.segments:
            for key in segment.keys:
                if key[0] in devices:
                    self._edge(Node("F", segment.number, key), Node("U", key[0]), "read before update")
                    if segment.has_mirror:
                        self._edge(Node("B", segment.number, key), Node("U", key[0]), "read before update")

    def _node(self, place: Place) -> Node | None:
        if place.kind == UPDATE:
            return None
        return Node(place.kind, place.segment, place.key)

    def _add_transfer(self, number: int, transfer: Transfer) -> None:
        if transfer.is_one and transfer.links:
            self._add_message(Node("C", number), transfer, transfer.pieces, transfer.readers)
            return
        for link, (p, r) in enumerate(transfer.links):
            self._add_message(Node("C", number, link=link), transfer, [transfer.pieces[p]], [transfer.readers[r]])

    def _add_message(self, node: Node, transfer: Transfer, pieces: Sequence[End], readers: Sequence[End]) -> None:
        self._add(node)
        for piece in pieces:
            for place in piece.places:
                if (before := self._node(place)) is not None:
                    self._edge(before, node)
            if transfer.kind == FORWARD and piece.places[0].kind == UPDATE:
                self._edge(node, Node("U", piece.device), "sent before update")
        for reader in readers:
            for place in reader.places:
                self._edge(node, self._node(place) or Node("U", reader.device))

    def _members(self, group: Group, where: str) -> list[Node]:
        found: dict[Node, None] = {}
        done: set[int] = set()
        rest = []
        for name, paths in group.members:
            segment = self.segment_of.get(name)
            if segment is None or paths:
                rest.append((name, paths))
            elif segment.number not in done:
                # All parts of all its ops have the same keys.
                done.add(segment.number)
                keys = self._keys(segment, group.microbatch)
                found.update(dict.fromkeys(Node(group.kind, segment.number, key) for key in keys))
        for kind, name, key in members(self.schedule.edges, replace(group, members=tuple(rest))):
            node = (
                Node("P", self._op_number[name], key) if kind == "U" else Node(kind, self.segment_of[name].number, key)
            )
            if kind == "U" and node not in self.number:
                self._edge(Node("U", key[0]), node)
            found[node] = None
        existing = [n for n in found if n in self.number]
        if not existing:
            raise ScheduleError(
                f"op_order at {where}: no part of {group} exists, so there is nothing to order; "
                "choose a microbatch that Microbatch made, and for B ops that have a backward."
            )
        return existing

    def _check_updates_last(self, order: Order, before: Sequence[Node], after: Sequence[Node]) -> None:
        first = next((n for n in before if n.kind == "P"), None)
        last = next((n for n in after if n.kind != "P"), None)
        if first is not None and last is not None:
            instead = (
                f"Put B of the ops that read {self._name(first)} there instead, or remove this op_order."
                if last.kind == "B"
                else "Remove this op_order: the forwards of the next step come after all updates."
            )
            raise ScheduleError(
                f"op_order at {order.where}: {self.describe(first)} cannot come before {self.describe(last)}. All "
                "updates run at the end of a step, when all gradients are there, because clipping takes the norm of "
                f"all. {instead}"
            )

    def _keys(self, segment: Segment, microbatch: int | None) -> list[Key]:
        """Return the keys of a segment, of all microbatches or of one."""
        if segment.number not in self.keys_of:
            by_microbatch: dict[int | None, list[Key]] = {None: list(segment.keys)}
            for key in segment.keys:
                by_microbatch.setdefault(key[1], []).append(key)
            self.keys_of[segment.number] = by_microbatch
        return self.keys_of[segment.number].get(microbatch, [])

    def sort(self) -> list[Node]:
        """Return the nodes in one order that keeps every edge; fewer than all where there is a cycle.

        Of the nodes that are ready, messages go first (those to updates after what others wait for), then backwards
        (they release memory), earlier microbatches before later ones. Devices that correspond do the same together,
        unless one waits for another.
        """
        together = self._orbits()
        order = self._sort(together) if len(set(together)) < len(together) else []
        return order if len(order) == len(self.names) else self._sort(range(len(self.names)))

    def _sort(self, groups: Sequence[int]) -> list[Node]:
        """Sort groups of nodes, numbered per node by the first of each group."""
        members: dict[int, list[int]] = {}
        for node, group in enumerate(groups):
            members.setdefault(group, []).append(node)
        waits = dict.fromkeys(members, 0)
        for node, group in enumerate(groups):
            waits[group] += self.waits[node]
        ready = [self._priority(group) for group, count in waits.items() if count == 0]
        heapq.heapify(ready)
        order = []
        while ready:
            group = heapq.heappop(ready)[-1]
            for node in members[group]:
                order.append(self.names[node])
                for after in self.after[node]:
                    waits[groups[after]] -= 1
                    if waits[groups[after]] == 0:
                        heapq.heappush(ready, self._priority(groups[after]))
        return order

    def _orbits(self) -> list[int]:
        """Return per node the first node that does the same on a device that corresponds to its own."""
        fold, first = self.schedule.edges.fold, dict[Hashable, int]()
        if fold is None:
            return list(range(len(self.names)))

        def base(place: Place | Node) -> Hashable:
            return (*place[:2], fold.places[place.key[0]][0], *place.key[1:], place[3])

        found = []
        for number, node in enumerate(self.names):
            if node.kind == "C":
                transfer = self.schedule.transfers[node.number]
                p, r = transfer.links[max(node.link, 0)]
                ends = transfer.pieces[p].places[0], transfer.readers[r].places[0]
                found.append(first.setdefault((transfer.tensor, node.link < 0, *map(base, ends)), number))
            elif node.kind == "U":
                found.append(first.setdefault(("U", fold.places[node.number][0]), number))
            else:
                found.append(number if node.kind in "OP" else first.setdefault(base(node), number))
        return found

    def _priority(self, number: int) -> tuple[int, int, int, int, int]:
        node = self.names[number]
        rank = {"O": 0, "C": 1, "B": 2, "F": 3, "U": 4, "P": 5}[node.kind]
        place = -node.number if node.kind == "B" else node.number
        is_late = node.kind == "C" and self.schedule.transfers[node.number].is_to_updates
        return rank, is_late or node.key[1], place, node.key[0], number

    def shortest_cycle(self, sorted_nodes: Sequence[Node]) -> list[Node]:
        """Return a cycle with the least work among the nodes that could not be sorted."""
        done = np.zeros(len(self.names), dtype=bool)
        done[[self.number[n] for n in sorted_nodes]] = True
        best: list[int] = []
        limit = len(self.names) + 1
        left = [n for n in np.flatnonzero(~done).tolist() if self._is_work(n)]
        for start in left[:2000]:
            if path := self._cycle_from(start, done, limit):
                best, limit = path, sum(map(self._is_work, path))
        return [self.names[n] for n in best]

    def _is_work(self, number: int) -> bool:
        return self.names[number].kind not in "CO"

    def _cycle_from(self, start: int, done: np.ndarray, limit: int) -> list[int]:
        """Return a cycle through `start` of less work than `limit`; transfers and orders are passed at no cost."""
        came = {start: -1}
        depth = {start: 1}
        queue = deque([start])
        while queue:
            here = queue.popleft()
            for after in self.after[here]:
                if after == start:
                    path = [here]
                    while came[path[-1]] != -1:
                        path.append(came[path[-1]])
                    return path[::-1]
                if done[after] or after in came:
                    continue
                depth[after] = depth[here] + self._is_work(after)
                if depth[after] < limit:
                    came[after] = here
                    (queue.append if self._is_work(after) else queue.appendleft)(after)
        return []

    def explain(self, cycle: Sequence[Node], done: Sequence[Node]) -> str:
        """Return the message of a cycle: each work with what it needs and why, what is `done` before, what to do."""
        ring = list(cycle)
        lines = ["the schedule has a cycle, so no device can go on."]
        work = [n for n in ring if n.kind not in "CO"]
        for node in work:
            at = ring.index(node)
            why, previous = self._why(ring, at)
            lines.append(f"  {self.describe(node)} needs {self.describe(previous)}  ({why})")
        lines += ["", "What each device does until it is stuck:", *draw(self._rows(work, done)), ""]
        transfers = [self.schedule.transfers[n.number] for n in ring if n.kind == "C"]
        coupled = next(((t.tensor, reader) for t in transfers if (reader := self._coupled(t))), None)
        if coupled:
            lines.append(
                f"{coupled[1]} reads {coupled[0]} of several microbatches, as norms and losses over the batch do: "
                "order all forwards before the first backward, or use 1 microbatch."
            )
        orders = [self.graph.orders[n.number] for n in ring if n.kind == "O"]
        if orders:
            lines.append("Remove or reverse one op_order:" if len(orders) > 1 else "Remove or reverse this op_order:")
            lines += dict.fromkeys(f"  {o.before} before {o.after}, at {o.where}" for o in orders)
        return "\n".join(lines).rstrip()

    def _rows(self, work: Sequence[Node], done: Sequence[Node]) -> list[Row]:
        """Return what the devices of a cycle have done when they are stuck, by step, and what they wait for."""
        called = {}
        for order in self.graph.orders:
            for group in (order.before, order.after):
                if Work.matches(group.label):
                    called.update(dict.fromkeys(self._members(group, order.where), group.label))
        runs = self._runs(done, called)
        pairs = list(zip(work, [work[-1], *work[:-1]], strict=True))

        def ends(node: Node, needed: Node) -> Iterator[str]:
            names = [called.get(n) or self._short(n) for n in (node, needed)]
            is_one = node.device == needed.device and names[0] == names[1] and node != needed
            for n, name in zip((node, needed), names, strict=True):
                # Part of what goes by this name is done, or both ends do.
                is_unclear = n.key[1] >= 0 and (is_one or name in runs.get(n.device, {}).values())
                yield f"{name} ({self._name(n)})" if is_unclear else name

        waits: dict[int, list[str]] = {}
        for node, needed in pairs:
            if node.device != needed.device:
                what = f"{{}} waits for {{}} on device {needed.device}".format(*ends(node, needed))
                waits.setdefault(node.device, []).append(what)
        if not waits:
            form = {1: "{} waits for itself", 2: "{} and {} wait for each other"}.get(len(pairs), "{} waits for {}")
            shown = pairs if len(pairs) > 2 else pairs[:1]
            waits[work[0].device] = [form.format(*ends(*pair)) for pair in shown]
        return [Row(device, runs.get(device, {}), ", ".join(waits[device])) for device in sorted(waits)]

    def _runs(self, done: Sequence[Node], called: Mapping[Node, str]) -> dict[int, dict[int, str]]:
        """Return per device and step the work done, what goes by one name together."""
        level = [0] * len(self.names)
        runs: dict[int, list[tuple[int, str, list[Node]]]] = {}
        for node in done:
            n = self.number[node]
            if is_work := self._is_work(n) and self._is_shown(node):
                mine = runs.setdefault(node.device, [])
                is_plain = node.kind in "FB" and node.key[1] < 0
                name = called.get(node) or (node.kind if is_plain else self._short(node))
                if not mine or mine[-1][1] != name:
                    mine.append((max(level[n], mine[-1][0] + 1 if mine else 0), name, []))
                mine[-1][2].append(node)
                level[n] = mine[-1][0]
            for after in self.after[n]:
                level[after] = max(level[after], level[n] + is_work)
        return {device: {step: self._run(name, nodes) for step, name, nodes in mine} for device, mine in runs.items()}

    def _run(self, name: str, nodes: Sequence[Node]) -> str:
        if name not in ("F", "B"):
            return name
        ops = [op.name for node in nodes for op in self.schedule.segments[node.number].ops]
        return f"{name} to {ops[-1]}" if len(ops) > 1 else f"{name} {ops[0]}"

    def _is_shown(self, node: Node) -> bool:
        """Tell whether work has a step: preparing data has none, nor have updates, which nothing waits for."""
        return node.kind == "P" or (node.kind in "FB" and not self.schedule.segments[node.number].ops[0].from_data)

    def _short(self, node: Node) -> str:
        """Return the name of work on its device: that of its microbatch, or else of its op."""
        part = f" part {node.key[2]}" if node.key[2] > 0 else ""
        if node.kind == "P":
            return f"U {self._name(node)}{part}"
        return f"{node.kind}{node.key[1]}" if node.key[1] >= 0 else f"{node.kind} {self._name(node)}{part}"

    def _name(self, node: Node) -> str:
        """Return the name of the weight of an update, or of the first op of a segment."""
        if node.kind == "P":
            return self.graph.ops[node.number].inputs[0].tensor
        return self.schedule.segments[node.number].ops[0].name

    def _coupled(self, transfer: Transfer) -> str:
        """Return what reads an activation of other microbatches than its own, if anything does."""
        made = {place.key[1] for piece in transfer.pieces for place in piece.places} - {-1}
        readers = (place for reader in transfer.readers for place in reader.places if place.kind == FORWARD)
        if transfer.kind != FORWARD or len(made) < 2:
            return ""
        place = next((p for p in readers if p.key[1] >= 0), None)
        segment = None if place is None else self.schedule.segments[place.segment]
        return "" if segment is None else segment.module or segment.ops[0].name

    def _why(self, ring: list[Node], at: int) -> tuple[str, Node]:
        previous = ring[at - 1]
        if previous.kind == "O":
            return f"op_order, {self.graph.orders[previous.number].where}", ring[at - 2]
        if previous.kind == "C":
            transfer = self.schedule.transfers[previous.number]
            box = transfer.readers[transfer.links[max(previous.link, 0)][1]].box
            return f"data {Mask(transfer.tensor, box)}", ring[at - 2]
        return self.reason.get((self.number[previous], self.number[ring[at]]), "data"), previous

    def describe(self, node: Node) -> str:
        device, micro, ordinal = node.key
        if node.kind == "P":
            where, names = self._name(node), self.graph.ops[node.number].name
        else:
            segment = self.schedule.segments[node.number]
            where = f"{segment.module or segment.ops[0].name}"
            names = segment.ops[0].name + (f"..{segment.ops[-1].name}" if len(segment.ops) > 1 else "")
        number = f"microbatch {micro}, " if micro >= 0 else ""
        part = f", part {ordinal}" if ordinal else ""
        return f"{'U' if node.kind == 'P' else node.kind} of {where} ({names}), {number}device {device}{part}"
