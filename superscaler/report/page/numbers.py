"""The numbers of a timeline as tables: for people without a mouse, and to copy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from superscaler.report.kinds import KINDS
from superscaler.report.page.answer import times
from superscaler.report.page.markup import Markup, table, tag
from superscaler.report.places import ranges
from superscaler.report.subject import Subject
from superscaler.report.timeline import Timeline
from superscaler.specs.sizes import duration

# The rows of a table of events.
_MOST = 60
_NAMES = ("devices", "what", "", "microbatches", "events", "seconds", "each")


def numbers(subject: Subject) -> Markup:
    """Return tables of the time of devices by cause, and of the longest work and waits."""
    tables = (
        tag(
            "details",
            tag("summary", f"{timeline.title}: the {_MOST} longest of work, communication and waits"),
            tag("div", table(_NAMES, _rows(subject, timeline), left=3), class_="tall"),
        )
        for timeline in subject.timelines
    )
    return tag("div", tag("div", times(subject), class_="tall"), *tables)


def _rows(subject: Subject, timeline: Timeline) -> Iterator[tuple[object, ...]]:
    """Yield the sums of equal events of a device, the longest first; devices with equal sums share a row."""
    total, count = Counter[tuple[tuple[int, ...], int, int]](), Counter[tuple[tuple[int, ...], int, int]]()
    turns: dict[tuple[tuple[int, ...], int, int], set[int]] = {}
    for lane in timeline.lanes:
        columns = (lane.kind.tolist(), lane.detail.tolist(), (lane.end - lane.start).tolist(), lane.microbatch.tolist())
        for kind, detail, seconds, microbatch in zip(*columns, strict=True):
            key = lane.devices, kind, detail
            total[key] += seconds
            count[key] += 1
            turns.setdefault(key, set()).add(microbatch)
    equal: dict[tuple[object, ...], list[int]] = {}
    for key, seconds in total.most_common():
        devices, kind, detail = key
        title = subject.details.found[detail].title if detail >= 0 else ""
        facts = len(turns[key] - {-1}) or "", count[key], duration(seconds), duration(seconds / count[key])
        equal.setdefault((title, KINDS[kind].words, *facts), []).extend(devices)
    yield from ((ranges(devices), *facts) for facts, devices in islice(equal.items(), _MOST))
