"""Validation and completion: one global order of all work on all devices, or the shortest cycle that forbids it."""

import heapq
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from superscaler.errors import ScheduleError
from superscaler.groups import collect
from superscaler.ir.fold import Fold
from superscaler.ir.graph import Graph
from superscaler.ir.grid import UNASSIGNED
from superscaler.schedule.cycle import explain, shortest_cycle
from superscaler.schedule.dataflow import Dataflow
from superscaler.schedule.dependencies import HUBS, DependencyGraph, Node, Relaxation, Schedule
from superscaler.schedule.find_transfers import find_transfers
from superscaler.schedule.gathers import delay_gathers
from superscaler.schedule.replicas import find_turns
from superscaler.schedule.segments import Segment, check_regathers, find_segments
from superscaler.schedule.transfers import Place

# Constraints that may be given up where no order exists, the cheapest for a step first.
SEPARATE = "copies of a tensor are sent separately"
SPLIT = "segments are split"
OTHERS = "other copies than the nearest are read"


def complete(graph: Graph, fold: Fold | None = None) -> Schedule:
    """Return a schedule of a placed graph. `fold`: makes close devices serve each other.

    If no order exists, relaxations are tried in turn; the schedule lists the applied ones. Raises ScheduleError if none
    is left.
    """
    attempt = _Attempt(Dataflow(graph, fold))
    while not attempt.is_whole:
        found = (relax(attempt) for relax in RELAXATIONS)
        relaxed = next((other for other in found if other is not None), None)
        if relaxed is None:
            raise ScheduleError(explain(attempt.nodes, attempt.cycle, attempt.order))
        attempt = relaxed
    schedule, order = attempt.nodes.schedule, attempt.order
    check_regathers(attempt.flow, schedule.segments)
    late = sort(attempt.nodes, attempt.orbits) if delay_gathers(attempt.nodes, order) else order
    order = late if len(late) == len(order) else order
    schedule.order = [n for n in order if n.kind not in HUBS]
    in_order = {name: tuple(op.name for op in graph.model.ops if op.name in ops) for name, ops in attempt.taken.items()}
    schedule.relaxations = tuple(Relaxation(name, ops) for name, ops in in_order.items())
    return schedule


@dataclass(frozen=True)
class _Attempt:
    """A schedule and the longest order found. `taken`: the ops of each relaxation."""

    flow: Dataflow
    taken: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> DependencyGraph:
        segments = find_segments(self.flow, self.taken.get(SPLIT, frozenset()))
        return DependencyGraph(
            Schedule(self.flow, segments, find_transfers(self.flow, segments, SEPARATE not in self.taken))
        )

    @cached_property
    def order(self) -> list[Node]:
        return sort(self.nodes, self.orbits)

    @cached_property
    def orbits(self) -> list[int]:
        return _orbits(self.nodes)

    @property
    def is_whole(self) -> bool:
        return len(self.order) == len(self.nodes.names)

    @cached_property
    def cycle(self) -> list[Node]:
        return shortest_cycle(self.nodes, self.order)

    @property
    def stuck(self) -> list[Segment]:
        """Return the segments in the cycle."""
        return [self.nodes.schedule.segments[n.number] for n in self.cycle if n.is_run]


def _send_separately(attempt: _Attempt) -> _Attempt | None:
    """Relax: send replicas one by one, so that a reader waits only for the replicas that it reads."""
    transfers, flow = attempt.nodes.schedule.transfers, attempt.flow
    left = {n.number for n in {*attempt.nodes.names}.difference(attempt.order) if n.kind == "C"}
    tensors = {transfers[number].tensor for number in left if transfers[number].classes}
    ops = frozenset(flow.makers[t][0][0].name for t in tensors)
    return replace(attempt, taken={**attempt.taken, SEPARATE: ops}) if ops else None


def _split(attempt: _Attempt) -> _Attempt | None:
    """Relax: split the segments in the cycle into single ops. A cycle of single ops is real."""
    ops = frozenset(op.name for segment in attempt.stuck for op in segment.ops)
    is_split = all(len(segment.ops) == 1 for segment in attempt.stuck)
    return None if is_split else replace(attempt, taken={**attempt.taken, SPLIT: attempt.taken.get(SPLIT, ops) | ops})


