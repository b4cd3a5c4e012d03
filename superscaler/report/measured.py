"""The timeline of a measured step, from the files that `train --profile` writes, in the form of a predicted one."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from superscaler.errors import InputError
from superscaler.groups import collect
from superscaler.ir import program as p
from superscaler.ir.running.meetings import meetings
from superscaler.report.event_notes import Details
from superscaler.report.kinds import Kind
from superscaler.report.timeline import Timeline, timeline
from superscaler.runtime.profile import VERSION
from superscaler.simulate.timetable import COMPUTE, Events
from superscaler.specs.file_errors import reading
from superscaler.specs.sizes import duration

_REMEDY = "record a run of this plan with superscaler train --profile N --run DIR"


class Call(NamedTuple):
    """A call in a step, in seconds of the clock of rank 0: of an instruction, or of the wait for its communication."""

    at: int
    is_wait: bool
    start: float
    end: float


@dataclass(eq=False)
class _Rank:
    """The events of a step on a rank."""

    rank: int
    code: Sequence[p.Instruction]
    events: list[Call]
    start: float
    end: float
    # When each instruction was called; the end of the wait for its communication.
    called: dict[int, float] = field(default_factory=dict)
    over: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for e in self.events:
            if e.is_wait:
                self.over.setdefault(e.at, e.end)
            else:
                self.called.setdefault(e.at, e.start)

    @property
    def meetings(self) -> Iterator[tuple[int, Hashable]]:
        """Yield the communication that the rank starts, with a key that all ends share. A copy has one end."""
        yield from ((at, key) for at, _, key in meetings(self.code, self.rank))
        yield from ((at, (self.rank, at)) for at, i in enumerate(self.code) if i.meets is p.Meets.HOST)


def measured(folder: Path, program: p.Program, code: str, details: Details) -> tuple[Timeline, str]:
    """Return the timeline of the median step of a run, and remarks for its readers.

    `code`: the hash of the plan's code. Raises InputError for a folder that is no whole run of this plan.
    """
    files = [_read(folder / f"rank_{rank}.json") for rank in range(program.world)]
    for rank, found in enumerate(files):
        if (found["world"], found["code"]) != (program.world, code):
            raise InputError(f"{folder}/rank_{rank}.json is of another plan; {_REMEDY}.")
    spans = [_steps(found) for found in files]
    count = min(map(len, spans))
    seconds = [max(s[k][1] for s in spans) - min(s[k][0] for s in spans) for k in range(count)]
    middle = sorted(range(count), key=seconds.__getitem__)[count // 2]
    ranks = [_rank(k, program, found, spans[k][middle]) for k, found in enumerate(files)]
    zero = min(rank.start for rank in ranks)
    met = _met(ranks)
    events = [_events(rank, met, zero) for rank in ranks]
    error = max(found["clock_error"] for found in files)
    span = f"{duration(min(seconds))} to {duration(max(seconds))}"
    note = (
        f"Measured: the step of middle time of {count} ({span}), with torch's profiler; clocks agree within "
        f"{duration(error)}. Communication lasts at most from when all its ends have started it to the end of the wait "
        "for it."
    )
    return timeline("measured", seconds[middle], events, details), note


def ran_compiled(folder: Path) -> bool:
    """Return whether the steps of a run were compiled, whose program may be another one."""
    return bool(_read(folder / "rank_0.json").get("compiled"))


def _read(file: Path) -> dict[str, Any]:
    with reading(file, _REMEDY, kind="profile of a rank"):
        found: dict[str, Any] = json.loads(file.read_text())
        if found["version"] != VERSION or not found["events"]:
            raise ValueError("it is of another version of superscaler, or has no events")
        return found


def _steps(found: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return the start and the end of each step, by the clock of rank 0."""
    own = [(a, b) for a, b, name, is_gpu in found["events"] if name.startswith("step ") and not is_gpu]
    return [(a + found["zero"], b + found["zero"]) for a, b in sorted(own)]


def _rank(rank: int, program: p.Program, found: Mapping[str, Any], span: tuple[float, float]) -> _Rank:
    code, zero = program.devices[rank].instructions[:], found["zero"]
    numbers, events = _numbers(code), dict[tuple[str, bool], list[Call]]()
    for start, end, name, is_gpu in found["events"]:
        own = name.removeprefix("wait_")
        inside = span[0] <= start + zero <= span[1] + is_gpu
        if inside and own in numbers:
            made = Call(numbers[own], own != name, start + zero, end + zero)
            events.setdefault((name, bool(is_gpu)), []).append(made)
    # On a GPU the kernels of a call count, not the call.
    kept = [e for (name, is_gpu), some in events.items() if is_gpu or (name, True) not in events for e in some]
    return _Rank(rank, code, sorted(kept, key=lambda e: e.start), *span)


