"""Sizes in a program: every value has as many elements as whatever reads it expects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from superscaler.errors import ScheduleError
from superscaler.ir.mask import extents
from superscaler.ir.program import (
    Accumulate,
    Backward,
    Bucket,
    Collective,
    Combine,
    Device,
    Forward,
    Instruction,
    Load,
    Loss,
    Program,
    Recv,
    Send,
    Slice,
    Update,
    Wait,
)  # fmt: skip
from superscaler.materialize.names import tag, writes
from superscaler.schedule.nodes import Schedule
from superscaler.schedule.segments import Segment

Sizes = Iterator[tuple[str, int]]


def check_sizes(schedule: Schedule, program: Program, parts: Mapping[int, Sequence[tuple[Segment, int]]]) -> None:
    """Raise ScheduleError at the first value that is read with another number of elements than it has."""
    messages: dict[int, int] = {}
    for device in program.devices:
        messages.update(_Device(schedule, device, parts[device.rank]).walk())
    for device in program.devices:
        for i in device.instructions:
            if isinstance(i, Recv) and messages.get(i.message, prod(i.shape)) != prod(i.shape):
                raise ScheduleError(
                    f"device {device.rank} receives {i.work.split('~')[0]} as {prod(i.shape)} elements, but device "
                    f"{i.peer} sends {messages[i.message]}."
                )


class _Device:
    def __init__(self, schedule: Schedule, device: Device, parts: Sequence[tuple[Segment, int]]) -> None:
        self.device, self.edges = device, schedule.edges
        self.wants: Mapping[str, tuple[bool, ...]] = {
            i.tag: i.grads for i in device.instructions if isinstance(i, Forward)
        }
        self.weights = {w.name: prod(extents(w.box)) for w in device.weights}
        self.parts = {tag(segment.number, segment.keys[at]): (segment, at) for segment, at in parts}
        self.size: dict[str, int] = {}

    def walk(self) -> dict[int, int]:
        """Return how many elements each sent message has."""
        sent = {}
        for number, i in enumerate(self.device.instructions):
            for name, wanted in self._reads(i):
                found = self.size.get(name, wanted)
                if found != wanted:
                    what = getattr(i, "tag", "") or ", ".join(w.split("~")[0] for w in writes(i)[:3])
                    raise ScheduleError(
                        f"device {self.device.rank}, instruction {number}: {type(i).__name__} {what} reads {name} as "
                        f"{wanted} elements, but it has {found}."
                    )
            self.size.update(self._writes(i))
            if isinstance(i, Send):
                sent[i.message] = self.size.get(i.source, 0)
        return sent

    def _reads(self, i: Instruction) -> Sizes:
        match i:
            case Forward():
                yield from zip(i.inputs, self._aliases(i.tag), strict=True)
            case Backward():
                saved = self._outputs(i.tag, saved=True)
                yield from ((n, size) for n, size in zip(i.gradients, saved, strict=True) if n is not None)
            case Slice():
                yield i.source, prod(i.view)
                yield i.source, prod(max(hi, size) for (_, hi), size in zip(i.ranges, i.view, strict=True))
            case Combine():
                yield from ((name, prod(extents(box))) for name, box in i.pieces)
            case Accumulate():
                yield i.value, self.size.get(i.into, 0)
            case Collective() if i.source:
                yield i.source, prod(i.local)
            case Wait():
                yield i.work, prod(i.shape)
            case Update():
                yield from ((gradient, self.weights[weight]) for weight, gradient in (*i.pairs, *i.writes))
            case Loss():
                yield from ((part, 1) for part in i.parts)

    def _writes(self, i: Instruction) -> Sizes:
        match i:
            case Load():
                yield i.out, self.weights.get(i.out, prod(extents(i.box)))
            case Forward():
                yield from zip(i.outputs, self._outputs(i.tag), strict=True)
            case Backward():
                made = (s for s, wants in zip(self._aliases(i.tag), self.wants[i.tag], strict=True) if wants)
                yield from zip(i.outputs, made, strict=True)
            case Slice():
                yield i.out, prod(extents(i.ranges))
            case Combine() | Wait():
                yield i.out, prod(i.shape)
            case Accumulate():
                yield i.out, self.size.get(i.into, 0)
            case Collective() | Recv():
                yield i.work, prod(i.shape)
            case Bucket():
                yield from ((w, self.size.get(s, 0)) for w, s in zip(i.works, i.sources, strict=True))

    def _aliases(self, name: str) -> list[int]:
        segment, at = self.parts[name]
        return [prod((a.hi[at] - a.lo[at]).tolist()) for a in segment.aliases]

    def _outputs(self, name: str, saved: bool = False) -> list[int]:
        segment, at = self.parts[name]
        found = []
        for output in segment.outputs:
            if output.has_gradient or not saved:
                lo, hi = self.edges.face(self.edges.rows[output.op.name], output.op.outputs[output.slot])
                row = segment.row_of[output.op.name][at]
                found.append(prod((hi[row] - lo[row]).tolist()))
        return found
