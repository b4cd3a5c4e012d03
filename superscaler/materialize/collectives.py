"""The choice of a collective for a joint transfer: the first row of `KINDS` that has the ends of its boxes."""

import itertools
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from superscaler.collectives import ALL, KINDS, ONE, PART, TILE, Ends, Kind
from superscaler.ir.fold import Fold
from superscaler.ir.mask import Box
from superscaler.schedule.transfers import Transfer


@dataclass(frozen=True, slots=True)
class Match:
    """A collective over `group`, in chunk order.

    `gather_slot` is gathered and `scatter_slot` scattered, -1 for none. `sizes`: elements of uneven chunks. `root`: the
    position in the group of the only receiver.
    """

    kind: str
    group: tuple[int, ...]
    gather_slot: int = -1
    scatter_slot: int = -1
    sizes: tuple[int, ...] = ()
    root: int = -1


# Largest ratio of sent to real elements; chunks are padded to the largest.
MOST_PADDING = 1.5


@dataclass(frozen=True, slots=True)
class _Side:
    """The boxes of one side of a transfer, which together are `whole`; of tiles, the slot, the order of their devices
    along it, and the sizes, if these differ.
    """

    ends: Ends
    whole: Box
    slot: int = -1
    devices: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


def match(transfer: Transfer, fold: Fold | None = None) -> Match | None:
    """Return the collective of a joint transfer, or None if only exact messages do it.

    The group is that of the whole plan; the transfer may show only the sampled places of a fold.
    """
    held = {p.device: p.box for p in transfer.pieces}
    read = {r.device: r.box for r in transfer.readers}
    if not transfer.is_joint or len(held) != len(transfer.pieces) or len(read) != len(transfer.readers):
        return None
    if fold is not None and fold.spanned([*held, *read]):
        held, read = fold.extend(held), fold.extend(read)
        if set(fold.spanned(list(held))) != set(fold.spanned(list(read))):
            return None
    return match_boxes(held, read)


def match_boxes(held: dict[int, Box], read: dict[int, Box]) -> Match | None:
    """Return the collective from the boxes held by devices to the boxes read by them; each reads all pieces.

    >>> whole, halves = dict.fromkeys((0, 1), ((0, 4),)), {0: ((0, 2),), 1: ((2, 4),)}
    >>> [match_boxes(held, read).kind for held, read in ((whole, whole), (halves, whole), (whole, halves))]
    ['all_reduce', 'all_gather', 'reduce_scatter']
    >>> match_boxes(halves, {1: ((0, 4),)}) is None
    True
    """
    before, after = _side(held, PART), _side(read, ALL)
    if before is None or after is None or before.whole != after.whole:
        return None
    fitting = (kind for kind in KINDS.values() if _fits(kind, before, after) and _has_members(kind, {*held}, {*read}))
    found = (_matched(kind, before, after, held, read) for kind in fitting)
    return next((how for how in found if KINDS[how.kind].held is not ONE or how.group[0] in held), None)


def _side(boxes: Mapping[int, Box], same: Ends) -> _Side | None:
    """Return one side of a transfer; None if it has no ends of collectives. `same`: the ends of equal boxes."""
    first, *others = boxes.values()
    if not others:
        return _Side(ONE, first)
    return _Side(same, first) if all(box == first for box in others) else _tiling(boxes)


def _fits(kind: Kind, before: _Side, after: _Side) -> bool:
    """Return whether a kind has these ends. Between two tilings the members keep their order, on another slot."""
    ends = before.ends, after.ends
    is_in_order = ends != (TILE, TILE) or (before.slot != after.slot and before.devices == after.devices)
    is_even = not before.sizes and not after.sizes
    return ends == kind.ends and is_in_order and (is_even or kind.is_uneven)


def _has_members(kind: Kind, givers: Set[int], readers: Set[int]) -> bool:
    """Return whether all members hold and read. If only one of them does, the others need not; nor does one that holds
    need to read the whole.
    """
    members = givers | readers
    is_held = kind.held is ONE or givers == members
    is_read = kind.read is ONE or kind.ends == (ONE, ALL) or readers == members
    return is_held and is_read and len(members) >= kind.fewest


def _matched(kind: Kind, before: _Side, after: _Side, held: Iterable[int], read: Iterable[int]) -> Match:
    """Return the collective: members in the order of their chunks; the only one that holds comes first."""
    source = [*held] if kind.held is ONE else []
    group = before.devices or after.devices or (*source, *sorted({*held, *read}.difference(source)))
    root = group.index(*read) if kind.read is ONE else -1
    return Match(kind.name, group, before.slot, after.slot, before.sizes or after.sizes, root)


def refusal(transfer: Transfer) -> str:
    """Return the reason why a transfer without a match is no collective."""
    held, read = ({end.device for end in ends} for ends in (transfer.pieces, transfer.readers))
    if not transfer.is_joint:
        return "not every reader needs every piece"
    if len(held) != len(transfer.pieces) or len(read) != len(transfer.readers):
        return "a device holds or reads several pieces"
    if len(held) == 1 and len(read - held) == 1:
        return "one device sends to one other"
    if len(held) == 1:
        return "the readers want different slices"
    return (
        "other devices make it than read it"
        if held != read
        else "no single collective: the slices do not tile one dim, each once and of about one size"
    )


def _tiling(boxes: Mapping[int, Box]) -> _Side | None:
    """Return the order of boxes along one slot, None if they do not tile it. `sizes` are empty if all are equal."""
    distinct = list(boxes.values())
    slots = [s for s in range(len(distinct[0])) if len({box[s] for box in distinct}) > 1]
    if len(slots) != 1:
        return None
    slot = slots[0]
    ordered = sorted(boxes, key=lambda device: boxes[device][slot])
    ranges: Sequence[tuple[int, int]] = [boxes[device][slot] for device in ordered]
    sizes = tuple(hi - lo for lo, hi in ranges)
    follows = all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    if not follows or 0 in sizes or max(sizes) * len(sizes) > MOST_PADDING * sum(sizes):
        return None
    whole = tuple((ranges[0][0], ranges[-1][1]) if s == slot else r for s, r in enumerate(distinct[0]))
    return _Side(TILE, whole, slot, tuple(ordered), sizes if len(set(sizes)) > 1 else ())