def _read_others(attempt: _Attempt) -> _Attempt | None:
    """Relax: read other replicas than the nearest. The other relaxations then start anew."""
    flow = attempt.flow
    names = {op.name: flow.rows[op.name] for segment in attempt.stuck for op in segment.ops}
    ops = frozenset(n for n, rows in names.items() if not rows.regular or len(set(rows.addends())) < len(rows))
    if OTHERS in attempt.taken or not ops:
        return None
    return _Attempt(Dataflow(flow.graph, flow.fold, find_turns(flow)), {OTHERS: ops})


RELAXATIONS: Sequence[Callable[[_Attempt], _Attempt | None]] = (_send_separately, _split, _read_others)


def check_assigned(graph: Graph) -> None:
    """Raise ScheduleError naming the ops that no op_assign placed. Untouched optimizer ops follow their weights."""
    missing = []
    for op in graph.model.ops:
        grid = graph.grids[op.name]
        if not op.is_forward and not grid.axes and not grid.children and int(grid.devices) < 0:
            continue
        if grid.ends()[0] == UNASSIGNED:
            missing.append((op, int((graph.rows(op).device < 0).sum())))
    if missing:
        lines = [
            f"  {op.name} ({op.module or op.target}): {count} part{'s' * (count > 1)}" for op, count in missing[:8]
        ]
        more = [f"  and {len(missing) - 8} more"] if len(missing) > 8 else []
        raise ScheduleError(
            f"{len(missing)} of {len(graph.model.ops)} ops have parts on no device; call op_assign for:\n"
            + "\n".join(lines + more)
        )


def sort(nodes: DependencyGraph, together: Sequence[int]) -> list[Node]:
    """Return the nodes in one order that keeps every edge; fewer than all if there is a cycle. `together`: orbits.

    Of ready nodes, messages go first (those to updates last), then their makers that depend on data alone, then
    backwards (they release memory), and earlier microbatches before later ones. Corresponding devices do the same at
    the same time, unless one waits for another.
    """
    order = _sort(nodes, together) if len(set(together)) < len(together) else []
    return order if len(order) == len(nodes.names) else _sort(nodes, range(len(nodes.names)))


def _sort(nodes: DependencyGraph, groups: Sequence[int]) -> list[Node]:
    """Sort groups of nodes; `groups` has, for each node, the first node of its group."""
    members = collect((group, node) for node, group in enumerate(groups))
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


def _orbits(nodes: DependencyGraph) -> list[int]:
    """Return, for each node, the first node that does the same on a corresponding device: in a ring, or without a
    fold, on any.
    """
    fold, first = nodes.schedule.flow.fold, dict[Hashable, int]()

    def base(place: Place | Node, is_run: bool = False) -> Hashable:
        device = fold.places[place.key[0]][0] if fold and not (is_run and nodes.passed_on) else 0
        return (*place[:2], device, *place.key[1:], place[3])

    found = []
    for number, node in enumerate(nodes.names):
        if node.kind == "C" and fold is None:
            found.append(number)
        elif node.kind == "C":
            transfer = nodes.schedule.transfers[node.number]
            p, r = transfer.links[max(node.link, 0)]
            ends = transfer.pieces[p].places[0], transfer.readers[r].places[0]
            found.append(first.setdefault((transfer.tensor, node.link < 0, *map(base, ends)), number))
        else:
            found.append(number if node.kind in HUBS else first.setdefault(base(node, node.is_run), number))
    return found


def _priority(nodes: DependencyGraph, number: int) -> tuple[int, int, int, int, int]:
    node = nodes.names[number]
    is_early = node.kind == "F" and node.number in nodes.early
    # An update that other work waits for runs early, any other one at the end.
    is_early |= node.kind == "U" and any(nodes.names[after].kind != "U" for after in nodes.after[number])
    rank = 2 if is_early else {"O": 0, "E": 0, "C": 1, "B": 3, "I": 3, "W": 3, "F": 4, "U": 5}[node.kind]
    place = -node.number if node.kind == "U" else node.number
    if node.is_run:
        segment = nodes.schedule.segments[node.number]
        place = segment.position if node.kind == "F" else -segment.position
        # A recomputed forward runs just before its backward.
        rank = 3 if segment.region else rank
    is_late = node.kind == "C" and nodes.schedule.transfers[node.number].is_to_updates
    if node.kind == "C" and nodes.schedule.transfers[node.number].tensor in nodes.nexts and not is_late:
        # After all other updates that are possible, so that these become one.
        rank, is_late = 2, True
    return rank, is_late or node.key[1], place, node.key[0], number
