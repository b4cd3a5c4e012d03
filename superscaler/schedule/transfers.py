"""Transfers: who must send what to whom so that every read finds its elements with their whole value.

A transfer joins pieces (what one device holds, after summing locally what always travels together) with readers (a
box on a device, however many parts read it). Where every reader needs every piece it is *joint* and may become a
collective; else each link is a message of its own.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from superscaler.ir.mask import Box
from superscaler.ir.parts import Tree
from superscaler.schedule.cover import Held, Wanted
from superscaler.schedule.edges import Edges, Key, Port
from superscaler.schedule.segments import Alias, Segment, root

FORWARD, BACKWARD, UPDATE = "F", "B", "U"


class Place(NamedTuple):
    """An end of a transfer: output or alias `number` of segment instance (`segment`, `key`), or a weight at rest.

    kind F: an output of the forward, or an alias that the forward reads; B: the gradient of an alias that a backward
    makes, or of an output that it reads; U: the part `key` of the optimizer op that `segment` stands for: the weight at
    rest, and the gradient or the new value that it reads.
    """

    kind: str
    segment: int
    key: Key
    number: int


@dataclass(frozen=True, slots=True)
class End:
    """A box of a tensor on a device: a piece that is held there, or what readers there want."""

    device: int
    box: Box
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Transfer:
    """`links` are pairs (piece, reader); the reader's value is the sum of its pieces, each at its own box.

    `classes`, if not empty, has a number per piece: those with equal ones are replicas, and any of them would do.
    """

    tensor: str
    kind: str
    pieces: tuple[End, ...]
    readers: tuple[End, ...]
    links: tuple[tuple[int, int], ...]
    classes: tuple[int, ...] = ()

    @property
    def is_local(self) -> bool:
        return all(self.pieces[p].device == self.readers[r].device for p, r in self.links)

    @property
    def is_joint(self) -> bool:
        return len(self.links) == len(self.pieces) * len(self.readers)

    @property
    def is_to_updates(self) -> bool:
        """Tell whether only updates read it, which come last: gradients of weights."""
        return self.kind == BACKWARD and all(place.kind == UPDATE for end in self.readers for place in end.places)

    @property
    def is_one(self) -> bool:
        """Tell whether it runs at one point of the order; else each of its messages goes when it can."""
        return self.is_joint or self.is_to_updates or bool(self.classes)


def find_transfers(edges: Edges, segments: Sequence[Segment], joins: bool = True) -> list[Transfer]:
    """Return all transfers of activations, weights and gradients of a step, in the order of the tensors.

    With `joins` those of replicas to other devices are one transfer, for which all of them must be made.
    """
    reads: dict[str, list[tuple[Segment, int, Alias]]] = {}
    outputs: dict[str, tuple[Segment, int]] = {}
    for segment in segments:
        for number, alias in enumerate(segment.aliases):
            reads.setdefault(alias.tensor, []).append((segment, number, alias))
        for number, output in enumerate(segment.outputs):
            outputs[output.tensor] = (segment, number)
    found: list[Transfer] = []
    for tensor in dict.fromkeys((*reads, *edges.readers)):
        readers, source = reads.get(tensor, []), outputs.get(tensor)
        if tensor not in edges.makers or tensor not in edges.model.tensors:
            continue
        updates = [_of_update(edges, port, is_made=False) for port in edges.readers.get(tensor, ())]
        made = _of_update(edges, edges.makers[tensor][0]) if source is None else _of_output(edges, FORWARD, *source)
        found += _move(edges, tensor, FORWARD, [made], [*(_alias(edges, *read) for read in readers), *updates], joins)
        with_gradient = [read for read in readers if read[2].labels is not None]
        if with_gradient and (source is None or source[0].outputs[source[1]].has_gradient):
            addends = [_gradient(edges, some) for some in _merge(edges, with_gradient)]
            (port,) = edges.readers[edges.model.gradient(tensor)]
            sink = _of_update(edges, port, is_made=False) if source is None else _of_output(edges, BACKWARD, *source)
            found += _move(edges, tensor, BACKWARD, addends, [sink], joins)
    return found


Reads = list[tuple[Segment, int, Alias]]


class Side(NamedTuple):
    """What makes or reads a tensor: a port, and per part its row, box (`Held` where it is made) and places."""

    port: Port
    rows: Sequence[int]
    boxes: Wanted
    places: Sequence[tuple[Place, ...]]


def _move(
    edges: Edges, tensor: str, kind: str, made: Sequence[Side], read: Sequence[Side], joins: bool
) -> list[Transfer]:
    """Return the transfers from what makes a tensor, each an addend of it, to all that reads it."""
    columns = zip(*(side.boxes.columns() for side in read), strict=True)
    wanted = Wanted(*(np.concatenate(column) for column in columns))
    users = [place for side in read for (place,) in side.places]
    found: list[Transfer] = []
    for side in made:
        at, pairs = {row: n for n, row in enumerate(side.rows)}, list[list[int]]()
        for reader in read:
            joined = edges.join(side.port, reader.port)
            pairs += ([at[source] for source in joined[row]] for row in reader.rows)
        assert isinstance(side.boxes, Held)
        found += _group(tensor, kind, side.boxes, side.places, wanted, users, pairs, joins)
    return found


def _of_update(edges: Edges, port: Port, is_made: bool = True) -> Side:
    """Return the weight at rest, or the gradient or new value that its update reads."""
    return _side(edges, port, UPDATE, edges.home_number[port[0].inputs[0].tensor], 0, is_made)


def _of_output(edges: Edges, kind: str, segment: Segment, number: int) -> Side:
    """Return an output of a segment, or its gradient that the mirrors read."""
    op, slot = segment.outputs[number].op, segment.outputs[number].slot
    port = (op, slot) if kind == FORWARD else (edges.mirrors[op.name], slot)
    return _side(edges, port, kind, segment.number, number, kind == FORWARD)


def _side(edges: Edges, port: Port, kind: str, segment: int, number: int, is_made: bool) -> Side:
    places = [(Place(kind, segment, key, number),) for key in edges.rows[port[0].name].keys]
    return Side(port, range(len(places)), edges.held(*port) if is_made else edges.wanted(*port), places)


def _alias(edges: Edges, segment: Segment, number: int, alias: Alias) -> Side:
    keys = np.array(segment.keys, dtype=np.int64).reshape(-1, 3)
    places = [(Place(FORWARD, segment.number, key, number),) for key in segment.keys]
    return Side(alias.uses[0], alias.keys_at.tolist(), Wanted(alias.lo, alias.hi, keys[:, 0], keys[:, 1]), places)


def _merge(edges: Edges, readers: Reads) -> list[Reads]:
    """Group the aliases whose gradients are alike on all keys: they are summed before they travel."""
    found: dict[Hashable, Reads] = {}
    for segment, number, alias in readers:
        tree = None if alias.rows.regular else id(alias.rows)
        turns = tuple(edges.turns(edges.mirrors[alias.uses[0][0].name]))
        status = (segment.keys, alias.lo.tobytes(), alias.hi.tobytes(), alias.labels, tree, alias.shares, turns)
        found.setdefault(status, []).append((segment, number, alias))
    return list(found.values())


def _gradient(edges: Edges, group: Reads) -> Side:
    """Return the gradient of aliases that are alike, by key of their segments."""
    segment, _, alias = group[0]
    (op, k), at = alias.uses[0], alias.keys_at
    port = edges.mirrors[op.name], k
    held = edges.held(*port)
    tree = None if held.tree is None else _renumber(held.tree, {int(row): key for key, row in enumerate(at)})
    columns, labels = held.columns(at), tuple(held.labels[row] for row in at)
    held = Held(*columns, labels, tree, held.all_routes, k, held.all_replicas, edges.fold)
    places = [tuple(Place(BACKWARD, s.number, key, n) for s, n, _ in group) for key in segment.keys]
    return Side(port, at.tolist(), held, places)


def _renumber(tree: Tree, order: dict[int, int]) -> Tree:
    if not tree.children:
        return Tree(row=order[tree.row])
    return replace(tree, children=tuple(_renumber(child, order) for child in tree.children))


def _group(
    tensor: str,
    kind: str,
    held: Held,
    sources: Sequence[tuple[Place, ...]],
    wanted: Wanted,
    users: Sequence[Place],
    pairs: list[list[int]],
    joins: bool,
) -> list[Transfer]:
    """Merge what always travels together into pieces and readers, and return one transfer per connected component."""
    by_reader: dict[Hashable, list[int]] = {}
    for row, pair in enumerate(pairs):
        by_reader.setdefault((wanted.at[row][0], *wanted.corners(row), tuple(sorted(pair))), []).append(row)
    readers_of: dict[int, list[int]] = {}
    for r, rows in enumerate(by_reader.values()):
        for source in pairs[rows[0]]:
            readers_of.setdefault(source, []).append(r)
    by_piece: dict[Hashable, list[int]] = {}
    for source, reading in sorted(readers_of.items()):
        by_piece.setdefault((held.at[source][0], *held.corners(source), tuple(reading)), []).append(source)
    pieces = [End(held.at[s[0]][0], held.box(s[0]), tuple(p for r in s for p in sources[r])) for s in by_piece.values()]
    readers = [End(wanted.at[w[0]][0], wanted.box(w[0]), tuple(users[x] for x in w)) for w in by_reader.values()]
    links = [(p, r) for p, s in enumerate(by_piece.values()) for r in readers_of[s[0]]]
    found = [Transfer(tensor, kind, *part) for part in _components(pieces, readers, links)]
    if not joins or held.tree is not None or len(found) < 2:
        return found
    labels: dict[Hashable, int] = {}
    held_by = (tuple(held.labels[row] for row in some) for some in by_piece.values())
    numbers = (labels.setdefault((p.box, some), len(labels)) for p, some in zip(pieces, held_by, strict=True))
    return _joined(found, dict(zip(map(id, pieces), numbers, strict=True)))


def _joined(transfers: Sequence[Transfer], class_of: Mapping[int, int]) -> list[Transfer]:
    """Join the transfers of replicas of the same pieces to other devices: together these may share out the work."""
    groups: dict[Hashable, list[Transfer]] = {}
    for t in transfers:
        microbatches = (frozenset(p.key[1] for e in ends for p in e.places) for ends in (t.pieces, t.readers))
        key = (*sorted(class_of[id(p)] for p in t.pieces), *microbatches)
        groups.setdefault(key if t.is_joint and not t.is_to_updates else id(t), []).append(t)
    found: list[Transfer] = []
    for some in groups.values():
        pieces, readers = tuple(p for t in some for p in t.pieces), tuple(r for t in some for r in t.readers)
        devices = [end.device for end in (*pieces, *readers)]
        if len(some) < 2 or len(set(devices)) < len(devices):
            found += some
            continue
        links, p0, r0 = list[tuple[int, int]](), 0, 0
        for t in some:
            links += [(p0 + p, r0 + r) for p, r in t.links]
            p0, r0 = p0 + len(t.pieces), r0 + len(t.readers)
        classes = tuple(class_of[id(p)] for p in pieces)
        found.append(Transfer(some[0].tensor, some[0].kind, pieces, readers, tuple(links), classes))
    return found


def _components(
    pieces: list[End], readers: list[End], links: list[tuple[int, int]]
) -> list[tuple[tuple[End, ...], tuple[End, ...], tuple[tuple[int, int], ...]]]:
    # A reader is ~ its number.
    parent = {n: n for n in (*range(len(pieces)), *(~r for r in range(len(readers))))}
    for p, r in links:
        parent[root(parent, ~r)] = root(parent, p)
    found: dict[int, list[int]] = {}
    for n in parent:
        found.setdefault(root(parent, n), []).append(n)
    own: dict[int, list[tuple[int, int]]] = {n: [] for n in found}
    for p, r in links:
        own[root(parent, p)].append((p, r))
    result = []
    for n, members in found.items():
        ps, rs = [p for p in members if p >= 0], [~r for r in members if r < 0]
        at_p, at_r = ({end: k for k, end in enumerate(ends)} for ends in (ps, rs))
        local = tuple((at_p[p], at_r[r]) for p, r in own[n])
        result.append((tuple(pieces[p] for p in ps), tuple(readers[r] for r in rs), local))
    return result
