"""The holders of a device's storages: names, handles of started operations, tapes, and what is sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from superscaler.groups import collect
from superscaler.ir.program import Task, Value
from superscaler.simulate.storages import ACTIVATIONS, COMMUNICATION, Storage, Storages
from superscaler.simulate.works import Segment, Tape, block


@dataclass(slots=True)
class Handle:
    """A started operation. `size`: the bytes of its result; `result`: its storage, None if the wait makes one.

    `shared`: storages that several handles hold until one of them is waited for; `held`: those held until its own wait.
    """

    size: int
    result: Storage | None = None
    shared: list[Storage] = field(default_factory=list)
    held: list[Storage] = field(default_factory=list)


@dataclass(slots=True)
class HeldTape:
    """The tape of a task: the storages of its call by number, and those that it holds."""

    segment: Segment
    known: dict[int, Storage]
    held: dict[int, Storage]
    others: Storage
    # While it is on the host: its memory there and, by number, the storages that it had.
    away: Storage | None = None
    moved: dict[int, Storage] = field(default_factory=dict)

    def own(self, ended: Mapping[int, int]) -> dict[int, int]:
        """Return the bytes that only this tape holds, each storage under the last of its numbers that is released."""
        numbers = collect((id(storage), n) for n, storage in self.held.items())
        found = {max(some, key=lambda n: ended.get(n, math.inf)): some for some in numbers.values()}
        return {n: self.held[n].bytes for n, some in found.items() if self.held[n].holders == len(some)}


class Holders(Storages):
    """The storages of a device, each with all that holds it."""

    def __init__(self) -> None:
        super().__init__()
        # The bytes of the tensor of each name, without the rest of its storage.
        self.sizes: dict[Value, int] = {}
        # Names that are not contiguous, so that they are copied to be sent.
        self.strided: set[Value] = set()
        self.handles: dict[Value, Handle] = {}
        self.tapes: dict[Task, HeldTape] = {}
        self.outputs: dict[str, list[Storage]] = {}
        # What messages and copies to the host read, by the batch that started them; gradients of early updates.
        self.sent: list[tuple[int, Storage]] = []
        self.copied: list[Storage] = []
        self.waiting: list[tuple[int, int, Storage]] = []

    def alias(self, name: Value, source: Value) -> None:
        """Let a name hold the storage of another one."""
        self.sizes[name] = self.sizes.get(source, 0)
        if source in self.names:
            self.bind(name, self.names[source])

    def send_all(self, batch: int, sources: Sequence[Storage]) -> None:
        """Hold the storages of sends until the next messages start: then NCCL is asked whether the last ones are
        done.
        """
        for _, storage in [x for x in self.sent if x[0] != batch]:
            self.drop(storage)
        self.sent = [x for x in self.sent if x[0] == batch] + [(batch, self.hold(s)) for s in sources]

    def source_of(self, name: Value) -> Storage:
        """Return the storage that is sent for a name: its own, or a copy of it."""
        size = block(self.sizes[name])
        return Storage(size, COMMUNICATION, name) if name in self.strided else self.names[name]

    def keep_tape(self, task: Task, segment: Segment, known: dict[int, Storage], tape: Tape) -> None:
        """Let a tape hold the storages of a call."""
        held = {n: known[n] for n in tape.held if n in known}
        for storage in held.values():
            self.keep(storage)
        others = self.hold(Storage(tape.bytes, ACTIVATIONS, None, tape=tape))
        self.tapes[task] = HeldTape(segment, known, held, others)

    def drop_all(self, storages: Sequence[Storage]) -> None:
        for storage in storages:
            self.drop(storage)
