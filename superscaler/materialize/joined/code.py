"""The code of a device for joining: where its works are, and what reads each name.

Works of a segment in several microbatches are one family: its key has no microbatch, nor have the names here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

from superscaler.ir.loops import Loop, runs_of
from superscaler.ir.names import family
from superscaler.ir.program import Backward, Forward, Instruction, Task, Value, reads

Position = tuple[int, int]


class Key(NamedTuple):
    """A family of works: a segment and a part of it."""

    segment: int
    part: int


def key_of(task: Task) -> Key:
    return Key(task.segment, task.part)


class Code:
    """The instructions of a device in sequences: each run, and of a loop its first and its second body.

    `forwards`: the positions of each family, and `backwards` those of each kind of its backwards, in order.
    """

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.sequences: list[tuple[Instruction, ...]] = []
        for run in runs_of(instructions):
            self.sequences += [run.first, run.second] if isinstance(run, Loop) else [tuple(run)]
        self.forwards: dict[Key, list[Position]] = {}
        self.backwards: dict[Key, dict[str, list[Position]]] = {}
        self.moved, self.readers = set[Key](), dict[Value, set[Position]]()
        # The next work on the device.
        self.next = dict[Position, Position]()
        for number, sequence in enumerate(self.sequences):
            last: Position | None = None
            for n, i in enumerate(sequence):
                at = number, n
                for name in reads(i):
                    self.readers.setdefault(family(name), set()).add(at)
                if i.task is None:
                    continue
                if last is not None:
                    self.next[last] = at
                last = at
                if not i.runs_segment:
                    self.moved.add(key_of(i.task))
                elif i.is_mirror:
                    self.backwards.setdefault(key_of(i.task), {}).setdefault(i.half, []).append(at)
                else:
                    self.forwards.setdefault(key_of(i.task), []).append(at)

    def __getitem__(self, at: Position) -> Instruction:
        return self.sequences[at[0]][at[1]]

    def task(self, at: Position) -> Task:
        found = self[at].task
        assert found is not None
        return found

    def forward(self, at: Position) -> Forward:
        return cast("Forward", self[at])

    def backward(self, at: Position) -> Backward:
        return cast("Backward", self[at])

    def after(self, key: Key) -> Key | None:
        """Return the family whose forward is the next work, None if that is of another part, or no forward."""
        at = self.next.get(self.forwards[key][0])
        i = None if at is None else self[at]
        task = None if i is None or not i.runs_segment or i.is_mirror else i.task
        return key_of(task) if task is not None and task.part == key.part else None

    def following(self, first: Position, keys: Sequence[Key]) -> list[Position] | None:
        """Return the positions of works as the first, of its microbatch, one after the other, for these families; None
        if others are between them.
        """
        found, task = [first], self.task(first)
        for key in keys[1:]:
            at = self.next.get(found[-1])
            i = None if at is None else self[at]
            if at is None or type(i) is not type(self[first]) or self[at].half != self[first].half:
                return None
            if self.task(at) != task._replace(segment=key.segment, part=key.part):
                return None
            found.append(at)
        return found
