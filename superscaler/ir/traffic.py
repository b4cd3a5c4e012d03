"""Traffic of a program: rows that sum up equal transfers, with their reason, derived from its instructions."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from superscaler.ir.model import width
from superscaler.ir.program import Collective, Copy, Instruction, Program, Send, links
from superscaler.ir.provenance import Path, Provenance

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


def moves(program: Program) -> list[TransferRow]:
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


def paths(program: Program) -> list[Path]:
    """Return the paths of several steps that transfers take."""
    tensors: dict[Path, Counter[str]] = {}
    for note, count in program.notes.items():
        if note.path is not None:
            tensors.setdefault(note.path, Counter())[note.tensor] += count
    return [replace(path, tensors=tuple(of), count=of.total()) for path, of in tensors.items()]


def _started(i: Instruction, rank: int) -> Iterator[tuple[Provenance, str, str, tuple[int, ...], int, int]]:
    if isinstance(i, Send):
        for note in i.notes:
            yield note, "messages", "send", (rank, i.peer), 1, i.bytes
    elif isinstance(i, Copy):
        for note in i.notes:
            yield note, "copies", "to_host" if i.to_host else "to_device", (rank, rank), 1, i.bytes
    elif isinstance(i, Collective):
        for note, way in zip(i.notes, i.ways, strict=True):
            yield note, "collective", i.kind, _group(i), len(i.ways), way.elements * width(i.dtype)


def _group(i: Collective) -> tuple[int, ...]:
    """Return the group in the order in which clusters price it: the only receiver last."""
    return i.group if i.root < 0 else (*i.group[: i.root], *i.group[i.root + 1 :], i.group[i.root])
