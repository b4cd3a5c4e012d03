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

from superscaler.ir.graph import Op
from superscaler.ir.mask import Box
from superscaler.ir.parts import Tree
from superscaler.schedule.cover import Held, Wanted, join
from superscaler.schedule.edges import Edges, Key
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
    for tensor in dict.fromkeys((*reads, *edges.written)):
        readers = reads.get(tensor, [])
        source = outputs.get(tensor)
        home = edges.homes.get(tensor)
        if source is None and home is None:
            continue
        found += _forward(edges, tensor, source, home, readers, joins)
        with_gradient = [r for r in readers if r[2].labels is not None]
        if with_gradient and (home is not None or (source and source[0].outputs[source[1]].has_gradient)):
            found += _backward(edges, tensor, source, home, with_gradient, joins)
    return found


Reads = list[tuple[Segment, int, Alias]]
Source = tuple[Segment, int] | None


def _forward(edges: Edges, tensor: str, source: Source, home: Op | None, readers: Reads, joins: bool) -> list[Transfer]:
    held, places = _made(edges, tensor, source, home)
    sides = [_alias_wanted(segment, alias) for segment, _, alias in readers]
    users = [Place(FORWARD, s.number, key, n) for s, n, _ in readers for key in s.keys]
    pairs = [edges.forward(*alias.uses[0])[row] for _, _, alias in readers for row in alias.keys_at.tolist()]
    for op in edges.written.get(tensor, []):
        sides.append(edges.wanted(edges.rows[op.name], op.inputs[1]))
        users += [Place(UPDATE, edges.home_number[op.inputs[0].tensor], k, 0) for k in edges.rows[op.name].keys]
        pairs += join(held, sides[-1])
    wanted = Wanted(*(np.concatenate(column) for column in zip(*(side.columns() for side in sides), strict=True)))
    return _group(tensor, FORWARD, held, [(p,) for p in places], wanted, users, pairs, joins)


def _made(edges: Edges, tensor: str, source: Source, home: Op | None) -> tuple[Held, list[Place]]:
    """Return what holds a tensor: the outputs of a segment (in row order of its op), or the weight at rest."""
    if source is None:
        assert home is not None
        rows = edges.rows[home.name]
        held = edges.held(rows, home.outputs[0])
        return held, [Place(UPDATE, edges.home_number[tensor], key, 0) for key in rows.keys]
    segment, number = source
    output = segment.outputs[number]
    rows = edges.rows[output.op.name]
    return edges.held(rows, output.op.outputs[output.slot]), [
        Place(FORWARD, segment.number, key, number) for key in rows.keys
    ]


def _backward(
    edges: Edges, tensor: str, source: Source, home: Op | None, readers: Reads, joins: bool
) -> list[Transfer]:
    wanted, places = _made(edges, tensor, source, home)
    users = [p._replace(kind=UPDATE if home else BACKWARD) for p in places]
    routes = source is not None and edges.rows[source[0].outputs[source[1]].op.name].routes
    found: list[Transfer] = []
    wanted = replace(wanted, turns=edges.turns("U" if home else "B", edges.maker(tensor)[0]))
    for group in _merge(edges, readers):
        held = _gradient(edges, group)
        pairs = _routed(edges, tensor, source, group, wanted) if routes else join(held, wanted)
        sources = [tuple(Place(BACKWARD, s.number, key, n) for s, n, _ in group) for key in group[0][0].keys]
        found += _group(tensor, BACKWARD, held, sources, wanted, users, pairs, joins)
    return found


def _merge(edges: Edges, readers: Reads) -> list[Reads]:
    """Group the aliases whose gradients are alike on all keys: they are summed before they travel."""
    found: dict[Hashable, Reads] = {}
    for segment, number, alias in readers:
        tree = None if alias.rows.regular else id(alias.rows)
        turns = edges.turns("B", alias.uses[0][0])
        status = (segment.keys, alias.lo.tobytes(), alias.hi.tobytes(), alias.labels, tree, alias.shares, tuple(turns))
        found.setdefault(status, []).append((segment, number, alias))
    return list(found.values())


def _gradient(edges: Edges, group: Reads) -> Held:
    """Return the gradient rows of aliases that are alike, by key of their segments."""
    segment, _, alias = group[0]
    (op, k), at = alias.uses[0], alias.keys_at
    turns = edges.turns("B", op)
    mine = [turns[row] for row in at] if turns else ()
    if alias.rows.regular or (alias.rows.routes and not alias.rows.has_shares):
        return Held(*_alias_wanted(segment, alias).columns(), alias.labels or (), turns=mine, fold=edges.fold)
    # That of an irregular op has its tree, over the segment's keys.
    held = edges.held(alias.rows, op.inputs[k], edges.labels(op, k), k)
    assert held.tree is not None
    tree = _renumber(held.tree, {int(row): key for key, row in enumerate(at)})
    labels = tuple(held.labels[row] for row in at)
    return Held(*held.columns(at), labels, tree, held.all_routes, k, held.all_replicas, edges.fold, turns=mine)


def _renumber(tree: Tree, order: dict[int, int]) -> Tree:
    if not tree.children:
        return Tree(row=order[tree.row])
    return replace(tree, children=tuple(_renumber(child, order) for child in tree.children))


def _routed(edges: Edges, tensor: str, source: Source, group: Reads, wanted: Wanted) -> list[list[int]]:
    """Return the gradient rows that each part of a routing producer reads: those of the addends that it serves."""
    assert source is not None
    segment, _, alias = group[0]
    output = source[0].outputs[source[1]]
    use = alias.uses[0]
    number = edges.gradient_uses(tensor).index(use)
    labels = edges.labels(*use)
    pairs: list[list[int]] = []
    for row, served in enumerate(edges.served(output.op)):
        mine = {(output.slot, number, label) for label in labels} & served
        chosen: dict[Hashable, int] = {}
        for key, at in enumerate(alias.keys_at.tolist()):
            label = (output.slot, number, labels[at])
            if label in mine and (label not in chosen or segment.keys[key][:2] == wanted.at[row]):
                chosen[label] = key
        pairs.append(list(chosen.values()))
    return pairs


def _alias_wanted(segment: Segment, alias: Alias) -> Wanted:
    keys = np.array(segment.keys, dtype=np.int64).reshape(-1, 3)
    return Wanted(alias.lo, alias.hi, keys[:, 0], keys[:, 1])


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
