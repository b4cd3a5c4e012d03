"""The model of a report: its blocks, their cuts and devices, and the bytes that each puts on links."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from superscaler.groups import group_by
from superscaler.report.page.markup import Markup, table, tag
from superscaler.report.places import ranges
from superscaler.report.schema import Axis, Block, objects
from superscaler.report.subject import Subject
from superscaler.report.words import axes_text, bytes_moved, heading
from superscaler.specs.sizes import size

_NAMES = ("block", "operators", "devices", "cut", "weights", "on all devices", "on links, each")
_WIDTH = 120
_NUMBER = re.compile(r"(\d+)")


def model_table(subject: Subject) -> Markup:
    """Return a row for each distinct block of a model, in the order of the forward. Blocks that are equal but for the
    numbers of their devices, as in stages of a pipeline, share a row.
    """
    blocks: list[Block] = objects(Block, subject.account["blocks"])
    world = subject.simulation.prediction.world
    most = max((bytes_moved(block) for block in blocks), default=0)
    rows = (list(_row(some, world, most)) for some in group_by(blocks, _form).values())
    return tag("div", table(_NAMES, rows, left=4), class_="tall")


def _form(block: Block) -> tuple[object, ...]:
    """Return the facts of a block, with devices counted from its first."""
    first = next(iter(block.devices), 0)
    cuts = tuple((_counted(split.axes, first), split.of) for split in block.splits)
    weights = tuple(w.of for w in block.weights), *_bytes(block)
    return block.ops, block.again, block.devices.shifted(first), cuts, weights, bytes_moved(block)


def _counted(axes: tuple[Axis, ...], first: int) -> tuple[Axis, ...]:
    nested = [tuple(_counted(inner, first) for inner in axis.axes) for axis in axes]
    return tuple(
        replace(axis, devices=axis.devices.shifted(first), axes=n) for axis, n in zip(axes, nested, strict=True)
    )


def _row(equal: Sequence[Block], world: int, most: int) -> Iterator[object]:
    block, names = equal[0], [name for b in equal for name in b.names]
    names.sort(key=lambda name: [int(word) for word in _NUMBER.findall(name)])
    yield heading(names) + (f" ({len(names)} equal)" if len(names) > 1 else "")
    again = f", {block.again} again" if block.again else ""
    yield f"{block.ops}{again}"
    every = {d for b in equal for d in b.devices}
    shown = f"{ranges(every)}, {len([*block.devices])} each" if len(equal) > 1 else str(block.devices)
    yield Markup(_strip(every, shown, world) + tag("span", f" {shown}", class_="quiet"))
    cuts = [dict.fromkeys(tag("div", axes_text(split.axes)) for split in b.splits) for b in equal]
    is_shifted = any(other != cuts[0] for other in cuts)
    yield Markup("".join([*cuts[0], *[tag("div", "(of the first block)", class_="quiet")] * is_shifted]))
    whole, held = _bytes(block)
    yield size(whole) if whole else ""
    yield size(held) if held else ""
    yield Markup(tag("div", size(bytes_moved(block)) if bytes_moved(block) else "") + _amount(bytes_moved(block), most))


def _bytes(block: Block) -> tuple[int, int]:
    """Return the bytes of the weights of a block, and those on all devices."""
    return sum(w.bytes for w in block.weights), sum(w.held_bytes for w in block.weights)


def _amount(count: int, most: int) -> Markup:
    width = round(_WIDTH * count / most) if most else 0
    return tag("svg", tag("rect", width=width, height=4, fill="var(--transfer)"), width=_WIDTH, height=4)


def _strip(devices: Collection[int], text: str, world: int) -> Markup:
    """Return a bar of all devices, in which some are filled."""
    each, shapes = _WIDTH / world, [tag("rect", width=_WIDTH, height=10, fill="var(--line)")]
    starts = [d for d in sorted(devices) if d - 1 not in devices]
    ends = [d + 1 for d in sorted(devices) if d + 1 not in devices]
    shapes += [
        tag("rect", x=f"{each * a:.2f}", width=f"{each * (b - a):.2f}", height=10, fill="var(--backward)")
        for a, b in zip(starts, ends, strict=True)
    ]
    return tag("svg", *shapes, width=_WIDTH, height=10, role="img", aria_label=f"devices {text}")
