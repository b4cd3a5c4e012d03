"""The bytes that devices send to each other in a step, as a matrix."""

from __future__ import annotations

from itertools import islice
from math import ceil, log2

import numpy as np

from superscaler.collectives import KINDS, TILE
from superscaler.groups import group_by
from superscaler.ir.cohorts import Cohort, cohorts
from superscaler.ir.communication import links
from superscaler.ir.program import Instruction, Program
from superscaler.ir.running.meetings import Ends
from superscaler.report.page.markup import Markup, table, tag
from superscaler.simulate.times import Floats
from superscaler.specs.sizes import size

# Rows of a matrix; of more devices several share one.
MOST = 48
# Rows of the table of the largest entries.
_SHOWN = 20
_CELL, _LEFT, _TOP = 14, 64, 30
_NOTE = (
    "Bytes of a step from a device (row) to a device (column){together}. A collective counts as a ring in the order of "
    "its group, an all_to_all as messages between all; copies to the host do not count."
)


def bytes_between(program: Program) -> tuple[Floats, int]:
    """Return the bytes from each device to each other, and the number of neighbouring devices that share a row."""
    share = 1 << max(0, ceil(log2(program.world / MOST)))
    rows = ceil(program.world / share)
    found = np.zeros((rows, rows))
    for cohort in cohorts(program):
        for at, i in enumerate(cohort.code):
            if i.is_send:
                np.add.at(found, (cohort.devices // share, cohort.data(at, "peer") // share), i.bytes)
            elif len(i.group) > 1:
                _collective(found, cohort, at, i, share)
    return found, share


def _collective(found: Floats, cohort: Cohort, at: int, i: Instruction, share: int) -> None:
    ends, members = Ends.of(cohort.devices, cohort.data(at, "group")), len(i.group)
    each = i.bytes * links(i.kind, members) / members
    steps = range(1, members) if KINDS[i.kind].ends == (TILE, TILE) else (1,)
    for step in steps:
        to = ends.groups[ends.group, (ends.place + step) % members]
        np.add.at(found, (cohort.devices // share, to // share), each / len(steps))


def matrix(program: Program) -> Markup:
    """Return the matrix as a picture, and as a table of its largest entries."""
    found, share = bytes_between(program)
    if not found.any():
        return tag("p", "Nothing: no device sends to another.")
    together = f", {share} neighbouring devices in one" if share > 1 else ""
    names = [_name(k, share, program.world) for k in range(len(found))]
    order = np.argsort(found, axis=None, kind="stable")[::-1]
    pairs = [divmod(int(k), len(found)) for k in order if found.flat[k]]
    equal = group_by(pairs, lambda pair: (size(found[pair]), pair[1] - pair[0]))
    rows = ((names[min(p)[0]], names[min(p)[1]], key[0], len(p)) for key, p in islice(equal.items(), _SHOWN))
    title = "The largest entries. Those of equal bytes and distance share a row, which names the first."
    largest = table(("from", "to", "bytes", "of these"), rows, left=2, title=title)
    caption = tag("figcaption", _NOTE.format(together=together))
    return tag("div", tag("figure", caption, _picture(found, names)), tag("div", largest, class_="tall"), class_="pair")


def _name(k: int, share: int, world: int) -> str:
    last = min((k + 1) * share, world) - 1
    return str(k) if share == 1 else f"{k * share} to {last}"


def _picture(found: Floats, names: list[str]) -> Markup:
    count, most = len(found), found.max()
    shapes = [tag("text", "device", x=0, y=_TOP - 8)]
    every = max(1, count // 8)
    for k in range(0, count, every):
        middle = k * _CELL + 11
        shapes.append(tag("text", names[k].split(" ")[0], x=_LEFT - 6, y=_TOP + middle, text_anchor="end"))
        shapes.append(
            tag("text", names[k].split(" ")[0], x=_LEFT + k * _CELL + _CELL / 2, y=_TOP - 8, text_anchor="middle")
        )
    side = count * _CELL
    shapes.append(tag("rect", x=_LEFT, y=_TOP, width=side, height=side, fill="var(--soft)"))
    cells = []
    for a, b in zip(*np.nonzero(found), strict=True):
        strength = 0.15 + 0.85 * float(np.sqrt(found[a, b] / most))
        title = tag("title", f"{names[a]} to {names[b]}: {size(found[a, b])}")
        square = f"M{_LEFT + b * _CELL} {_TOP + a * _CELL}h{_CELL - 1}v{_CELL - 1}h{1 - _CELL}z"
        cells.append(tag("path", title, d=square, opacity=f"{strength:.2f}"))
    shapes.append(tag("g", *cells, fill="var(--transfer)"))
    return tag(
        "svg", *shapes, width=_LEFT + side + 10, height=_TOP + side + 10, role="img", aria_label="bytes between devices"
    )
