"""The transfers of a step: for each activation, weight and gradient, from its makers to all that read it."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from superscaler.errors import ScheduleError
from superscaler.groups import group_by
from superscaler.ir.mask import intersect
from superscaler.ir.parts import Tree
from superscaler.schedule.dataflow import Dataflow, Edge, Port
from superscaler.schedule.grouping import components, group
from superscaler.schedule.joins import Produced, Required
from superscaler.schedule.segments import Alias, Segment
from superscaler.schedule.transfers import BACKWARD, FORWARD, REGATHER, UPDATE, End, Place, Transfer

Read = tuple[Segment, int, Alias]
Reads = list[Read]


class Side(NamedTuple):
    """A producer or consumer of a tensor: its port, and for each part its row, box (`Produced` for producers) and
    places. `form`: equal for sides that are cut alike, whatever their places.
    """

    port: Port
    rows: Sequence[int]
    boxes: Required
    places: Sequence[tuple[Place, ...]]
    form: Hashable

    def numbered(self, start: int) -> list[tuple[Place, ...]]:
        """Return a place with a number in the place of those of each part."""
        kind = self.places[0][0].kind if self.places else ""
        return [(Place(kind, -1, (*at, -1), start + n),) for n, at in enumerate(self.boxes.at)]


def find_transfers(flow: Dataflow, segments: Sequence[Segment], joins: bool) -> list[Transfer]:
    """Return all transfers of activations, weights and gradients of a step, in the order of the tensors.

    With `joins`, replicas for other devices are one transfer, which waits for all of them.
    """
    model = flow.model
    reads, addends = dict[str, Reads](), dict[str, Reads]()
    outputs: dict[str, tuple[Segment, int]] = {}
    for segment in segments:
        for number, alias in enumerate(segment.aliases):
            reads.setdefault(alias.tensor, []).append((segment, number, alias))
            if alias.labels is not None:
                addends.setdefault(model.gradient(alias.tensor), []).append((segment, number, alias))
        for number, output in enumerate(segment.outputs):
            outputs[output.tensor] = (segment, number)
    found = list[Transfer]()
    for tensor in dict.fromkeys((*reads, *flow.readers)):
        if tensor not in flow.makers or tensor not in model.tensors:
            continue
        # Nothing moves that nobody needs.
        is_read = tensor not in flow.unread
        made = [_side(flow, outputs, flow.makers[tensor][0])] if is_read else []
        taken = [_side(flow, outputs, port) for port in flow.readers.get(tensor, ())]
        own = reads.get(tensor, []) if is_read else []
        # What rests where it is read is not gathered.
        is_here = tensor in flow.homes and not taken
        is_here = is_here and all(flow.edge(made[0].port, alias.uses[0]).is_here for *_, alias in own)
        is_again, is_copy = flow.is_gathered_again(tensor), flow.is_copy(tensor)
        is_late = is_again or (is_copy and flow.model.origin(tensor) not in flow.homes)
        each = is_again and flow.graph.policy.gathers_each and not is_here
        for readers, microbatch in _by_region(own, is_late and not is_here, each):
            taken = [*(_alias(*read, microbatch) for read in readers), *taken]
            found += _move(flow, tensor, FORWARD, made, taken, joins) if taken else []
            taken = []
        for read in (read for read in own if read[1] in read[0].regathered):
            found += _regather(flow, made[0], read, joins, is_once=is_again and not each)
        gradient = addends.pop(model.gradient(tensor), [])
        for port in flow.readers.get(model.gradient(tensor), ()) if gradient else ():
            parts = [_gradient(flow, some) for some in _merge(flow, gradient)]
            microbatches = flow.graph.policy.reduced.get(port[0].name, 0)
            if microbatches:
                _check_microbatches(tensor, parts, microbatches)
            moved = _move(
                flow, model.origin(tensor), BACKWARD, parts, [_side(flow, outputs, port)], joins, microbatches
            )
            count = flow.graph.policy.pieces.get(port[0].name, 0)
            found += _in_pieces(moved, flow.extents[tensor], count) if count and flow.extents[tensor] else moved
    return found


def _regather(flow: Dataflow, made: Side, read: Read, joins: bool, is_once: bool) -> list[Transfer]:
    """Return the transfers that regather an alias for backwards: once, or for each microbatch."""
    tensor = read[2].tensor

    def moved(microbatch: int | None) -> list[Transfer]:
        return _move(flow, tensor, FORWARD, [made], [_alias(*read, microbatch, REGATHER)], joins)

    found = moved(None)
    numbers = [{place.key[1] for end in transfer.readers for place in end.places} for transfer in found]
    if is_once or any(len(some) > 1 for some in numbers):
        return found if is_once else [t for at in sorted({key[1] for key in read[0].keys}) for t in moved(at)]
    return [found[n] for n in sorted(range(len(found)), key=lambda n: max(numbers[n]))]


def _by_region(readers: Reads, is_late: bool, each: bool) -> list[tuple[Reads, int | None]]:
    """Return groups of readers of a resident weight or a copy: one per recomputed region, and with `each` for
    regathered weights one per microbatch, because each gathers the weight once more.
    """
    found = group_by(readers, lambda read: read[0].region if is_late else "")
    is_regather = each and (any(found) or any(number in segment.regathered for segment, number, _ in readers))
    microbatches = sorted({key[1] for segment, *_ in readers for key in segment.keys}) if is_regather else [None]
    return [(some, at) for some in found.values() for at in microbatches] or [([], None)]


def _move(
    flow: Dataflow,
    tensor: str,
    kind: str,
    made: Sequence[Side],
    read: Sequence[Side],
    joins: bool,
    microbatches: int = 0,
) -> list[Transfer]:
    """Return the transfers of a tensor from its makers, one addend each, to all readers.

    `microbatches`: number of microbatches that move one by one.
    """
    users = [places for side in read for places in side.places]
    found: list[Transfer] = []
    for side in made:
        edges = [flow.edge(side.port, reader.port) for reader in read]
        key = kind, joins, microbatches, side.form, *edges, *(reader.form for reader in read)
        if key not in flow.moved:
            flow.moved[key] = _moved(tensor, kind, side, read, edges, joins, microbatches)
        found += (like.of(tensor, side.places, users) for like in flow.moved[key])
    return found


def _moved(
    tensor: str, kind: str, side: Side, read: Sequence[Side], edges: Sequence[Edge], joins: bool, count: int
) -> list[Transfer]:
    """Return the transfers from one maker to all readers, with numbers in the place of places."""
    columns = zip(*(reader.boxes.columns() for reader in read), strict=True)
    required = Required(*(np.concatenate(column) for column in columns))
    starts = accumulate((len(reader.places) for reader in read), initial=0)
    users = [place for reader, start in zip(read, starts, strict=False) for (place,) in reader.numbered(start)]
    at = {row: n for n, row in enumerate(side.rows)}
    pairs = [
        [at[n] for n in edge.sources[row]] for edge, reader in zip(edges, read, strict=True) for row in reader.rows
    ]
    assert isinstance(side.boxes, Produced)
    return [
        transfer
        for some in (_by_microbatch(side.boxes, pairs) if count else (pairs,))
        for transfer in group(tensor, kind, side.boxes, side.numbered(0), required, users, some, joins)
    ]


def _in_pieces(transfers: Sequence[Transfer], extents: Sequence[int], count: int) -> list[Transfer]:
    """Return transfers to updates in pieces along the first dim that is long enough, contiguous in memory."""
    slot = next((n for n, extent in enumerate(extents) if extent >= count), int(np.argmax(extents)))
    bounds = [extents[slot] * k // count for k in range(count + 1)]
    return [part for t in transfers for k in range(count) for part in _within(t, k, slot, *bounds[k : k + 2])]


def _within(transfer: Transfer, number: int, slot: int, first: int, end: int) -> list[Transfer]:
    """Return the portion of a transfer to updates between two bounds, as piece `number`."""

    def clipped(side: End) -> End:
        (lo, hi), box = side.box[slot], side.box
        return replace(side, box=(*box[:slot], (max(lo, first), min(hi, end)), *box[slot + 1 :]))

    pieces, readers = list(map(clipped, transfer.pieces)), list(map(clipped, transfer.readers))
    readers = [replace(end, places=tuple(place._replace(number=number) for place in end.places)) for end in readers]
    links = [(p, r) for p, r in transfer.links if intersect(pieces[p].box, readers[r].box)]
    return [part for part in components(transfer.tensor, transfer.kind, pieces, readers, links) if part.links]


def _check_microbatches(tensor: str, parts: Sequence[Side], count: int) -> None:
    """Check that an update in microbatches gets its gradient in as many; a part that they do not cut, as of a penalty
    on weights, comes once.
    """
    numbers = [{at for _, at in part.boxes.at} for part in parts]
    found = {len(some) for some in numbers if some != {-1}}
    if found and not {count} <= found <= {1, count}:
        wrong = max(found - {count})
        raise ScheduleError(
            f"Microbatch({count}) of the update of {tensor}, but its gradient comes in {wrong} microbatches; "
            f"cut the update into {wrong} of them. In a product, give microbatches to one plan "
            "only, as to the pipeline."
        )


def _by_microbatch(produced: Produced, pairs: list[list[int]]) -> list[list[list[int]]]:
    microbatch = [at for _, at in produced.at]
    found = sorted({microbatch[source] for pair in pairs for source in pair})
    return [[[source for source in pair if microbatch[source] == at] for pair in pairs] for at in found]


def _side(flow: Dataflow, outputs: Mapping[str, tuple[Segment, int]], port: Port) -> Side:
    """Return the side of a port: an output of a segment and its gradient, or a weight at rest and its update."""
    op, slot = port
    if op.is_forward or op.is_mirror:
        segment, number = outputs[flow.graph.op(op.of or op.name).outputs[slot].tensor]
        kind, at, is_made = FORWARD if op.is_forward else BACKWARD, segment.number, op.is_forward
    else:
        kind, at, number, is_made = UPDATE, flow.home_number[op.inputs[0].tensor], 0, slot == 0
    places = [(Place(kind, at, key, number),) for key in flow.rows[op.name].keys]
    boxes = flow.produced(*port) if is_made else flow.required(*port)
    return Side(port, range(len(places)), boxes, places, (kind, boxes))


def _alias(segment: Segment, number: int, alias: Alias, microbatch: int | None, kind: str = FORWARD) -> Side:
    """Return the readers of an alias in one microbatch, or (None) in all."""
    keys = segment.key_rows
    own = np.flatnonzero((keys[:, 1] == microbatch) | (microbatch is None))
    places = [(Place(kind, segment.number, segment.keys[at], number),) for at in own.tolist()]
    required = Required(alias.lo[own], alias.hi[own], keys[own, 0], keys[own, 1])
    rows = alias.keys_at[own]
    form = kind, *(column.tobytes() for column in (rows, *required.columns()))
    return Side(alias.uses[0], rows.tolist(), required, places, form)


def _merge(flow: Dataflow, readers: Reads) -> list[Reads]:
    """Group aliases whose gradients are alike on all keys; the gradients of a group are summed before they are sent."""
    found: dict[Hashable, Reads] = {}
    for segment, number, alias in readers:
        tree = None if alias.rows.regular else alias.rows
        turns = tuple(flow.turns(flow.mirrors[alias.uses[0][0].name]))
        status = (segment.keys, alias.lo.tobytes(), alias.hi.tobytes(), alias.labels, tree, alias.shares, turns)
        found.setdefault(status, []).append((segment, number, alias))
    return list(found.values())


def _gradient(flow: Dataflow, alike: Reads) -> Side:
    """Return the gradient of equal aliases, by key of their segments."""
    segment, _, alias = alike[0]
    (op, k), at = alias.uses[0], alias.keys_at
    port = flow.mirrors[op.name], k
    produced = flow.produced(*port)
    tree = None if produced.tree is None else _renumber(produced.tree, {int(row): key for key, row in enumerate(at)})
    columns, labels = produced.columns(at), tuple(produced.labels[row] for row in at)
    form = produced, at.tobytes()
    produced = Produced(*columns, labels, tree, produced.all_routes, k, produced.all_replicas, flow.fold)
    places = [tuple(Place(BACKWARD, s.number, key, n) for s, n, _ in alike) for key in segment.keys]
    return Side(port, at.tolist(), produced, places, form)


def _renumber(tree: Tree, order: dict[int, int]) -> Tree:
    if not tree.children:
        return Tree(row=order[tree.row])
    return replace(tree, children=tuple(_renumber(child, order) for child in tree.children))
