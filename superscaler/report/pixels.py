"""A timeline in columns of equal time: as characters, and as a picture in SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from superscaler.report.event_notes import Details
from superscaler.report.kinds import KINDS, Kind
from superscaler.report.places import devices_text
from superscaler.report.timeline import Lane, Timeline
from superscaler.specs.sizes import duration

# The most rows of devices that are drawn.
MOST_ROWS = 32
# The number of columns of characters, and of pixels.
WIDTH, PIXELS = 100, 1000
_LEFT, _ROW, _TOP = 150, 20, 44


def columns(lane: Lane, seconds: float, count: int) -> list[int]:
    """Return, for each of `count` columns of a step, the event of a lane that fills the column most; -1 for none."""
    found, most = [-1] * count, [0.0] * count
    each = seconds / count
    for n, (start, end) in enumerate(zip(lane.start.tolist(), lane.end.tolist(), strict=True)):
        for column in range(max(int(start / each), 0), min(int(end / each) + 1, count)):
            part = min(end, (column + 1) * each) - max(start, column * each)
            if part > most[column]:
                found[column], most[column] = n, part
    return found


def drawing(timeline: Timeline, details: Details) -> str:
    """Return the work of devices by time, in characters, with the share of their waits."""
    lanes = _lanes(timeline)
    names, rows = (
        [devices_text(lane.devices) for lane in lanes],
        [_characters(lane, timeline, details) for lane in lanes],
    )
    width, seen = max(map(len, names), default=0), set("".join(rows))
    legend = ", ".join(f"{kind.sign} {kind.legend}" for kind in Kind if kind.sign in seen - {" "})
    each = duration(timeline.seconds / WIDTH)
    first = f"a step of {duration(timeline.seconds)}; a column is {each}, behind the last is the share of waits"
    waits = (f"{_waits(lane) / timeline.seconds:4.0%}" for lane in lanes)
    lines = [first, *(f"  {name:{width}}  {row}{share}" for name, row, share in zip(names, rows, waits, strict=True))]
    left = sum(lane.is_compute for lane in timeline.lanes) - len(lanes)
    return "\n".join([*lines, *([f"  and {left} more rows"] if left else []), f"  {legend}"])


def _lanes(timeline: Timeline) -> list[Lane]:
    return [lane for lane in timeline.lanes if lane.is_compute][:MOST_ROWS]


def _waits(lane: Lane) -> float:
    """Return the idle seconds of the devices of a lane."""
    return float((lane.end - lane.start)[lane.kind >= Kind.BUBBLE].sum())


def _characters(lane: Lane, timeline: Timeline, details: Details) -> str:
    text = ""
    for n, size in _runs(columns(lane, timeline.seconds, WIDTH)):
        label = _label(lane, n, details)
        character = label[:1] or (KINDS[lane.kind[n]].sign if n >= 0 else " ")
        text += label + character * (size - len(label)) if len(label) < size else character * size
    return text


def _label(lane: Lane, n: int, details: Details) -> str:
    """Return the letter and the microbatch of an event; empty for an event without a letter."""
    if n < 0 or int(lane.kind[n]) >= Kind.BUBBLE or int(lane.detail[n]) < 0:
        return ""
    microbatch = int(lane.microbatch[n])
    letter = details.found[int(lane.detail[n])].letter
    return letter + (str(microbatch) if letter and microbatch >= 0 else "")


def _runs(found: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield each event with the number of its columns."""
    start = 0
    for at in range(1, len(found) + 1):
        if at == len(found) or found[at] != found[start]:
            yield found[start], at - start
            start = at


def picture(timeline: Timeline, details: Details, x: int, y: int) -> tuple[list[str], int, int]:
    """Return a timeline as lines of SVG from (x, y) on, and its right and lower ends."""
    lanes, lines = (
        _lanes(timeline),
        [svg_text(x, y + 12, f"a step of {duration(timeline.seconds)}", 'font-weight="bold"')],
    )
    kinds = dict.fromkeys(KINDS[kind] for lane in lanes for kind in sorted(set(lane.kind.tolist())))
    place = x + 130
    for kind in kinds:
        lines.append(f'<rect x="{place}" y="{y + 3}" width="10" height="10" fill="{kind.color}"/>')
        lines.append(svg_text(place + 14, y + 12, kind.words))
        place += 26 + 7 * len(kind.words)
    for k in range(6):
        at = x + _LEFT + k * PIXELS // 5
        lines.append(f'<line x1="{at}" y1="{y + 30}" x2="{at}" y2="{y + _TOP + _ROW * len(lanes)}" stroke="#d9dce1"/>')
        lines.append(svg_text(at + 3, y + 36, duration(timeline.seconds * k / 5) if k else "0"))
    for number, lane in enumerate(lanes):
        top = y + _TOP + number * _ROW
        lines.append(svg_text(x, top + 12, devices_text(lane.devices)))
        lines += _bars(lane, timeline, details, x + _LEFT, top)
    left = sum(lane.is_compute for lane in timeline.lanes) - len(lanes)
    bottom = y + _TOP + len(lanes) * _ROW
    lines += [svg_text(x, bottom + 12, f"and {left} more rows")] if left else []
    return ['<g class="timeline">', *lines, "</g>"], max(place, x + _LEFT + PIXELS + 40), bottom + _ROW


def _bars(lane: Lane, timeline: Timeline, details: Details, x: int, y: int) -> Iterator[str]:
    at = 0
    for n, size in _runs(columns(lane, timeline.seconds, PIXELS)):
        if n >= 0:
            kind, label = KINDS[lane.kind[n]], _label(lane, n, details)
            known = details.found[int(lane.detail[n])].title if lane.detail[n] >= 0 else ""
            title = escape(" ".join(filter(None, (label, kind.words, known))))
            gap = 0.5 if size > 3 else 0
            yield (
                f'<g><title>{title}</title><rect x="{x + at}" y="{y}" width="{size - gap}" height="16" '
                f'fill="{kind.color}"/></g>'
            )
            if label and size > 8 * len(label):
                color = "white" if kind.is_dark else "black"
                yield svg_text(x + at + 3, y + 12, label, f'font-size="10" fill="{color}"')
        at += size


def svg_text(x: int, y: int, text: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{" " if more else ""}{more}>{escape(text)}</text>'