def _numbers(code: Sequence[p.Instruction]) -> dict[str, int]:
    """Return the number of the instruction of each call, by the name of its event."""
    found, counts = dict[str, int](), Counter[str]()
    for at, i in enumerate(code):
        kind = type(i).__name__.lower()
        if i.runs_segment:
            found[f"{kind}{i.half and '_' + i.half} {i.task}"] = at
        elif i.weights or not i.is_early:
            # Emitted code leaves other updates out.
            found[f"{kind} {counts[kind]}"] = at
            counts[kind] += 1
    return found


def _events(rank: _Rank, met: Mapping[Hashable, tuple[float, int]], zero: float) -> Events:
    """Return the events of a rank as columns: its calls, its waits, and its communication."""
    found = {at: met[key] for at, key in rank.meetings if key in met}
    there = {at: time for at, (time, _) in found.items()}
    streams, cells = ["compute"], list[tuple[float, ...]]()
    for e in rank.events:
        # An update waits for all that was sent, the sum of the loss for all devices: both start nothing of their own.
        is_wait = e.is_wait or rank.code[e.at].meets is p.Meets.ALL
        own = min(max(there.get(e.at, e.start), e.start), e.end) if is_wait else e.start
        late = found[e.at][1] if is_wait and e.at in found and rank.code[e.at].group else -1
        cells.append((COMPUTE, e.at, e.at if is_wait else -1, late, e.start, e.end, own))
    for at in sorted(there):
        if at in rank.over:
            name = _stream(rank.code[at])
            streams += [] if name in streams else [name]
            start = min(there[at], rank.over[at])
            cells.append((streams.index(name), at, -1, -1, start, rank.over[at], start))
    columns = np.array(cells).reshape(-1, 7).T
    stream, instruction, waited, late = (x.astype(np.int64) for x in columns[:4])
    start, end, met_at = columns[4:, :, None] - zero
    devices = np.array([rank.rank])
    return Events(devices, rank.code, tuple(streams), stream, instruction, waited, start, end, met_at, lambda row: late)


def _stream(i: p.Instruction) -> str:
    if i.group:
        return f"devices {', '.join(map(str, i.group))}"
    return "copies" if i.meets is p.Meets.HOST else f"from {i.peer}"


def _met(ranks: Sequence[_Rank]) -> dict[Hashable, tuple[float, int]]:
    """Return when all ends of each communication were there, and the last of them, by the key that they share."""
    ends = ((key, rank, at) for rank in ranks for at, key in rank.meetings)
    called = collect((key, (rank.called.get(at, math.inf), rank.rank)) for key, rank, at in ends)
    return {key: last for key, ends in called.items() if (last := max(ends))[0] < math.inf}


class Difference(NamedTuple):
    """The seconds of a step for some work, or for the waits for it, in the mean over devices."""

    title: str
    is_wait: bool
    predicted: float
    measured: float


def differences(predicted: Timeline, measured: Timeline, details: Details, world: int) -> list[Difference]:
    """Return work and waits, predicted and measured, those with the largest difference first."""
    sums = [_sums(timeline) for timeline in (predicted, measured)]
    found = [
        Difference(details.found[detail].title if detail >= 0 else "the end of the step", is_wait, a, b)
        for detail, is_wait in dict.fromkeys([*sums[0], *sums[1]])
        for a, b in [[s[detail, is_wait] / world for s in sums]]
    ]
    rests = [world * t.seconds - sum(s.values()) for t, s in zip((predicted, measured), sums, strict=True)]
    rest = Difference("between recorded work: Python, additions", False, *(max(r / world, 0.0) for r in rests))
    return sorted([*found, rest], key=lambda d: -abs(d.measured - d.predicted))


def _sums(timeline: Timeline) -> Counter[tuple[int, bool]]:
    found = Counter[tuple[int, bool]]()
    for lane in timeline.lanes:
        if lane.is_compute:
            columns = lane.detail.tolist(), lane.kind.tolist(), (lane.end - lane.start).tolist()
            for detail, kind, seconds in zip(*columns, strict=True):
                found[detail, kind >= Kind.BUBBLE] += seconds * len(lane.devices)
    return found
