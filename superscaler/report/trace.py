"""Timelines in the form of Chrome's traces, which Perfetto opens: a process for each device, arrows for messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from superscaler.errors import InputError
from superscaler.report.details import Detail
from superscaler.report.facts import ranges
from superscaler.report.subject import Subject
from superscaler.report.timeline import WORDS, Lane, Timeline
from superscaler.specs.file_errors import writing

_HEAD = '{"displayTimeUnit":"ms","otherData":{"by":"superscaler"},"traceEvents":['


def save(subjects: Sequence[Subject], file: Path) -> None:
    """Write the timelines of plans. Raises InputError where the file cannot be written, or is one that is no trace."""
    lines = (json.dumps(event, separators=(",", ":")) for event in events(subjects))
    with writing(file, "name a file in a folder that exists"):
        if file.is_file() and not file.read_bytes().startswith(_HEAD.encode()):
            raise InputError(f"{file} is there and is no trace of a plan; name a new file, or remove that one.")
        file.write_text(_HEAD + "\n" + ",\n".join(lines) + "\n]}\n", encoding="utf-8")


def events(subjects: Sequence[Subject]) -> Iterator[dict[str, Any]]:
    """Yield the events of all timelines; times are in microseconds."""
    process = 0
    for subject in subjects:
        for timeline in subject.timelines:
            found: dict[tuple[int, ...], int] = {}
            for lane in timeline.lanes:
                if lane.devices not in found:
                    found[lane.devices] = process = process + 1
                    devices = f"device{'s' if len(lane.devices) > 1 else ''} {ranges(lane.devices)}"
                    name = f"{subject.title}, {timeline.title}: {devices}"
                    yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
                    yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
            yield from _timeline(subject, timeline, found)


def _timeline(subject: Subject, timeline: Timeline, processes: dict[tuple[int, ...], int]) -> Iterator[dict[str, Any]]:
    threads = [(processes[lane.devices], number) for number, lane in enumerate(timeline.lanes)]
    for (process, thread), lane in zip(threads, timeline.lanes, strict=True):
        place = {"pid": process, "tid": thread}
        yield {"ph": "M", **place, "name": "thread_name", "args": {"name": lane.stream}}
        yield from _lane(subject, lane, place)
    yield from _arrows(timeline, threads, f"{threads[0][0] if threads else 0}")


def _lane(subject: Subject, lane: Lane, place: dict[str, int]) -> Iterator[dict[str, Any]]:
    columns = (x.tolist() for x in (lane.start, lane.end, lane.kind, lane.detail, lane.microbatch, lane.critical))
    for start, end, kind, detail, microbatch, critical in zip(*columns, strict=True):
        known = subject.details.found[detail] if detail >= 0 else None
        title = known.title if known else WORDS[kind]
        given = _facts(known) if known else {}
        given |= {"microbatch": microbatch} if microbatch >= 0 else {}
        given |= {"critical path": True} if critical else {}
        times = {"ts": start * 1e6, "dur": (end - start) * 1e6}
        yield {"ph": "X", **place, "name": title, "cat": WORDS[kind], **times, "args": given}


def _facts(known: Detail) -> dict[str, Any]:
    facts = {"tensor": known.tensor, "bytes": known.bytes, "why": known.why, "asked by": "; ".join(known.asked)}
    return {name: value for name, value in facts.items() if value}


def _arrows(timeline: Timeline, threads: Sequence[tuple[int, int]], name: str) -> Iterator[dict[str, Any]]:
    """Yield an arrow from each message that is sent to where it is received, and from there to what waits for it."""
    of = [(lane, n - lane.first, place) for lane, place in zip(timeline.lanes, threads, strict=True)
          for n in range(lane.first, lane.first + len(lane))]  # fmt: skip
    for number, (lane, at, (process, thread)) in enumerate(of):
        source = int(lane.source[at])
        if source < 0:
            continue
        from_lane, k, (pid, tid) = of[source]
        both = {"name": "waits for", "cat": "flow", "id": f"{name}.{number}"}
        leaves = from_lane.end[k] - 1e-9 if from_lane.is_compute else from_lane.start[k]
        yield {"ph": "s", **both, "pid": pid, "tid": tid, "ts": max(float(leaves), float(from_lane.start[k])) * 1e6}
        end = max(float(lane.start[at]), float(lane.end[at]) - 1e-9) * 1e6
        yield {"ph": "f", "bp": "e", **both, "pid": process, "tid": thread, "ts": end}
