"""Replicated producers: a reader waits for one replica of each addend.

Work waits for all of its data, mirrors and orders, but for any one replica. Running ready work until none is left finds
an order exactly when one exists, for any choice of replicas, without a search.
"""

import heapq
from collections.abc import Iterator, Mapping

from superscaler.ir.orders import Group
from superscaler.ir.parts import rows_under
from superscaler.schedule.dataflow import Dataflow, Port, Unit
from superscaler.schedule.joins import alternatives

# The op name of units that stand for an op_order, by its number.
ORDER = "*order"


def members(flow: Dataflow, group: Group) -> Iterator[Unit]:
    """Yield the parts in a group: of ops; of their mirrors in a group of kind B, I or W; of optimizer ops."""
    for name, paths in group.members:
        op, keys = flow.graph.op(name), flow.rows[name].keys
        named = flow.mirrors.get(name) if op.is_forward and group.kind != "F" else op
        for path in paths or ((),):
            for row in range(*rows_under(flow.graph.grids[name], path)):
                if named is not None and (not op.is_forward or group.microbatch in (None, keys[row][1])):
                    yield named.name, keys[row]


def find_turns(flow: Dataflow) -> Mapping[Unit, int]:
    """Return the time at which each work can run. The order takes the nearest replicas if these allow one.

    Work that cannot run under any choice of replicas has no time.
    """
    waits: list[tuple[Unit, list[Unit]]] = list(_needs(flow))
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


def _needs(flow: Dataflow) -> Iterator[tuple[Unit, list[Unit]]]:
    """Yield (work, alternatives): the work waits for any one of them, the nearest first. Independent work has an empty
    list.
    """
    graph, nexts = flow.graph, flow.model.nexts
    for op in graph.model.ops:
        mirror = flow.mirrors.get(op.name)
        for key in flow.rows[op.name].keys:
            yield (op.name, key), []
            if mirror is not None:
                yield (mirror.name, key), [(op.name, key)]
        for k, operand in enumerate(op.inputs if op.is_forward else ()):
            if home := flow.homes.get(operand.tensor):
                # A weight is read before its update.
                at = [(key[0], (home.name, key)) for key in flow.rows[home.name].keys]
                for key in flow.rows[op.name].keys:
                    last = op.name if mirror is None else mirror.name, key
                    yield from ((update, [last]) for device, update in at if device == key[0])
            if older := flow.homes.get(nexts.get(operand.tensor, "")):
                # The value of a weight in a later iteration is read after the update that makes it.
                made = [(key[0], (older.name, key)) for key in flow.rows[older.name].keys]
                for key in flow.rows[op.name].keys:
                    yield from (((op.name, key), [update]) for device, update in made if device == key[0])
            if operand.tensor in flow.producers:
                yield from _data(flow, flow.producers[operand.tensor], (op, k))
            gradient = mirror.outputs[k].tensor if mirror is not None else ""
            for reader in flow.readers.get(gradient, ()):
                assert mirror is not None
                yield from _data(flow, (mirror, k), reader)
    for number, order in enumerate(graph.orders):
        if "C" in (order.before.kind, order.after.kind):
            # Orders of communication constrain no part.
            continue
        if order.turns:
            continue
        hub: Unit = (ORDER, (number, -1, -1))
        yield from ((hub, [work]) for work in members(flow, order.before))
        # The turn of a mirror is that of I, which does not wait for the needs of W.
        yield from ((work, [hub]) for work in members(flow, order.after) if order.after.kind != "W")


def _data(flow: Dataflow, made: Port, read: Port) -> Iterator[tuple[Unit, list[Unit]]]:
    """Yield (reader, makers of the tensor or of an addend that it waits for)."""
    (maker, j), (reader, k) = made, read
    keys = flow.rows[maker.name].keys
    if flow.is_free(made, read):
        found = alternatives(flow.produced(maker, j), flow.required(reader, k))
    else:
        found = [[[row] for row in rows] for rows in flow.edge(made, read).sources]
    for key, groups in zip(flow.rows[reader.name].keys, found, strict=True):
        yield from (((reader.name, key), [(maker.name, keys[row]) for row in some]) for some in groups)
