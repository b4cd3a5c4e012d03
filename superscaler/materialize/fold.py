"""Folded devices: the compiled samples, checked to determine the code of all other devices."""

from collections.abc import Mapping, Sequence

from superscaler.ir.cohorts import form
from superscaler.ir.fold import Fold, Folded, Unfoldable
from superscaler.ir.program import Device, Meets
from superscaler.materialize.steps import CollectiveStep, Lowered, Message


def fold_devices(devices: Mapping[int, Device], fold: Fold, world: int) -> Folded:
    """Return all `world` devices of a plan from its sampled ones, and from one without any part if it has such.

    Raises Unfoldable if the samples of a base run different programs, or a message leaves its place.
    """
    compiled: dict[int, Device] = {}
    for base in range(len(fold.devices)):
        first, *others = (devices[d] for d in fold.samples(base))
        _check_peers(first, fold)
        like = form(first)
        for axis, other in enumerate(others):
            if form(other) != like or not _meet(first, other, fold):
                raise Unfoldable(axis)
            compiled[other.rank] = other
        compiled[first.rank] = first
    idle = next((d for d in devices.values() if d.rank not in fold.places), compiled[fold.samples(0)[0]])
    return Folded(fold, compiled, idle, world)


def check_steps(lowered: Lowered, fold: Fold) -> None:
    """Check the messages and collectives of a transfer, as `fold_devices` checks those of whole devices, which are
    known much later.
    """
    for step in (step for steps in lowered.rounds for step in steps):
        if isinstance(step, CollectiveStep):
            _check_group(step.how.group, False, fold)
        elif isinstance(step, Message) and not step.is_copy:
            _check_group((step.source.device, step.out.device), True, fold)


def _check_peers(device: Device, fold: Fold) -> None:
    """Check that messages stay at their place, and that the group of each collective stays at its place or is a whole
    line.
    """
    groups: dict[tuple[tuple[int, ...], bool], None] = {}
    for i in device.instructions:
        if i.meets is Meets.PEER:
            groups[(device.rank, i.peer), True] = None
        elif i.meets is Meets.GROUP:
            groups[i.group, False] = None
    for group, is_message in groups:
        _check_group(group, is_message, fold)


def _check_group(group: Sequence[int], is_message: bool, fold: Fold) -> None:
    for axis in fold.spanned(group):
        lines: dict[tuple[int, ...], set[int]] = {}
        for member in group:
            base, *place = fold.places[member]
            lines.setdefault((base, *place[:axis], *place[axis + 1 :]), set()).add(place[axis])
        width = fold.widths[axis]
        if is_message:
            raise Unfoldable(axis)
        if partial := next((line for line in lines.values() if len(line) != width), None):
            raise Unfoldable(axis, _division(sorted(partial), width))


def _division(line: Sequence[int], width: int) -> tuple[int, ...]:
    """Return the parts of an axis such that these places fill one of them; nothing if there are none.

    >>> _division([0, 2, 4, 6], 8), _division([4, 5], 8), _division([0, 3], 8)
    ((4, 2), (4, 2), ())
    """
    step, count = line[-1] - line[-2] if len(line) > 1 else width, len(line)
    # The places of an axis [outer, count, step] along its middle part.
    first = line[0] // (count * step) * count * step + line[0] % step
    is_filled = width % (count * step) == 0 and [*line] == [first + n * step for n in range(count)]
    return tuple(n for n in (width // (count * step), count, step) if n > 1) if is_filled and count > 1 else ()


def _meet(first: Device, other: Device, fold: Fold) -> bool:
    """Return whether two devices with the same program communicate with the peers that correspond to their places."""
    at, known = fold.place(other.rank), dict[tuple[int, ...], tuple[int, ...]]()

    def moved(devices: tuple[int, ...]) -> tuple[int, ...]:
        if devices not in known:
            known[devices] = fold.move(devices, at)
        return known[devices]

    for a, b in zip(first.instructions, other.instructions, strict=True):
        if a.meets is Meets.PEER and moved((a.peer,)) != (b.peer,):
            return False
        if a.meets is Meets.GROUP:
            # A group is in chunk order. Without chunks only the source of a broadcast has a fixed place, the first.
            ordered = {"all_reduce": 0, "broadcast": 1}.get(a.kind, len(a.group))
            one, two = ((*g[:ordered], *sorted(g[ordered:])) for g in (moved(a.group), b.group))
            if one != two:
                return False
    return True
