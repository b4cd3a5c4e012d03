"""The table of the work of a pipeline: the actions of each device in order, for people to edit, and their seconds."""

from __future__ import annotations

from collections import Counter
from typing import Any

from superscaler.ir.orders import Action
from superscaler.report.details import Kind
from superscaler.report.subject import Subject
from superscaler.report.timeline import Lane

# The most works of a table that can be edited.
_MOST = 8000


def works(subject: Subject) -> dict[str, Any] | None:
    """Return the rows of a pipeline's table and the mean seconds of works by row and kind; None for other plans."""
    orders = dict.fromkeys(row["order"] for row in subject.account["schedule"] if row["order"])
    rows = [text.split() for text in orders]
    count = sum(map(len, rows))
    if len(rows) < 2 or count > _MOST or not all(Action.matches(word) for row in rows for word in row):
        return None
    first = {row["order"]: _first(row["devices"]) for row in reversed(subject.account["schedule"])}
    lanes = [_lane_of(subject, first[order]) for order in orders]
    seconds = [_seconds(subject, lane, row) for lane, row in zip(lanes, rows, strict=True)]
    return {"rows": rows, "names": [f"device {first[order]}" for order in orders], "seconds": seconds}


def _first(devices: str) -> int:
    return int(devices.replace(",", " ").split()[0])


def _lane_of(subject: Subject, device: int) -> Lane:
    return next(lane for lane in subject.timelines[-1].lanes if lane.is_compute and device in lane.devices)


def _seconds(subject: Subject, lane: Lane, row: list[str]) -> dict[str, float]:
    """Return the mean seconds of a work of each kind."""
    total, count = Counter[str](), Counter(Action.parse(word).kind for word in row)
    columns = lane.detail.tolist(), lane.kind.tolist(), (lane.end - lane.start).tolist(), lane.microbatch.tolist()
    for detail, kind, seconds, microbatch in zip(*columns, strict=True):
        if detail >= 0 and microbatch >= 0 and kind <= Kind.WEIGHTS:
            total[subject.details.found[detail].letter] += seconds
    return {kind: total[kind] / n for kind, n in count.items()}
