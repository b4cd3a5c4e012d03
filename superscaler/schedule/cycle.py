"""The reason why no order exists: a shortest cycle, with the work of each device until it is stuck."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from superscaler.ir.graph import KINDS
from superscaler.ir.grid import place_name
from superscaler.ir.mask import Mask
from superscaler.ir.orders import Action, Row, timetable
from superscaler.schedule.dependencies import DependencyGraph, Node
from superscaler.schedule.transfers import BACKWARD, FORWARD, Transfer

# The nodes that are visited at most, again and again, for a shorter cycle than the first.
_VISITS = 200_000


def shortest_cycle(nodes: DependencyGraph, sorted_nodes: Sequence[Node]) -> list[Node]:
    """Return a cycle with the least work among the nodes that could not be sorted. Of large graphs, a cycle through
    each of the nodes is looked for until there were enough visits.
    """
    done = {nodes.number[n] for n in sorted_nodes}
    left = [n for n in range(len(nodes.names)) if n not in done]
    around, work = _Around(nodes, left), [nodes.is_work(n) for n in range(len(nodes.names))]
    best, limit, visits = list[int](), len(nodes.names) + 1, 0
    for start in sorted(left, key=work.__getitem__, reverse=True):
        # Orders of communication alone may form a cycle, too.
        if best and (visits > _VISITS or not work[start]):
            break
        if start in around.after:
            path, seen = _cycle_from(around.after, work, start, limit)
            visits += seen
            if path:
                best, limit = path, sum(work[n] for n in path)
            # All cycles through it are known.
            around.remove(start)
    return [nodes.names[n] for n in best if nodes.names[n].kind != "E"]


class _Around:
    """The nodes around cycles: each has one before it and one after it. `after`: those after each."""

    def __init__(self, nodes: DependencyGraph, left: Iterable[int]) -> None:
        own = {*left}
        self.after = {n: [after for after in nodes.after[n] if after in own] for n in own}
        self.before: dict[int, list[int]] = {n: [] for n in self.after}
        for n, some in self.after.items():
            for after in some:
                self.before[after].append(n)
        self.counts = {n: [len(self.before[n]), len(some)] for n, some in self.after.items()}
        for n in [n for n, both in self.counts.items() if 0 in both]:
            self.remove(n)

    def remove(self, node: int) -> None:
        """Remove a node, and those that are no longer around a cycle."""
        ends = [node]
        while ends:
            node = ends.pop()
            for side, others in enumerate((self.after.pop(node, ()), self.before.pop(node, ()))):
                for other in others:
                    self.counts[other][side] -= 1
                    if self.counts[other][side] == 0:
                        ends.append(other)


def _cycle_from(
    nexts: Mapping[int, Sequence[int]], work: Sequence[bool], start: int, limit: int
) -> tuple[list[int], int]:
    """Return a cycle through `start` with less work than `limit`, and the number of nodes that were visited; transfers
    and orders count as no work.
    """
    came = {start: -1}
    depth = {start: 1}
    queue = deque([start])
    while queue:
        here = queue.popleft()
        for after in nexts[here]:
            if after == start:
                path = [here]
                while came[path[-1]] != -1:
                    path.append(came[path[-1]])
                return path[::-1], len(came)
            if after in came or after not in nexts:
                continue
            depth[after] = depth[here] + work[after]
            if depth[after] < limit:
                came[after] = here
                (queue.append if work[after] else queue.appendleft)(after)
    return [], len(came)


# Why an op reads several microbatches, and the remedy where their order is impossible.
_COUPLINGS = {
    "batch": (
        "as norms and losses over the batch do",
        "Use 1 microbatch; or no order between microbatches, which every schedule of a pipeline has, gpipe too: "
        "op_order(graph, graph.select(kind='F'), graph.select(kind='B')) has none.",
    ),
    "causal": (
        "as causal attention reads earlier ones",
        "Order the forwards of slices in turn, their backwards in reverse.",
    ),
}


def explain(nodes: DependencyGraph, cycle: Sequence[Node], done: Sequence[Node]) -> str:
    """Return the message of a cycle: each work, its need and the reason; the work `done` before; the remedy.

    If a step couples its microbatches, the message names the coupling op and the impossible order.
    """
    ring = list(cycle)
    orders = [nodes.graph.orders[n.number] for n in ring if n.kind == "O"]
    transfers = [nodes.schedule.transfers[n.number] for n in ring if n.kind == "C"]
    coupled, how = next(filter(None, (_coupled(nodes, t) for t in transfers)), ("", "batch"))
    order = next((o for o in orders if o.before.kind != "F"), orders[0] if orders else None)
    # Groups of exact parts have no name; their work is drawn.
    if coupled and order is not None and str(order.before) and str(order.after):
        why, remedy = _COUPLINGS[how]
        ordered = f"{order.before} is ordered before {order.after} ({order.where})"
        return f"{coupled} of several microbatches, {why}, but {ordered}. {remedy}"
    lines = ["the schedule has a cycle, so no device can go on."]
    work = [n for n in ring if n.kind not in "CO"]
    for node in work:
        at = ring.index(node)
        why, previous = _why(nodes, ring, at)
        lines.append(f"  {_describe(nodes, node)} needs {_describe(nodes, previous)}  ({why})")
    if work:
        lines += ["", "What each device does until it is stuck:", *timetable(_rows(nodes, work, done)), ""]
    if orders:
        lines.append("Remove or reverse one op_order:" if len(orders) > 1 else "Remove or reverse this op_order:")
        lines += dict.fromkeys(f"  {o}, at {o.where}" for o in orders)
    return "\n".join(lines).rstrip()


def _rows(nodes: DependencyGraph, work: Sequence[Node], done: Sequence[Node]) -> list[Row]:
    """Return, for each device of a cycle, its work by step until it is stuck, and the work that it waits for."""
    called = {}
    for order in nodes.graph.orders:
        for group in (order.before, order.after):
            if Action.matches(group.label):
                called.update(dict.fromkeys(nodes.members(group, order.where), group.label))
    runs = _runs(nodes, done, called)

    def name(node: Node) -> str:
        """Return the name of work, with its op if other work of that name is done."""
        short = called.get(node) or _short(nodes, node)
        is_begun = node.key[1] >= 0 and short in runs.get(node.device, {}).values()
        return f"{short} ({_name(nodes, node)})" if is_begun else short

    waits: dict[int, list[str]] = {}
    for node, needed in zip(work, [work[-1], *work[:-1]], strict=True):
        if node.device != needed.device:
            text = f"{name(node)} waits for {name(needed)} on {place_name(needed.device)}"
            waits.setdefault(node.device, []).append(text)
    if not waits:
        found = list(dict.fromkeys(map(name, work)))
        *names, last = found if len(found) > 1 or len(work) == 1 else [f"{name(n)} ({_name(nodes, n)})" for n in work]
        text = f"{', '.join(names)} and {last} wait for each other" if names else f"{last} waits for itself"
        waits[work[0].device] = [text]
    return [Row(device, runs.get(device, {}), ", ".join(waits[device])) for device in sorted(waits)]


def _runs(nodes: DependencyGraph, done: Sequence[Node], called: Mapping[Node, str]) -> dict[int, dict[int, str]]:
    """Return the names of work done, by device and step; work of one name is joined."""
    level = [0] * len(nodes.names)
    runs: dict[int, list[tuple[int, str, list[Node]]]] = {}
    for node in done:
        n = nodes.number[node]
        if is_work := nodes.is_work(n) and _is_shown(nodes, node):
            mine = runs.setdefault(node.device, [])
            is_plain = node.is_run and node.key[1] < 0
            name = called.get(node) or (_letter(nodes, node) if is_plain else _short(nodes, node))
            if not mine or mine[-1][1] != name:
                mine.append((max(level[n], mine[-1][0] + 1 if mine else 0), name, []))
            mine[-1][2].append(node)
            level[n] = mine[-1][0]
        for after in nodes.after[n]:
            level[after] = max(level[after], level[n] + is_work)
    return {device: {step: _run(nodes, name, some) for step, name, some in mine} for device, mine in runs.items()}


def _run(nodes: DependencyGraph, name: str, some: Sequence[Node]) -> str:
    if name not in KINDS:
        return name
    ops = [op.name for node in some for op in nodes.schedule.segments[node.number].ops]
    return f"{name} to {ops[-1]}" if len(ops) > 1 else f"{name} {ops[0]}"


def _is_shown(nodes: DependencyGraph, node: Node) -> bool:
    """Return whether work has a step: not the preparation of data, nor updates without dependents."""
    if node.kind == "U":
        return bool(nodes.after[nodes.number[node]])
    return node.is_run and not nodes.schedule.segments[node.number].ops[0].from_data


def _short(nodes: DependencyGraph, node: Node) -> str:
    """Return the name of work on its device: by its microbatch, or else by its op."""
    part = f" part {node.key[2]}" if node.key[2] > 0 else ""
    if node.kind == "U":
        return f"U {_name(nodes, node)}{part}"
    kind = _letter(nodes, node)
    return f"{kind}{node.key[1]}" if node.key[1] >= 0 else f"{kind} {_name(nodes, node)}{part}"


def _coupled(nodes: DependencyGraph, transfer: Transfer) -> tuple[str, str]:
    """Return the op that reads several microbatches (as text), and the kind of coupling (a key of `_COUPLINGS`)."""
    made = {place.key[1] for piece in transfer.pieces for place in piece.places} - {-1}
    places = (place for reader in transfer.readers for place in reader.places if place.kind in (FORWARD, BACKWARD))
    place = next((p for p in places if p.key[1] >= 0), None)
    if place is None or len(made) < 2:
        return "", "batch"
    ops, is_forward = nodes.schedule.segments[place.segment].ops, transfer.kind == FORWARD
    reads = (op for op in ops for o in (op.inputs if is_forward else op.outputs) if o.tensor == transfer.tensor)
    op = next(reads, ops[0])
    where = " of ".join(filter(None, (op.source, op.module)))
    text = f"{op.name} ({where})" if where else op.name
    uses = nodes.graph.model.uses.get(transfer.tensor, ())
    is_causal = any(
        user.indices[i].until is not None for user, k in uses for i in user.inputs[k].slots if i is not None
    )
    how = "causal" if is_causal else "batch"
    return f"{text} reads {'' if is_forward else 'the gradient of '}{transfer.tensor}", how


def _why(nodes: DependencyGraph, ring: list[Node], at: int) -> tuple[str, Node]:
    previous = ring[at - 1]
    if previous.kind == "O":
        return f"op_order, {nodes.graph.orders[previous.number].where}", ring[at - 2]
    if previous.kind == "C":
        transfer = nodes.schedule.transfers[previous.number]
        box = transfer.readers[transfer.links[max(previous.link, 0)][1]].box
        return f"data {Mask(transfer.tensor, box)}", ring[at - 2]
    return nodes.reason.get((nodes.number[previous], nodes.number[ring[at]]), "data"), previous


def _name(nodes: DependencyGraph, node: Node) -> str:
    """Return the weight of an update, or the first op of a segment."""
    if node.kind == "U":
        return nodes.home(node.number).inputs[0].tensor
    return nodes.schedule.segments[node.number].ops[0].name


def _letter(nodes: DependencyGraph, node: Node) -> str:
    """Return the kind of work as plans name it; R is a recomputed forward."""
    is_recomputed = node.kind == "F" and nodes.schedule.segments[node.number].region
    return "R" if is_recomputed else node.kind


def _describe(nodes: DependencyGraph, node: Node) -> str:
    device, micro, ordinal = node.key
    if node.kind == "U":
        where, names = _name(nodes, node), nodes.home(node.number).name
    else:
        segment = nodes.schedule.segments[node.number]
        where = segment.module or segment.ops[0].name
        names = segment.ops[0].name + (f"..{segment.ops[-1].name}" if len(segment.ops) > 1 else "")
    number = f"microbatch {micro}, " if micro >= 0 else ""
    part = f", part {ordinal}" if ordinal else ""
    return f"{_letter(nodes, node)} of {where} ({names}), {number}{place_name(device)}{part}"
