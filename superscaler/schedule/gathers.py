"""When weights at rest, copies and regathered tensors move: shortly before they are read."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from superscaler.groups import collect
from superscaler.schedule.dependencies import PASSED, DependencyGraph, Node
from superscaler.schedule.transfers import FORWARD, Transfer

# A weight is gathered this many segments before its first reader, unless a plan says otherwise: while one segment is
# computed, the weights of the next one arrive.
AHEAD = 1


def delay_gathers(nodes: DependencyGraph, order: Sequence[Node]) -> bool:
    """Delay each gather of a resident weight, copy or regathered tensor to `ahead` segments before its first reader.
    Return whether any edge was added.
    """
    segments, transfers = nodes.schedule.segments, nodes.schedule.transfers
    late = {n: _copiers(nodes, t) for n, t in enumerate(transfers)}
    late = {n: some for n, some in late.items() if some or transfers[n].is_from_rest or transfers[n].is_regather}
    position = {node: at for at, node in enumerate(order)} if late else {}
    runs = collect(
        (node.device, at)
        for node, at in position.items()
        if node.is_run and not segments[node.number].ops[0].from_data and node.number not in nodes.copies
    )
    found, gathers = False, (node for node in position if node.kind == "C" and node.number in late)
    together: dict[int, list[Node]] = {}
    for node in dict.fromkeys(node for gather in gathers for node in (gather, *late[gather.number])):
        readers = sorted((position[reader], reader.device) for reader in _followers(nodes, node))
        tensor = transfers[node.number].tensor if node.kind == "C" else ""
        ahead = nodes.graph.policy.ahead.get(tensor, AHEAD)
        for device, at in {device: at for at, device in reversed(readers)}.items():
            own = runs.get(device, [])
            before = bisect_left(own, at) - 1 - ahead
            # If it is sent just before its first reader on any device, it is in time on all devices.
            if before >= 0 and own[before] < readers[0][0]:
                nodes.edge(order[own[before]], node)
                found = True
            together.setdefault(own[before] if before >= 0 else -1 - device, []).append(node)
    for some in together.values():
        _gather_together(nodes, some)
    return found


def _gather_together(nodes: DependencyGraph, together: Sequence[Node]) -> None:
    """Let gathers of copies of weights wait for all these copies that are made at one time, so that they share
    buckets.
    """
    schedule, origin = nodes.schedule, nodes.graph.model.origin
    copies = (n for n in together if n.kind == "F")
    made = [n for n in copies if origin(schedule.segments[n.number].outputs[0].tensor) in schedule.flow.homes]
    for node in (n for n in together if n.kind == "C" and made):
        if not set(made).isdisjoint(_copiers(nodes, schedule.transfers[node.number])):
            for copy in made:
                nodes.edge(copy, node)


def _followers(nodes: DependencyGraph, node: Node) -> Iterator[Node]:
    """Yield the work that waits for a node, looking through communication, orders and copies."""
    for after in (nodes.names[n] for n in nodes.after[nodes.number[node]]):
        is_on_the_way = after.kind in PASSED or (after.kind == "F" and after.number in nodes.copies)
        yield from _followers(nodes, after) if is_on_the_way else (after,)


def _copiers(nodes: DependencyGraph, transfer: Transfer) -> list[Node]:
    """Return the copies whose values a transfer moves to other devices, unless copies there pass them on."""
    if not nodes.copies or transfer.is_local:
        return []
    if any(place.segment in nodes.copies for end in transfer.readers for place in end.places):
        return []
    made = (place for end in transfer.pieces for place in end.places if place.kind == FORWARD)
    return [Node(*place[:3]) for place in made if place.segment in nodes.copies]
