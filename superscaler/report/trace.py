"""Timelines in the form of Chrome's traces, which Perfetto opens: a process for each device, arrows for messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from superscaler.ir.grid import Ints
from superscaler.report.event_notes import Detail
from superscaler.report.kinds import KINDS
from superscaler.report.places import devices_text
from superscaler.report.subject import Subject
from superscaler.report.timeline import Lane, Timeline
from superscaler.specs.file_errors import replace_own

_HEAD = '{"displayTimeUnit":"ms","otherData":{"by":"superscaler"},"traceEvents":['


def save(subjects: Sequence[Subject], file: Path) -> None:
    """Write the timelines of plans. Raises InputError for a file that cannot be written, or is no trace."""
    lines = (json.dumps(event, separators=(",", ":")) for event in events(subjects))
    replace_own(file, _HEAD + "\n" + ",\n".join(lines) + "\n]}\n", _HEAD, "trace of a plan")


def events(subjects: Sequence[Subject]) -> Iterator[dict[str, Any]]:
    """Yield the events of all timelines; times are in microseconds."""
    process, flows = 0, count()
    for subject in subjects:
        for timeline in subject.timelines:
            found: dict[tuple[int, ...], int] = {}
            for lane in timeline.lanes:
                if lane.devices not in found:
                    found[lane.devices] = process = process + 1
                    name = f"{subject.title}, {timeline.title}: {devices_text(lane.devices)}"
                    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
                    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
            yield from _timeline(subject, timeline, found, flows)


def _timeline(
    subject: Subject, timeline: Timeline, processes: dict[tuple[int, ...], int], flows: Iterator[int]
) -> Iterator[dict[str, Any]]:
    threads = [(processes[lane.devices], number) for number, lane in enumerate(timeline.lanes)]
    for (process, thread), lane in zip(threads, timeline.lanes, strict=True):
        place = {"pid": process, "tid": thread}
        yield {"ph": "M", **place, "name": "thread_name", "args": {"name": lane.stream}}
        yield from _lane(subject, lane, place)
    yield from _arrows(timeline, threads, flows)


def _lane(subject: Subject, lane: Lane, place: dict[str, int]) -> Iterator[dict[str, Any]]:
    columns = (x.tolist() for x in (*_times(lane), lane.kind, lane.detail, lane.microbatch, lane.critical))
    for start, end, kind, detail, microbatch, critical in zip(*columns, strict=True):
        known = subject.details.found[detail] if detail >= 0 else None
        title = known.title if known else KINDS[kind].words
        given = _facts(known) if known else {}
        given |= {"microbatch": microbatch} if microbatch >= 0 else {}
        given |= {"critical path": True} if critical else {}
        times = {"ts": start / 1000, "dur": (end - start) / 1000}
        yield {"ph": "X", **place, "name": title, "cat": KINDS[kind].words, **times, "args": given}


def _facts(known: Detail) -> dict[str, Any]:
    facts = {"tensor": known.tensor, "bytes": known.bytes, "why": known.why, "asked by": "; ".join(known.asked)}
    return {name: value for name, value in facts.items() if value}


def _times(lane: Lane) -> tuple[Ints, Ints]:
    """Return the starts and the ends of events in whole nanoseconds: Perfetto drops an event that overlaps another."""
    start, end = (np.round(times * 1e9).astype(np.int64) for times in (lane.start, lane.end))
    return start, np.minimum(end, np.append(start[1:], end[-1:]))


def _arrows(timeline: Timeline, threads: Sequence[tuple[int, int]], flows: Iterator[int]) -> Iterator[dict[str, Any]]:
    """Yield an arrow to each event from its source: from the start of a message, from the end of work."""
    times = [_times(lane) for lane in timeline.lanes]
    of = [(number, k) for number, lane in enumerate(timeline.lanes) for k in range(len(lane))]
    for number, k in of:
        source = int(timeline.lanes[number].source[k])
        if source < 0:
            continue
        other, at = of[source]
        leaves = _inside(times[other], at) if timeline.lanes[other].is_compute else int(times[other][0][at])
        # A wait for a message that nobody has sent ends when that begins: the arrow goes to what follows it.
        arrives, both = max(leaves, _inside(times[number], k)), {"name": "waits for", "cat": "flow", "id": next(flows)}
        for kind, lane, ts in (({"ph": "s"}, other, leaves), ({"ph": "f", "bp": "e"}, number, arrives)):
            process, thread = threads[lane]
            yield {**kind, **both, "pid": process, "tid": thread, "ts": ts / 1000}


def _inside(times: tuple[Ints, Ints], k: int) -> int:
    """Return the last nanosecond of an event."""
    return int(max(times[0][k], times[1][k] - 1))
