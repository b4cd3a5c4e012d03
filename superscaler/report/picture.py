"""A plan as a picture in SVG: its timeline, and its paths as layouts (grids of device numbers) with collectives between
them.
"""

import colorsys
from collections.abc import Iterator, Mapping
from html import escape
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from superscaler.errors import some
from superscaler.ir.layout import Layout
from superscaler.report.pixels import picture, svg_text
from superscaler.report.subject import Subject
from superscaler.specs.file_errors import replace_own
from superscaler.specs.sizes import duration, size

# Lengths, in pixels.
CELL, GAP, ARROW, MARGIN, LINE = 28, 6, 150, 20, 16
LEGEND = (
    "A grid is a layout: a cell is a device, R copies below each other, V addends (+) beside each other, "
    "D parts of the tensor in a colour each, the whole in grey."
)
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="{w}" height="{h}" viewBox="0 0 {w} {h}" \
font-family="sans-serif" font-size="12">
<defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">\
<path d="M0,0 L8,4 L0,8 z"/></marker></defs>
<rect width="{w}" height="{h}" fill="white"/>
"""


def draw(subject: Subject) -> str:
    """Return the timeline of a plan as SVG, and below it its paths."""
    lines, width, y = picture(subject.timelines[-1], subject.details, MARGIN, MARGIN)
    return _page(*_paths(subject.account, lines, width, y)) if subject.account["paths"] else _page(lines, width, y)


def draw_paths(found: Mapping[str, Any]) -> str:
    """Return the paths in explain.json as SVG."""
    return _page(*_paths(found, [], 0, 0))


def _page(body: list[str], width: int, height: int) -> str:
    return HEAD.format(w=width + MARGIN, h=height + MARGIN) + "\n".join([*body, "</svg>\n"])


def _paths(found: Mapping[str, Any], body: list[str], width: int, y: int) -> tuple[list[str], int, int]:
    """Return lines with the paths drawn from `y` on, and the position of their end."""
    body, width = [*body, svg_text(MARGIN, y + MARGIN + LINE, LEGEND)], max(width, len(LEGEND) * 6)
    y += MARGIN + 2 * LINE
    for path in found["paths"]:
        lines, right, y = _path(path, y + LINE)
        body += lines
        width = max(width, right)
    return body, width, y


def save(subject: Subject, file: Path) -> None:
    """Draw into a file. Raises InputError for a file that cannot be written, or is no such drawing."""
    replace_own(file, draw(subject), HEAD.partition("{")[0], "drawing of a plan")


def _path(path: Mapping[str, Any], y: int) -> tuple[list[str], int, int]:
    """Return a path drawn from `y` on, and the position of its end."""
    layouts = [Layout.parse(text) for text in (path["layout"], *(step["layout"] for step in path["steps"]))]
    title = _title(path)
    top, x, height = y + 3 * LINE, MARGIN, max(_extent(layout)[1] for layout in layouts)
    lines = ["<g>", svg_text(x, y + LINE, title, 'font-weight="bold"')]
    for layout, step in zip(layouts, (None, *path["steps"]), strict=True):
        if step is not None:
            lines += _arrow(step, x, top + height // 2)
            x += ARROW
        lines += _grid(layout, x, top, height)
        x += max(_extent(layout)[0], 7 * len(_shape(layout)))
    return [*lines, "</g>"], max(x, MARGIN + 7 * len(title)), top + height + LINE


def _title(path: Mapping[str, Any]) -> str:
    names, sizes = path["tensors"], " x ".join(map(str, path["sizes"]))
    what = "gradients" if path["direction"] == "backward" else "values"
    seconds = sum(step["seconds"] for step in path["steps"])
    times = f", {path['count']} times" if path["count"] > 1 else ""
    return f"{what} of {some(names, 3)}: {sizes} {path['dtype']}, {duration(seconds)}{times}"


def _arrow(step: Mapping[str, Any], x: int, y: int) -> list[str]:
    groups = " | ".join(", ".join(map(str, group)) for group in step["groups"])
    count, middle, anchor = len(step["groups"]), x + ARROW // 2, 'text-anchor="middle"'
    caption = f"{count} group{'s' if count > 1 else ''}, {size(step['moved'])}"
    return [
        f"<g><title>{escape(step['kind'])} over {groups}</title>",
        f'<line x1="{x + 10}" y1="{y}" x2="{x + ARROW - 10}" y2="{y}" stroke="black" marker-end="url(#tip)"/>',
        svg_text(middle, y - 8, step["kind"], anchor),
        svg_text(middle, y + LINE, caption, anchor),
        svg_text(middle, y + 2 * LINE, duration(step["seconds"]), anchor),
        "</g>",
    ]


def _grid(layout: Layout, x: int, top: int, height: int) -> Iterator[str]:
    """Yield a layout, centred between `top` and `top + height`: a block per copy and addend, a cell per part."""
    yield svg_text(x, top - 6, _shape(layout))
    blocks = _blocks(layout)
    (copies, addends, rows, columns), y = blocks.shape, top + (height - _extent(layout)[1]) // 2
    for r, v, i, j in np.ndindex(blocks.shape):
        left, up = x + v * (columns * CELL + GAP) + j * CELL, y + r * (rows * CELL + GAP) + i * CELL
        fill = _color(i * columns + j, rows * columns, v, addends)
        tip = f"device {blocks[r, v, i, j]}: copy {r + 1} of {copies}, addend {v + 1} of {addends}, " + (
            f"part {i * columns + j + 1} of {rows * columns}"
        )
        yield (
            f'<g><title>{tip}</title><rect x="{left}" y="{up}" width="{CELL}" height="{CELL}" fill="{fill}" '
            'stroke="black"/>'
        )
        number = f"{blocks[r, v, i, j]}{'+' if addends > 1 else ''}"
        yield svg_text(left + CELL // 2, up + CELL // 2 + 4, number, 'text-anchor="middle"') + "</g>"


def _blocks(layout: Layout) -> np.ndarray[Any, Any]:
    """Return device numbers by copy, addend, row and column: the last slot across, the others down."""
    copies, addends, parts = layout.shape
    columns = parts[-1] if len(parts) > 1 else 1
    return layout.devices.reshape(copies, addends, prod(parts) // columns, columns)


def _extent(layout: Layout) -> tuple[int, int]:
    """Return width and height of a layout's grid."""
    copies, addends, rows, columns = _blocks(layout).shape
    return addends * (columns * CELL + GAP) - GAP, copies * (rows * CELL + GAP) - GAP


def _shape(layout: Layout) -> str:
    return str(layout).split(" @ ")[0]


def _color(part: int, parts: int, addend: int, addends: int) -> str:
    """Return a hue per part of the tensor, grey for the whole, paler from addend to addend."""
    light = 0.68 + 0.22 * addend / addends
    red, green, blue = (round(255 * c) for c in colorsys.hls_to_rgb(part / parts, light, 0.75 if parts > 1 else 0.0))
    return f"#{red:02x}{green:02x}{blue:02x}"
