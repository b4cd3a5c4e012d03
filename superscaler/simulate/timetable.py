"""The times of a program on a cluster: when each device runs each instruction, and the causes of its time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from superscaler.ir.grid import Ints
from superscaler.ir.program import Instruction, Role, names
from superscaler.simulate.times import Floats

# The stream of a device on which everything runs but transfers.
COMPUTE = 0


@dataclass(frozen=True, eq=False)
class Events:
    """The events of a step on devices that run one program, simulated or measured: columns with an entry an event.

    `stream`: the number of its name in `streams`; an event on a stream of communication is the time from its first byte
    to its last. `instruction`: its number in `code`. `waited`: for a wait on the compute stream, the number of the
    instruction that started the communication; else -1. `start`, `end` [events, devices]. `met`: for a wait, when all
    ends of the communication were there: until then it is a bubble; for work, its start after waits for the host.
    `late`: gives, for a row of `devices`, the device that came last to the collective of each wait, -1 for other
    events.
    """

    devices: Ints
    code: Sequence[Instruction]
    streams: tuple[str, ...]
    stream: Ints
    instruction: Ints
    waited: Ints
    start: Floats
    end: Floats
    met: Floats
    late: Callable[[int], Ints]

    def alike(self, rows: Sequence[int], code: Sequence[Instruction]) -> Events:
        """Return the events of some devices with equal times. `code`: that of the first of them."""
        shape = len(self.start), len(rows)
        times = (np.broadcast_to(x[:, rows[0], None], shape) for x in (self.start, self.end, self.met))
        start, end, met = times
        return replace(
            self, devices=self.devices[list(rows)], code=code, start=start, end=end, met=met,
            late=lambda row: self.late(rows[row]),
        )  # fmt: skip

    @property
    def microbatch(self) -> Ints:
        """Return the microbatch of each event, -1 where it has none."""
        return self._places[:, 0]

    @property
    def part(self) -> Ints:
        """Return the part of a segment that each event is for."""
        return self._places[:, 1]

    @property
    def segment(self) -> Ints:
        """Return the segment of each event, -1 for an event of none."""
        return self._places[:, 2]

    @cached_property
    def _places(self) -> Ints:
        return np.array([place(self.code[at]) for at in self.instruction.tolist()]).reshape(-1, 3)


def place(i: Instruction) -> tuple[int, int, int]:
    """Return the microbatch, the part and the segment of an instruction, -1 for none."""
    if i.task is not None:
        return i.task.microbatch, i.task.part, i.task.segment
    value = next(iter(names(i, Role.WRITE) or names(i, Role.READ)), None)
    return (-1, 0, -1) if value is None else (value.microbatch, value.part, -1)


class Link(NamedTuple):
    """A piece of the critical path: work of a device, or a transfer, with the device that started it last.
    `instruction`: that of the work, or of the start.
    """

    device: int
    instruction: int
    seconds: float
    is_transfer: bool


@dataclass(frozen=True, eq=False)
class Timetable:
    """The times of one step. `seconds`: from its start to the end of its last device.

    The seconds of each device sum up to those of the step: `compute`; `optimizer`; `launch` of communication;
    `exposed`: waits while the data were on the way; `copies`: waits for copies to and from the host; `bubble`: waits
    until all ends of a communication were there, and for other devices at the end. `host`: the seconds of the first
    three in which the device waited for its host; `starts`: those of the host, which starts all but the update.
    `path`: the critical path, from the start to the end. `bytes`: on links by class, `server`, `network`, `host`.
    """

    seconds: float
    lanes: tuple[Events, ...]
    compute: Floats
    optimizer: Floats
    launch: Floats
    exposed: Floats
    copies: Floats
    bubble: Floats
    host: Floats
    starts: Floats
    path: tuple[Link, ...]
    bytes: Mapping[str, float]
