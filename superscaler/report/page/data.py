"""The data of a page: a header, and columns of numbers that a browser reads as typed arrays."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from superscaler.report.kinds import Kind
from superscaler.report.page.memory_curve import Curve, curves
from superscaler.report.places import devices_text
from superscaler.report.subject import Subject
from superscaler.report.timeline import Lane, Timeline
from superscaler.simulate.storages import CATEGORIES


def packed(subjects: Sequence[Subject]) -> str:
    """Return the data of plans as text."""
    columns = _Columns()
    kinds = [{"color": k.css, "words": k.words, "isWait": k.is_wait, "isDark": k.is_dark} for k in Kind]
    head = {"kinds": kinds, "categories": CATEGORIES, "plans": [_plan(subject, columns) for subject in subjects]}
    return _pack(head, columns)


@dataclass(eq=False)
class _Columns:
    """Columns of numbers, one after the other, each from a multiple of 4 on."""

    parts: list[bytes] = field(default_factory=list)
    size: int = 0

    def add(self, values: NDArray[Any], kind: str) -> dict[str, Any]:
        data = np.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
        data += bytes(-len(data) % 4)
        self.parts.append(data)
        self.size += len(data)
        return {"column": [kind, self.size - len(data), len(values)]}


def _pack(head: dict[str, Any], columns: _Columns) -> str:
    """Return a header and its columns as base64 of gzip: the length of the header, the header, the columns."""
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    data = b"".join([len(text).to_bytes(4, "little"), text, *columns.parts])
    return base64.b64encode(gzip.compress(data, 6, mtime=0)).decode()


def _plan(subject: Subject, columns: _Columns) -> dict[str, Any]:
    details = [{k: v for k, v in asdict(d).items() if v} for d in subject.details.found]
    return {
        "title": subject.title,
        "details": details,
        "tracks": [_track(timeline, columns) for timeline in subject.timelines],
        "capacity": subject.simulation.prediction.capacity or 0,
        "memory": [_curve(curve, columns) for curve in curves(subject)],
    }


def _curve(curve: Curve, columns: _Columns) -> dict[str, Any]:
    return {
        "name": devices_text(curve.devices),
        "times": columns.add(curve.times, "f4"),
        "values": [columns.add(column, "f4") for column in curve.values.T],
        "during": columns.add(curve.during, "f4"),
        "overhead": curve.memory.overhead,
    }


def _track(timeline: Timeline, columns: _Columns) -> dict[str, Any]:
    """Return a timeline as data. Times are counted in ticks of a nanosecond, or longer for steps of seconds."""
    tick = max(1e-9, timeline.seconds / 2**31)

    def all_of(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(lane, name) for lane in timeline.lanes])

    start, end = (np.round(all_of(name) / tick).astype(np.int64) for name in ("start", "end"))
    numbers = {name: (all_of(name), "i4") for name in ("detail", "microbatch", "source")}
    small = {name: (all_of(name), "u1") for name in ("kind", "critical")}
    found = {"start": (start, "u4"), "length": (end - start, "u4"), **numbers, **small}
    return {
        "title": timeline.title + (f", without {timeline.hidden} devices" if timeline.hidden else ""),
        "seconds": timeline.seconds,
        "tick": tick,
        "columns": {name: columns.add(*column) for name, column in found.items()},
        "lanes": [_lane(lane) for lane in timeline.lanes],
    }


def _lane(lane: Lane) -> dict[str, Any]:
    return {
        "name": devices_text(lane.devices),
        "stream": lane.stream,
        "compute": lane.is_compute,
        "first": lane.first,
        "count": len(lane),
    }
