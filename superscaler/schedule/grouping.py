"""Groups of the parts that make and read a tensor: what is always sent together is one piece or one reader."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace

from superscaler.groups import collect, group_by
from superscaler.ir.grid import HOSTS
from superscaler.schedule.joins import Produced, Required
from superscaler.schedule.segments import root
from superscaler.schedule.transfers import End, Place, Transfer


def group(
    tensor: str,
    kind: str,
    produced: Produced,
    sources: Sequence[tuple[Place, ...]],
    required: Required,
    users: Sequence[Place],
    pairs: list[list[int]],
    joins: bool,
) -> list[Transfer]:
    """Merge values that are always sent together into pieces and readers; return a transfer per connected component."""
    by_reader = collect(
        ((required.at[row][0], required.corners(row), tuple(sorted(pair))), row) for row, pair in enumerate(pairs)
    )
    read = [pairs[rows[0]] for rows in by_reader.values()]
    alike = _alike(read, lambda source: (produced.at[source][0], produced.corners(source)))
    pieces = [End(produced.at[s[0]][0], produced.box(s[0]), tuple(p for r in s for p in sources[r])) for s, _ in alike]
    readers = [End(required.at[w[0]][0], required.box(w[0]), tuple(users[x] for x in w)) for w in by_reader.values()]
    found = components(tensor, kind, pieces, readers, [(p, r) for p, (_, by) in enumerate(alike) for r in by])
    if joins and produced.tree is None and len(found) > 1:
        labels: dict[Hashable, int] = {}
        held_by = (tuple(produced.labels[row] for row in some) for some, _ in alike)
        numbers = (labels.setdefault((p.box, some), len(labels)) for p, some in zip(pieces, held_by, strict=True))
        found = _joined(found, dict(zip(pieces, numbers, strict=True)))
    return [part for transfer in found for part in _by_pieces(transfer)]


def _alike(read: Sequence[Sequence[int]], where: Callable[[int], Hashable]) -> list[tuple[list[int], tuple[int, ...]]]:
    """Return the sources that are at one place and have the same readers, each with those; `read`: per reader."""
    readers_of = collect((source, reader) for reader, sources in enumerate(read) for source in sources)
    found: dict[Hashable, tuple[list[int], tuple[int, ...]]] = {}
    for source, readers in sorted(readers_of.items()):
        found.setdefault((where(source), *readers), ([], tuple(readers)))[0].append(source)
    return list(found.values())


def _by_pieces(transfer: Transfer) -> list[Transfer]:
    """Split a transfer that is not joint into parts that may be collectives: readers on several devices of the same
    pieces, or one reader among their holders. Readers of values on their own device come first.
    """
    if transfer.is_one:
        return [transfer]
    sources: list[list[int]] = [[] for _ in transfer.readers]
    for p, r in transfer.links:
        sources[r].append(p)
    here, alike = list[int](), dict[tuple[int, ...], list[int]]()
    for r, reader in enumerate(transfer.readers):
        is_here = all(transfer.pieces[p].device == reader.device for p in sources[r])
        (here if is_here else alike.setdefault(tuple(sorted(sources[r])), [])).append(r)
    joint = [some for some in alike.values() if len({transfer.readers[r].device for r in some}) > 1]
    left = [r for some in alike.values() if some not in joint for r in some]
    # A reader may be a collective of its own if it reads a value on its device that other devices hold too.
    own = {transfer.readers[r].device for r in left}
    is_own = len(alike) == 1 and any(transfer.pieces[p].device in own for some in alike for p in some)
    if not joint and not is_own:
        return [transfer]
    return [part for some in (here, *joint, left) for part in _read_by(transfer, some, sources)]


def _read_by(transfer: Transfer, some: Sequence[int], sources: Sequence[Sequence[int]]) -> list[Transfer]:
    """Return the transfers to some readers; pieces that differed only by their other readers become one."""
    ends = transfer.pieces
    alike = _alike([sources[r] for r in some], lambda p: (ends[p].device, ends[p].box))
    pieces = [replace(ends[same[0]], places=tuple(at for p in same for at in ends[p].places)) for same, _ in alike]
    readers = [transfer.readers[r] for r in some]
    links = [(p, r) for p, (_, by) in enumerate(alike) for r in by]
    return components(transfer.tensor, transfer.kind, pieces, readers, links)


def _joined(transfers: Sequence[Transfer], class_of: Mapping[End, int]) -> list[Transfer]:
    """Join transfers of replicas of the same pieces to other devices, so that the replicas can share the work."""
    groups: dict[Hashable, list[Transfer]] = {}
    for t in transfers:
        microbatches = (frozenset(p.key[1] for e in ends for p in e.places) for ends in (t.pieces, t.readers))
        key = (*sorted(class_of[p] for p in t.pieces), *microbatches)
        groups.setdefault(key if t.is_joint and not t.is_to_updates else t, []).append(t)
    found: list[Transfer] = []
    for some in groups.values():
        pieces, readers = tuple(p for t in some for p in t.pieces), tuple(r for t in some for r in t.readers)
        devices = [end.device % HOSTS for end in (*pieces, *readers)]
        if len(some) < 2 or len(set(devices)) < len(devices):
            found += some
            continue
        links, p0, r0 = list[tuple[int, int]](), 0, 0
        for t in some:
            links += [(p0 + p, r0 + r) for p, r in t.links]
            p0, r0 = p0 + len(t.pieces), r0 + len(t.readers)
        classes = tuple(class_of[p] for p in pieces)
        found.append(Transfer(some[0].tensor, some[0].kind, pieces, readers, tuple(links), classes))
    return found


def components(
    tensor: str, kind: str, pieces: Sequence[End], readers: Sequence[End], links: Sequence[tuple[int, int]]
) -> list[Transfer]:
    """Return a transfer per connected component of links."""
    # Readers are encoded as ~number, pieces as number.
    parent = {n: n for n in (*range(len(pieces)), *(~r for r in range(len(readers))))}
    for p, r in links:
        parent[root(parent, ~r)] = root(parent, p)
    found = group_by(parent, lambda n: root(parent, n))
    own = group_by(links, lambda link: root(parent, link[0]))
    transfers = []
    for n, members in found.items():
        ps, rs = [p for p in members if p >= 0], [~r for r in members if r < 0]
        at_p, at_r = ({end: k for k, end in enumerate(ends)} for ends in (ps, rs))
        local = tuple((at_p[p], at_r[r]) for p, r in own.get(n, ()))
        transfers.append(Transfer(tensor, kind, tuple(pieces[p] for p in ps), tuple(readers[r] for r in rs), local))
    return transfers
