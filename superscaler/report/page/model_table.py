"""The model of a report: its blocks, their cuts and devices, and the bytes that each puts on links."""

from __future__ import annotations

import re
from collections.abc import Iterator

from superscaler.report.page.markup import Markup, table, tag
from superscaler.report.schema import Block, adapter
from superscaler.report.subject import Subject
from superscaler.report.words import axes_text, heading
from superscaler.specs.sizes import size

_NAMES = ("block", "operators", "devices", "cut", "weights", "on all devices", "on links, each")
_WIDTH = 120
_RANGE = re.compile(r"(\d+)(?: to (\d+)(?: by (\d+))?)?")


def model_table(subject: Subject) -> Markup:
    """Return a row for each distinct block of a model, in the order of the forward."""
    blocks: list[Block] = adapter().validate_python(subject.account["blocks"])
    world = subject.simulation.prediction.world
    most = max((_moved(block) for block in blocks), default=0)
    return tag("div", table(_NAMES, (list(_row(block, world, most)) for block in blocks), left=4), class_="tall")


def _row(block: Block, world: int, most: int) -> Iterator[object]:
    count = len(block.names)
    yield heading(block.names) + (f" ({count} equal)" if count > 1 else "")
    again = f", {block.again} again" if block.again else ""
    yield f"{block.ops}{again}"
    yield Markup(_strip(block.devices, world) + tag("span", f" {block.devices}", class_="quiet"))
    yield Markup("".join(dict.fromkeys(tag("div", axes_text(split.axes)) for split in block.splits)))
    whole, held = (sum(getattr(w, name) for w in block.weights) for name in ("bytes", "held_bytes"))
    yield size(whole) if whole else ""
    yield size(held) if held else ""
    yield Markup(tag("div", size(_moved(block)) if _moved(block) else "") + _amount(_moved(block), most))


def _moved(block: Block) -> int:
    return sum(row.moved for row in block.moves)


def _amount(count: int, most: int) -> Markup:
    width = round(_WIDTH * count / most) if most else 0
    return tag("svg", tag("rect", width=width, height=4, fill="var(--transfer)"), width=_WIDTH, height=4)


def _strip(devices: str, world: int) -> Markup:
    """Return a bar of all devices, in which the devices of a text are filled."""
    each, shapes = _WIDTH / world, [tag("rect", width=_WIDTH, height=10, fill="var(--line)")]
    for first, last, step in _RANGE.findall(devices):
        ends = range(int(first), int(last or first) + 1, int(step or 1))
        runs = [(ends[0], len(ends))] if ends.step == 1 else [(d, 1) for d in ends]
        shapes += [
            tag("rect", x=f"{each * d:.2f}", width=f"{each * n:.2f}", height=10, fill="var(--backward)")
            for d, n in runs
        ]
    return tag("svg", *shapes, width=_WIDTH, height=10, role="img", aria_label=f"devices {devices}")
