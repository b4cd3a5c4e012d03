"""The communication of a program: that it ends, and the traffic that it makes, in rows with their reasons.

Deadlock freedom is proved on the communication of all devices alone. A send blocks until it is received; a device goes
on after all communication of one start. The last updates of all devices meet: clipping and loss scales sum over them.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from superscaler.collectives import KINDS
from superscaler.errors import ScheduleError, some
from superscaler.ir import program as p
from superscaler.ir.fold import Folded
from superscaler.ir.layout import Path, Provenance
from superscaler.ir.loops import Rolled, weighted
from superscaler.ir.running.machine import Domain, Walk, execute
from superscaler.ir.running.meetings import Message, Turn, meetings

Meeting = tuple[object, ...]
_WAYS = {p.Meets.GROUP: "collective", p.Meets.PEER: "messages", p.Meets.HOST: "copies"}
# By meeting, the devices that must be there, and the instruction.
Batch = dict[Meeting, tuple[frozenset[int], p.Instruction]]


def batches(code: Sequence[p.Facts]) -> dict[int, int]:
    """Return the ranges of messages that start together: several of one point, with at most what `is_between`."""
    found: dict[int, int] = {}
    first, point = -1, -1
    for at, i in enumerate(code):
        if i.meets is p.Meets.PEER:
            if i.point == point:
                found[first] = at
            else:
                first, point = at, i.point
        elif not i.is_between:
            point = -1
    return found


def is_met(i: p.Instruction) -> bool:
    """Return whether other devices take part in an instruction: in communication, and in updates for global norms."""
    return i.updates or i.meets in (p.Meets.GROUP, p.Meets.PEER)


def _communication(i: p.Instruction) -> p.Instruction | None:
    """Return communication, or a placeholder for other instructions between messages."""
    return i if is_met(i) else None if i.is_between else p.Loss((), ())


def starts(device: p.Device, world: int) -> list[Batch]:
    """Return the communication of a device in order, as batches that start together."""
    code = device.instructions
    code = list(code.changed(_communication) if isinstance(code, Rolled) else code)
    found, ends, end = list[Batch](), batches(code), -1
    for at, i, meeting, members in _meetings(code, device.rank, frozenset(range(world))):
        if at > end:
            found.append({})
        found[-1][meeting] = members, i
        end = max(end, ends.get(at, at))
    return found


def _meetings(
    code: Sequence[p.Instruction], rank: int, everyone: frozenset[int]
) -> Iterator[tuple[int, p.Instruction, Meeting, frozenset[int]]]:
    """Yield each communication of a device: its place, itself, its key with all that must be equal at its ends, and the
    devices that meet.
    """
    sent, count = set[object](), Counter[object]()
    updates = [(at, i, ()) for at, i in enumerate(code) if i.updates and not i.is_early]
    for at, i, key in sorted([*meetings(code, rank), *updates], key=itemgetter(0)):
        if isinstance(key, Turn):
            yield at, i, (key, *i.agreed), frozenset(i.group)
            continue
        if i.is_send:
            if key in sent:
                raise ScheduleError(
                    f"device {rank} sends {p.reads(i)[0]} to device {i.peer} as message {i.message}, the number of "
                    "another one to that device."
                )
            sent.add(key)
        # Messages that start together arrive in their order, too: NCCL knows no tags.
        way = (key.sender, key.receiver) if isinstance(key, Message) else ()
        yield at, i, (key, count[way]), frozenset(way) or everyone
        count[way] += 1


def _described(i: p.Instruction) -> str:
    if i.updates:
        return "its last update, for the gradients of all devices"
    if i.is_send:
        return f"send of {p.reads(i)[0]} to device {i.peer}"
    shown = _shown(p.writes(i) or p.reads(i))
    return f"{i.kind} of {shown} over devices {i.group}" if i.group else f"recv of {shown} from device {i.peer}"


def _shown(works: Sequence[p.Value]) -> str:
    return some([str(work._replace(is_handle=False, number=1)) for work in works], 4)


def _check_members(left: Sequence[Sequence[Batch]], world: int) -> None:
    """Raise ScheduleError for communication with a device that the program lacks."""
    for device, meets in enumerate(left):
        for step, (members, i) in enumerate(found for batch in meets for found in batch.values()):
            if min(members) < 0 or max(members) >= world:
                raise ScheduleError(
                    f"device {device}, step {step}: {_described(i)}, but the program has devices 0 to {world - 1}."
                )


def check_rendezvous(program: p.Program) -> None:
    """Raise ScheduleError, showing the position of each device, if the communication cannot finish.

    In a folded program one device of each base is checked: all devices of a base run in step.
    """
    devices = program.devices
    left = [starts(device, len(devices)) for device, _ in program.distinct]
    _check_members(left, len(devices))
    if isinstance(devices, Folded):
        groups = {group for meets in left for batch in meets for group, _ in batch.values()}
        # Devices without any part are one more base: they take part in the last update.
        base = {rank: n for n, (ranks, _) in enumerate(devices.groups) for rank in ranks}
        bases = {group: frozenset(base[rank] for rank in group) for group in groups}
        left = [[{m: (bases[group], i) for m, (group, i) in batch.items()} for batch in meets] for meets in left]
    there = defaultdict[Meeting, set[int]](set)
    # A device comes to a batch, then waits in it.
    codes = [[batch for batch in batches for _ in range(2)] for batches in left]
    if stuck := execute([Walk(code, _Rendezvous(device, there)) for device, code in enumerate(codes)]):
        waits = ((w.domain.device, w.at // 2, next(w.domain.unmet(w.code[w.at]))) for w in stuck[:8])
        lines = [f"  device {device}, step {at}: waits in {_described(i)}" for device, at, i in waits]
        raise ScheduleError("the communication of this plan deadlocks:\n" + "\n".join(lines))


class _Rendezvous(Domain[Batch, None]):
    """A device that comes to each batch, and waits in it until all ends are `there`."""

    def __init__(self, device: int, there: dict[Meeting, set[int]]) -> None:
        self.device, self.there = device, there

    def step(self, at: int, i: Batch) -> bool:
        if at % 2:
            return next(self.unmet(i), None) is None
        for meeting in i:
            self.there[meeting].add(self.device)
        return True

    def unmet(self, batch: Batch) -> Iterator[p.Instruction]:
        """Yield the communication of a batch for which an end is missing, or to which the device does not belong."""
        for meeting, (members, i) in batch.items():
            if not members <= self.there[meeting] or self.device not in members:
                yield i


def bytes_moved(program: p.Program) -> int:
    """Return the bytes that all devices put on links: a ring's share for collectives, everything for messages."""
    found = Counter[int]()
    for device, copies in program.distinct:
        for i, weight in weighted(device.instructions):
            if i.meets is p.Meets.GROUP:
                found[len(i.group)] += copies * weight * i.bytes * links(i.kind, len(i.group))
            elif i.is_send:
                found[1] += copies * weight * i.bytes
    # Each member of a collective has counted all that the collective puts on links.
    return sum(moved // members for members, moved in found.items())


Key = tuple[str, bool, str, str, tuple[int, ...], str, int]


@dataclass(frozen=True, slots=True)
class TransferRow:
    """The transfers of a tensor, or of its gradient (`is_backward`), that took the same way for the same reason.

    `way`: local, collective, messages, or copies between a device and its host. `count` transfers, each over `group`;
    `together` of them share a bucket. `bytes`: of all sources. `moved`: bytes that all devices put on links.
    """

    tensor: str
    is_backward: bool
    way: str
    kind: str
    group: tuple[int, ...]
    reason: str
    together: int
    count: int
    bytes: int
    moved: int


def moves(program: p.Program) -> list[TransferRow]:
    """Return the rows of a program: local transfers first, then communication in the order in which it starts."""
    starts, counts, weights = dict[Key, int](), Counter[Key](), Counter[Key]()
    for device, copies in program.distinct:
        for i in device.instructions:
            for note, way, kind, group, together, weight in _started(i, device.rank):
                key = (note.tensor, note.is_backward, way, kind, group, note.reason, together)
                starts[key] = min(note.number, starts.get(key, note.number))
                counts[key] += copies
                weights[key] += copies * weight
    found = [
        TransferRow(n.tensor, n.is_backward, "local", "", (), n.reason, 1, count, 0, 0)
        for n, count in program.notes.items()
        if n.path is None
    ]
    for key in sorted(starts, key=starts.__getitem__):
        # Every member of a collective starts it; of a message, only its sender.
        members = len(key[4]) if key[2] == "collective" else 1
        size = weights[key] // members
        moved = 0 if key[2] == "copies" else size * links(key[3], members) if members > 1 else size
        found.append(TransferRow(*key, counts[key] // members, size, moved))
    return found


def paths(program: p.Program) -> list[Path]:
    """Return the paths of several steps that transfers take."""
    tensors: dict[Path, Counter[str]] = {}
    for note, count in program.notes.items():
        if note.path is not None:
            tensors.setdefault(note.path, Counter())[note.tensor] += count
    return [replace(path, tensors=tuple(of), count=of.total()) for path, of in tensors.items()]


def _started(i: p.Instruction, rank: int) -> Iterator[tuple[Provenance, str, str, tuple[int, ...], int, int]]:
    if i.notes:
        way, group = _WAYS[i.meets], _group(i) or (rank, rank if i.peer < 0 else i.peer)
        for note, size in zip(i.notes, i.sizes, strict=True):
            yield note, way, i.kind, group, len(i.sizes), size


def _group(i: p.Instruction) -> tuple[int, ...]:
    """Return the group in the order in which clusters price it: the only receiver last."""
    return i.group if i.root < 0 else (*i.group[: i.root], *i.group[i.root + 1 :], i.group[i.root])


def links(kind: str, p: int) -> int:
    """Return the bytes on links of a collective of `p` devices, all together, in units of one device's source.

    >>> [links(kind, 4) for kind in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "rd_gather")]
    [6, 12, 3, 3, 3, 3]
    """
    return KINDS[kind].links(p)
