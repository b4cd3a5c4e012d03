"""Which work can run before which where producers are replicated: a reader waits for one replica of each addend.

Data, mirrors and orders are waited for all, replicas for any one. Running what is ready until nothing is finds an order
exactly when one exists, whatever the choices, without a search.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping

from superscaler.ir.graph import Op
from superscaler.ir.transformed import Group, rows_under
from superscaler.schedule.cover import alternatives
from superscaler.schedule.edges import Edges, Unit


def members(edges: Edges, group: Group) -> Iterator[Unit]:
    """Yield the work of the parts in a group; an optimizer op's is U, whatever the group's kind."""
    for name, paths in group.members:
        op, keys = edges.graph.op(name), edges.rows[name].keys
        for path in paths or ((),):
            for row in range(*rows_under(edges.graph.grids[name], path)):
                if not op.is_forward:
                    yield "U", name, keys[row]
                elif group.microbatch in (None, keys[row][1]):
                    yield group.kind, name, keys[row]


def find_turns(edges: Edges) -> Mapping[Unit, int]:
    """Return when each work can run, in an order that keeps to the nearest replicas where these are no hindrance.

    Work that no choice of replicas lets run has no turn.
    """
    waits: list[tuple[Unit, list[Unit]]] = list(_needs(edges))
    number = {work: n for n, work in enumerate(dict.fromkeys(w for work, some in waits for w in (work, *some)))}
    left, least = [0] * len(number), [0] * len(number)
    readers: list[list[tuple[int, int, bool]]] = [[] for _ in number]
    for at, (work, some) in enumerate(waits):
        for k, source in enumerate(some):
            readers[number[source]].append((at, number[work], k == 0))
        left[number[work]] += bool(some)
        least[number[work]] += bool(some)
    works, found = list(number), dict[Unit, int]()
    met = [False] * len(waits)
    ready = [(left[n] > 0, n) for n in range(len(works)) if least[n] == 0]
    heapq.heapify(ready)
    while ready:
        _, n = heapq.heappop(ready)
        if works[n] in found:
            continue
        found[works[n]] = len(found)
        for at, reader, is_nearest in readers[n]:
            left[reader] -= is_nearest
            least[reader] -= not met[at]
            met[at] = True
            if least[reader] == 0:
                heapq.heappush(ready, (left[reader] > 0, reader))
    return found


def _needs(edges: Edges) -> Iterator[tuple[Unit, list[Unit]]]:
    """Yield what waits for any one of what, the nearest first; work that waits for nothing with an empty list."""
    graph = edges.graph
    for op in graph.ops:
        for key in edges.rows[op.name].keys:
            if not op.is_forward:
                yield ("U", op.name, key), [("U", "", (key[0], -1, -1))]
                continue
            yield ("F", op.name, key), []
            for kind in "FB" if op.has_mirror else "F":
                yield ("U", "", (key[0], -1, -1)), [(kind, op.name, key)]
            if op.has_mirror:
                yield ("B", op.name, key), [("F", op.name, key)]
        for k, operand in enumerate(op.inputs if op.is_forward else ()):
            if operand.tensor in edges.producers:
                yield from _forward(edges, op, k)
            if (op, k) in edges.gradient_uses(operand.tensor):
                yield from _backward(edges, op, k)
    for number, order in enumerate(graph.orders):
        hub: Unit = ("O", "", (number, -1, -1))
        exists = {
            (kind, op.name) for op in graph.ops for kind in ("FB" if op.has_mirror else "F" if op.is_forward else "U")
        }
        yield from ((hub, [work]) for work in members(edges, order.before) if work[:2] in exists)
        yield from ((work, [hub]) for work in members(edges, order.after) if work[:2] in exists)


def _forward(edges: Edges, reader: Op, k: int) -> Iterator[tuple[Unit, list[Unit]]]:
    producer, j = edges.producers[reader.inputs[k].tensor]
    made, read = edges.rows[producer.name], edges.rows[reader.name]
    if edges.is_free(producer, reader, k):
        held, wanted = edges.held(made, producer.outputs[j]), edges.wanted(read, reader.inputs[k])
        found = alternatives(held, wanted)
    else:
        found = [[[source] for source in sources] for sources in edges.forward(reader, k)]
    for key, groups in zip(read.keys, found, strict=True):
        yield from ((("F", reader.name, key), [("F", producer.name, made.keys[s]) for s in some]) for some in groups)


def _backward(edges: Edges, reader: Op, k: int) -> Iterator[tuple[Unit, list[Unit]]]:
    """The mirror of what `reader` reads waits for that of `reader`."""
    operand, rows = reader.inputs[k], edges.rows[reader.name]
    if operand.tensor not in edges.homes and operand.tensor not in edges.producers:
        return
    maker, j = edges.maker(operand.tensor)
    labels, made = edges.labels(reader, k), edges.rows[maker.name]
    if maker.is_forward and made.routes:
        number = edges.gradient_uses(operand.tensor).index((reader, k))
        found = [[[r] for r, label in enumerate(labels) if (j, number, label) in mine] for mine in edges.served(maker)]
    else:
        found = alternatives(edges.held(rows, operand, labels, k), edges.wanted(made, maker.outputs[j]))
    kind = "B" if maker.is_forward else "U"
    for key, groups in zip(made.keys, found, strict=True):
        yield from (((kind, maker.name, key), [("B", reader.name, rows.keys[s]) for s in some]) for some in groups)
