"""The choice of a collective for a joint transfer: pieces and readers on one device group, recognised by the tiling of
their boxes.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from superscaler.ir.fold import Fold
from superscaler.ir.mask import Box
from superscaler.schedule.transfers import Transfer


@dataclass(frozen=True, slots=True)
class Match:
    """A collective over `group`, in chunk order.

    `take`: the gathered slot; `give`: the scattered slot; `sizes`: elements of uneven chunks; `root`: position in the
    group of the only receiver.
    """

    kind: str
    group: tuple[int, ...]
    take: int = -1
    give: int = -1
    sizes: tuple[int, ...] = ()
    root: int = -1


# The reason why a transfer is that collective.
REASONS = {
    "all_reduce": "each holds a part of the value and reads the whole",
    "all_gather": "each holds a slice and reads the whole tensor",
    "reduce_scatter": "each holds a part of the value and reads a slice of the whole",
    "all_to_all": "each holds a slice of one dim and reads a slice of another",
    "broadcast": "one holds it and several others read it",
    "reduce": "each holds a part of the value and one of them reads the whole",
    "rd_gather": "each holds a slice and one of them reads the whole tensor",
}


# The most padding of a collective of uneven chunks: moved elements over real ones, all chunks padded to the largest.
MOST_PADDING = 1.5


@dataclass(frozen=True, slots=True)
class _Tiling:
    slot: int
    devices: tuple[int, ...]
    whole: Box
    sizes: tuple[int, ...]


def match(transfer: Transfer, fold: Fold | None = None) -> Match | None:
    """Return the collective of a joint transfer, or None if only exact messages do it.

    The group is that of the whole plan; the transfer may show only the sampled places of a fold.

    pieces          readers        collective
    all B, partial  all B          all_reduce
    tile B          all B          all_gather
    all B, partial  tile B         reduce_scatter
    tile B          tile B         all_to_all (on two different slots)
    one B           all B          broadcast
    all B, partial  one B          reduce
    tile B          one B          rd_gather
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
    """Return the collective from the boxes held by devices to the boxes read by them; each reads all pieces."""
    if len(held) == 1:
        return _broadcast(held, read)
    if len(read) == 1:
        return _to_one(held, *next(iter(read.items())))
    if set(held) != set(read):
        return None
    tiles, wants = _tiling(held), _tiling(read)
    one, goal = _same(held), _same(read)
    if one is not None and one == goal:
        return Match("all_reduce", tuple(sorted(held)))
    if tiles and goal == tiles.whole:
        return Match("all_gather", tiles.devices, take=tiles.slot, sizes=tiles.sizes)
    if wants and one == wants.whole:
        return Match("reduce_scatter", wants.devices, give=wants.slot, sizes=wants.sizes)
    if tiles and wants and tiles.slot != wants.slot and replace(tiles, slot=wants.slot) == wants and not tiles.sizes:
        return Match("all_to_all", tiles.devices, tiles.slot, wants.slot)
    return None


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


def _broadcast(held: dict[int, Box], read: dict[int, Box]) -> Match | None:
    (source, box), others = next(iter(held.items())), [d for d in read if d not in held]
    if len(others) < 2 or _same(read) != box:
        return None
    return Match("broadcast", (source, *sorted(others)))


def _to_one(held: dict[int, Box], reader: int, box: Box) -> Match | None:
    tiles, group = _tiling(held), tuple(sorted(held))
    if reader not in held:
        return None
    if _same(held) == box:
        return Match("reduce", group, root=group.index(reader))
    if tiles and not tiles.sizes and tiles.whole == box and len(held) > 2:
        return Match("rd_gather", tiles.devices, take=tiles.slot, root=tiles.devices.index(reader))
    return None


def _same(boxes: dict[int, Box]) -> Box | None:
    distinct = set(boxes.values())
    return distinct.pop() if len(distinct) == 1 else None


def _tiling(boxes: dict[int, Box]) -> _Tiling | None:
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
    return _Tiling(slot, tuple(ordered), whole, sizes if len(set(sizes)) > 1 else ())
