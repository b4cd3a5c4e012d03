"""The picture of a schedule that is stuck: a row per device, a column per step, and what each device waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from superscaler.ir.parts import place_name

WIDTH, ROWS, FIRST = 100, 8, 2


@dataclass(frozen=True)
class Row:
    """What a device has done, by step, and what it waits for."""

    device: int
    done: Mapping[int, str]
    waits: str


def timetable(rows: Sequence[Row]) -> list[str]:
    """Return the lines of at most `ROWS` rows, at most `WIDTH` wide, without the steps in which no row does anything.

    Where they would be wider, steps in the middle are left out.

    >>> rows = Row(0, {0: "F0", 1: "F1"}, "B0 waits for B0 on device 1"), Row(1, {1: "F0"}, "F1 waits")
    >>> print(*timetable(rows), sep="\\n")
      step      0  1
      device 0  F0 F1 ? B0 waits for B0 on device 1
      device 1  .  F0 ? F1 waits
    """
    shown = rows[:ROWS]
    steps = sorted({step for row in shown for step in row.done})
    fewer = [[*steps[:FIRST], ~steps[FIRST], *steps[start:]] for start in range(FIRST + 1, len(steps) + 1)]
    least = [[~steps[0], steps[-1]], [~steps[0]]] if len(steps) > 1 else []
    for columns in (steps, *fewer, *least):
        lines = _lines(shown, columns)
        if max(map(len, lines)) <= WIDTH:
            break
    lines = [line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines]
    more = len(rows) - ROWS
    return lines + ([f"  and {more} more device{'s' * (more > 1)}"] if more > 0 else [])


def _lines(rows: Sequence[Row], steps: Sequence[int]) -> list[str]:
    """Return a line for each row, under a head if there are steps; ~n stands for steps left out, the first being n."""
    columns = [{-1: "..." if s < 0 else str(s), **{r.device: _cell(r, s) for r in rows}} for s in steps]
    left = max(len(place_name(row.device)) for row in rows)
    names = {-1: "step"} if steps else {}
    names |= {row.device: place_name(row.device) for row in rows}
    ends = {row.device: f"? {row.waits}" for row in rows}
    lines = []
    for device, name in names.items():
        cells = [f"{c[device]:{max(map(len, c.values()))}}" for c in columns if c[device]]
        lines.append("  " + " ".join([f"{name:{left}} ", *cells, ends.get(device, "")]).rstrip())
    return lines


def _cell(row: Row, step: int) -> str:
    """Return what a row shows of a step, nothing after its last."""
    if (~step if step < 0 else step) > max(row.done, default=-1):
        return ""
    return "..." if step < 0 else row.done.get(step, ".")
