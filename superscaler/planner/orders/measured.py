"""The works of a plan's pipeline, from its simulated program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np

from superscaler.groups import collect
from superscaler.ir.program import Instruction, Meets, Program
from superscaler.planner.orders.works import Rows, Work, Works, kept_by
from superscaler.planner.space import SCHEDULES, Choice
from superscaler.plans.lib.schedules import RULES
from superscaler.simulate.predict import Simulation
from superscaler.simulate.timetable import COMPUTE, Events

# Orders use no more than this share of a device's memory, by what an activation takes.
_SURE = 0.98
# The room of a device whose memory is not known.
MANY = 10**6
# The schedules whose order is improved, by the form of their stages.
FORMS = {"1f1b": "one", "zb_h1": "one", "zbv": "V", "interleaved": "rounds"}


def of_choice(found: Simulation, choice: Choice) -> Works | None:
    """Return the works of a plan; None if its order is not improved, or if some cannot be found."""
    # Stages with cuts of their own exchange data as no schedule of other stages shows.
    if choice.pp == 1 or choice.schedule not in FORMS or choice.own:
        return None
    return measured(found, rows_of(choice, frozenset(range(choice.stages))))


def rows_of(choice: Choice, split: frozenset[int]) -> Rows:
    """Return the works of a plan in the order of its schedule, with the backwards of some stages in halves."""
    chunks = (choice.chunks,) if choice.schedule == "interleaved" else ()
    table = RULES[SCHEDULES[choice.schedule]](choice.pp, choice.microbatches, *chunks)
    return [
        [(w.stage, _kind(w.kind, w.stage in split)) for w in row if w.kind != "W" or w.stage in split] for row in table
    ]


def _kind(kind: str, is_split: bool) -> str:
    return "B" if kind == "I" and not is_split else kind


def measured(found: Simulation, rows: Rows) -> Works | None:
    """Return the works of a plan, in whose order they ran; None where some cannot be found. `rows`: of each
    device of its pipeline.
    """
    each, places = found.program.world // len(rows), {stage: d for d, row in enumerate(rows) for stage, _ in row}
    lanes = [_Lane.of(found, d * each, each) for d in range(len(rows))]
    place = tuple(places[stage] for stage in range(len(places)))
    stages = _stages(lanes, place)
    seconds, after = dict[Work, float](), list[float]()
    for device, lane in enumerate(lanes):
        own = {segment: stage for segment, stage in stages.items() if place[stage] == device}
        known, last = lane.works(found.program, own)
        seconds |= known
        after.append(last)
    each_stage = [{kind: seconds[s, kind] for kind in "FBIW" if (s, kind) in seconds} for s in range(len(place))]
    if not all("F" in some and ("B" in some or {*"IW"} <= some.keys()) for some in each_stage):
        return None
    return Works(
        place=place,
        seconds=tuple({"B": some.get("I", 0.0) + some.get("W", 0.0), **some} for some in each_stage),
        sends=tuple(0.0 if a == b else lanes[a].send(b) for a, b in pairwise(place)),
        rooms=tuple(_room(found, d * each, kept_by(row)) for d, row in enumerate(rows)),
        after=tuple(after),
        count=sum(work == rows[0][0] for work in rows[0]),
    )


class _Lane(NamedTuple):
    """The events of the first of `each` devices of a stage: `column` of them is its own."""

    events: Events
    column: int
    rank: int
    each: int

    @staticmethod
    def of(found: Simulation, rank: int, each: int) -> _Lane:
        events = next(lane for lane in found.table.lanes if rank in lane.devices)
        return _Lane(events, int(np.flatnonzero(events.devices == rank)[0]), rank, each)

    def works(self, program: Program, stages: Mapping[int, int]) -> tuple[dict[Work, float], float]:
        """Return the mean seconds of each work, with its communication inside of a stage, and those after the last one.

        `stages`: by segment; others are a part of the work before them, and what is recomputed of that behind it.
        """
        found, after = defaultdict[tuple[int, str, int], float](float), 0.0
        now, waiting = (-1, "", -1), 0.0
        (*events,) = self._computing()
        last = max((n for n, (i, _, _) in enumerate(events) if i.is_mirror), default=0)
        for n, (i, seconds, met) in enumerate(events):
            if n > last:
                after += met
                continue
            if i.runs_segment and not i.is_mirror and any(op.origin for op in program.functions[i.function].ops):
                waiting += seconds
                continue
            if i.runs_segment and i.task is not None and i.task.segment in stages:
                kind = "F" if not i.is_mirror else {"": "B", "input": "I", "weight": "W"}[i.half]
                now = stages[i.task.segment], kind, i.task.microbatch
            found[now] += seconds + (waiting if i.is_mirror else 0.0)
            waiting = 0.0 if i.is_mirror else waiting
        # Parts of a stage that are not split run with its first halves; without second halves, nothing is split.
        split = {stage for stage, kind, _ in found if kind == "W"}
        each = defaultdict[tuple[int, str, int], float](float)
        for (stage, kind, microbatch), seconds in found.items():
            own = ("I" if stage in split else "B") if kind in "IB" else kind
            each[stage, own, microbatch] += seconds
        several = collect(((stage, kind), seconds) for (stage, kind, _), seconds in each.items() if stage >= 0)
        works = {work: fmean(some) for work, some in several.items()}
        return works, after

    def _computing(self) -> Iterator[tuple[Instruction, float, float]]:
        """Yield each computing instruction in order, with two times: its seconds after waits for other stages, and its
        seconds after all ends of its communication are there.
        """
        events, at = self.events, self.column
        for n in np.flatnonzero(events.stream == COMPUTE).tolist():
            start, end, met = (float(x[n, at]) for x in (events.start, events.end, events.met))
            waited = int(events.waited[n])
            is_between = waited >= 0 and self._is_message(events.code[waited])
            yield events.code[events.instruction[n]], 0.0 if is_between else end - start, end - met

    def _is_message(self, i: Instruction) -> bool:
        """Return whether an instruction starts a message between stages."""
        return i.meets is Meets.PEER and i.peer // self.each != self.rank // self.each

    def send(self, device: int) -> float:
        """Return the mean seconds of a message to a device of the pipeline."""
        events = self.events
        sent = [
            float(events.end[n, self.column] - events.start[n, self.column])
            for n in np.flatnonzero(events.stream != COMPUTE).tolist()
            for i in [events.code[events.instruction[n]]]
            if i.is_send and i.peer // self.each == device
        ]
        return fmean(sent) if sent else 0.0


def _stages(lanes: Sequence[_Lane], place: Sequence[int]) -> dict[int, int]:
    """Return the stages of segments. Of several stages on a device, those that are trained are in the order of the
    model: each has a run of them.
    """
    if len(place) == len(lanes):
        return {i.task.segment: d for d, lane in enumerate(lanes) for i in lane.events.code[:] if i.task is not None}
    at = sorted(
        {(i.task.segment, d) for d, lane in enumerate(lanes) for i in lane.events.code[:] if i.task and i.is_mirror}
    )
    runs = [[segment for segment, _ in own] for _, own in groupby(at, key=lambda pair: pair[1])]
    for s in range(len(place) - 1):
        if place[s] == place[s + 1] and len(runs) < len(place):
            middle = len(runs[s]) // 2
            runs[s : s + 1] = [runs[s][:middle], runs[s][middle:]]
    return {segment: s for s, run in enumerate(runs[: len(place)]) for segment in run}


def _room(found: Simulation, rank: int, kept: int) -> int:
    """Return the activations that a device has room for, beside all else."""
    own, capacity = next(d for d in found.prediction.devices if rank in d.devices), found.prediction.capacity
    if capacity is None:
        return MANY
    more = _SURE * capacity - own.peak_bytes
    return max(kept, kept + int(more // max(own.memory["activations"] / kept, 1)))
