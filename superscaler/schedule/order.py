"""Validation and completion: one global order of all work on all devices, or the shortest cycle that forbids it."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

from superscaler.errors import ScheduleError
from superscaler.ir.parts import UNASSIGNED
from superscaler.ir.spmd import Fold
from superscaler.ir.transformed import Graph
from superscaler.schedule.alternatives import find_turns
from superscaler.schedule.cycle import explain, shortest_cycle
from superscaler.schedule.edges import Edges
from superscaler.schedule.homes import place_updates
from superscaler.schedule.nodes import Node, Nodes, Schedule
from superscaler.schedule.segments import find_segments
from superscaler.schedule.transfers import Place, find_transfers


def complete(graph: Graph, fold: Fold | None = None) -> Schedule:
    """Return a schedule of a transformed graph, whose optimizer ops are placed if they are not yet.

    `fold` tells which devices are close. Raises ScheduleError when an op is unassigned or no order exists.
    """
    check_assigned(graph)
    place_updates(graph)
    edges = Edges(graph, fold)
    alone: frozenset[str] = frozenset()
    is_searched, joins = False, True
    while True:
        segments = find_segments(edges, alone)
        schedule = Schedule(edges, segments, find_transfers(edges, segments, joins))
        nodes = Nodes(schedule)
        schedule.order = sort(nodes)
        if len(schedule.order) == len(nodes.names):
            schedule.order = [n for n in schedule.order if n.kind not in "OP"]
            return schedule
        # A cycle may vanish when no reader waits for replicas that it does not read.
        if joins and any(t.classes for t in schedule.transfers):
            joins = False
            continue
        # A cycle through a segment of several ops may vanish when its ops run apart; one through single ops is real.
        cycle = shortest_cycle(nodes, schedule.order)
        merged = {op.name for n in cycle if n.kind in "FB" for op in segments[n.number].ops}
        if any(len(segments[n.number].ops) > 1 for n in cycle if n.kind in "FB"):
            alone |= merged
            continue
        # Nor is one through a replica, if its readers can take another.
        if not is_searched and any(edges.is_replicated(name) for name in merged):
            edges, is_searched = Edges(graph, fold, find_turns(edges)), True
            continue
        raise ScheduleError(explain(nodes, cycle, schedule.order))


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


def sort(nodes: Nodes) -> list[Node]:
    """Return the nodes in one order that keeps every edge; fewer than all where there is a cycle.

    Of the nodes that are ready, messages go first (those to updates after what others wait for) and what makes them of
    data alone, then backwards (they release memory), earlier microbatches before later ones. Devices that correspond do
    the same together, unless one waits for another.
    """
    together = _orbits(nodes)
    order = _sort(nodes, together) if len(set(together)) < len(together) else []
    return order if len(order) == len(nodes.names) else _sort(nodes, range(len(nodes.names)))


def _sort(nodes: Nodes, groups: Sequence[int]) -> list[Node]:
    """Sort groups of nodes, numbered per node by the first of each group."""
    members: dict[int, list[int]] = {}
    for node, group in enumerate(groups):
        members.setdefault(group, []).append(node)
    waits = dict.fromkeys(members, 0)
    for node, group in enumerate(groups):
        waits[group] += nodes.waits[node]
    ready = [_priority(nodes, group) for group, count in waits.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        group = heapq.heappop(ready)[-1]
        for node in members[group]:
            order.append(nodes.names[node])
            for after in nodes.after[node]:
                waits[groups[after]] -= 1
                if waits[groups[after]] == 0:
                    heapq.heappush(ready, _priority(nodes, groups[after]))
    return order


def _orbits(nodes: Nodes) -> list[int]:
    """Return per node the first node that does the same on a device that corresponds to its own."""
    fold, first = nodes.schedule.edges.fold, dict[Hashable, int]()
    if fold is None:
        return list(range(len(nodes.names)))

    def base(place: Place | Node) -> Hashable:
        return (*place[:2], fold.places[place.key[0]][0], *place.key[1:], place[3])

    found = []
    for number, node in enumerate(nodes.names):
        if node.kind == "C":
            transfer = nodes.schedule.transfers[node.number]
            p, r = transfer.links[max(node.link, 0)]
            ends = transfer.pieces[p].places[0], transfer.readers[r].places[0]
            found.append(first.setdefault((transfer.tensor, node.link < 0, *map(base, ends)), number))
        elif node.kind == "U":
            found.append(first.setdefault(("U", fold.places[node.number][0]), number))
        else:
            found.append(number if node.kind in "OP" else first.setdefault(base(node), number))
    return found


def _priority(nodes: Nodes, number: int) -> tuple[int, int, int, int, int]:
    node = nodes.names[number]
    is_early = node.kind == "F" and node.number in nodes.early
    rank = 2 if is_early else {"O": 0, "C": 1, "B": 3, "F": 4, "U": 5, "P": 6}[node.kind]
    place = -node.number if node.kind == "B" else node.number
    is_late = node.kind == "C" and nodes.schedule.transfers[node.number].is_to_updates
    return rank, is_late or node.key[1], place, node.key[0], number
