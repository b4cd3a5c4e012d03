"""Draws docs/images/concept_*.svg: the pictures of concepts.md, each from a plan of the example there.

python docs/concepts.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from html import escape
from pathlib import Path

import torch

import superscaler as ss
from superscaler.certify.certificate import CHECKS
from superscaler.examples.plans import piped
from superscaler.ir.grid import Grid
from superscaler.ir.layout import layout_of
from superscaler.ir.model import Op
from superscaler.ir.program import Backward, Collective, Forward, Loss, Update
from superscaler.models import build
from superscaler.report.picture import draw_paths
from superscaler.report.pixels import picture

COLORS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442")
ALGORITHMS = (ss.Split("batch", 2), ss.Split("hidden@summed", 2), ss.Replicate(2))
CELL = 14
# The range of each factor of a part.
Span = Mapping[str, tuple[int, int]]
SMALL = "mlp:hidden=8,inputs=6,classes=4,batch=4"
# So large that its operators take longer than to start them.
LARGE = "mlp:hidden=4096,inputs=4096,classes=4096,batch=16384,device=meta"


def capture(model: str) -> ss.Graph:
    built = build(model)
    return ss.capture(built.module, kwargs=built.kwargs, optimizer=torch.optim.SGD(built.module.parameters(), lr=0.1))


def halves(graph: ss.Graph, cluster: ss.Cluster) -> None:
    ss.op_trans(graph, graph.forward_ops, ss.Split("batch", 2, axis="dp"))
    ss.op_assign(graph, graph.ops, cluster.mesh(dp=2))


def thrifty(graph: ss.Graph, cluster: ss.Cluster) -> None:
    ss.op_trans(graph, [op for op in graph.forward_ops if op.module == "layers.1"], ss.Recompute())
    halves(graph, cluster)


def text(x: float, y: float, words: object, more: str = "") -> str:
    return f'<text x="{x}" y="{y}" {more}>{escape(str(words))}</text>'


def box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" stroke="#1b1d21"/>'


def page(lines: Iterator[str] | list[str], width: int, height: int) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
    return "\n".join(
        [head + 'font-size="12">', '<rect width="100%" height="100%" fill="white"/>', *lines, "</svg>", ""]
    )


def factors(graph: ss.Graph) -> str:
    """Return the operators beside each other, with the factors that run through them."""
    names, lines = list(graph.factors), list[str]()
    for column, op in enumerate(graph.forward_ops):
        x = 110 + 66 * column
        label = f"{op.module} {op.target.split('.')[1]}".strip()
        lines.append(text(x, 20 + 14 * (column % 2), label[:22], 'font-size="9"'))
        for index in op.indices:
            row = names.index(index.factor)
            fill = {"spatial": COLORS[row % 5], "summed": "white"}.get(index.mark, "#bbbbbb")
            lines.append(box(x, 44 + 26 * row, 60, 16, fill))
    for row, name in enumerate(names):
        lines.append(text(8, 56 + 26 * row, f"{name}: {graph.factors[name].size}"))
    end = 56 + 26 * len(names)
    legend = "filled: a cut of the factor cuts the result; white: the operator sums over it; grey: cannot be cut"
    return page([*lines, text(8, end + 8, legend)], 110 + 66 * len(graph.forward_ops) + 10, end + 20)


def cuts(captured: ss.Graph) -> Iterator[tuple[str, Op, Grid]]:
    """Yield an operator with its parts under each algorithm."""
    for algorithm in ALGORITHMS:
        graph = captured.copy()
        op = graph.op("linear_product_1")
        ss.op_trans(graph, op, algorithm)
        yield str(algorithm), op, graph.grids[op.name]


def spans(op: Op, grid: Grid) -> Iterator[Span]:
    """Yield for each part its range of each factor."""
    axis, start = grid.axes[0], 0
    for size in axis.sizes:
        whole = {index.factor: (0, index.size) for index in op.indices}
        if axis.index is None:
            yield whole
        else:
            yield {**whole, op.indices[axis.index].factor: (start, start + size)}
            start += size


def of_parts(captured: ss.Graph, caption: str, part: Callable[[int, int, int, Span], tuple[str, str]]) -> str:
    """Return a picture of the parts of each cut. `part(x, y, number, span)` gives the words above one and its shape."""
    lines = []
    for at, (title, op, grid) in enumerate(cuts(captured)):
        lines.append(text(10 + 250 * at, 20, title))
        for number, span in enumerate(spans(op, grid)):
            x, y = 10 + 250 * at + 120 * number, 48
            words, shape = part(x, y, number, span)
            lines += [text(x, y - 10, words), box(x, y, 8 * CELL, 4 * CELL, "white"), shape]
    return page([*lines, text(10, 128, caption)], 760, 140)


def parts(captured: ss.Graph) -> str:
    """Return the iterations of each part, as rows of the batch and columns of the summed index."""

    def part(x: int, y: int, number: int, span: Span) -> tuple[str, str]:
        (top, bottom), (left, right) = span["batch"], span["hidden"]
        sizes = (right - left) * CELL, (bottom - top) * CELL
        return f"part {number}", box(x + left * CELL, y + top * CELL, *sizes, COLORS[number])

    return of_parts(captured, "down: batch 0 to 3; across: the summed index hidden, 0 to 7", part)


def masks(captured: ss.Graph) -> str:
    """Return the mask of each part: the elements of the result that it writes, and the terms of their sums."""

    def part(x: int, y: int, number: int, span: Span) -> tuple[str, str]:
        (top, bottom), (first, last) = span["batch"], span["hidden"]
        depth = f'fill-opacity="{(last - first) / 8}" '
        shape = box(x, y + top * CELL, 8 * CELL, (bottom - top) * CELL, COLORS[number])
        return f"part {number}: {last - first} of 8 terms", shape.replace("<rect ", f"<rect {depth}")

    return of_parts(captured, "the elements [batch, hidden.2] of the result; pale: a partial sum", part)


def steps(*plans: tuple[str, ss.Plan]) -> str:
    """Return the predicted steps of plans below each other."""
    lines, y, width = list[str](), 10, 0
    for title, plan in plans:
        lines.append(text(20, y + 12, title, 'font-weight="bold"'))
        drawn, right, y = picture(plan._subject.timelines[-1], plan._subject.details, 20, y + 20)
        lines, width = [*lines, *drawn], max(width, right)
    return page(lines, width + 10, y + 10)


def materialization(plan: ss.Plan) -> str:
    """Return the gradients of a weight as they are made, and as the update reads them."""
    graph, model = plan.compiled.graph, plan.compiled.graph.model
    move = next(m for m in plan.compiled.moves if m.tensor == "layers.1.weight" and m.is_backward and m.way != "local")
    made = next(layout_of(graph.grids[op.name], op.inputs[k], True, True) for op, k in model.uses[move.tensor])
    update = next(op for op in model.ops if not op.is_forward and op.inputs[0].tensor == move.tensor)
    read = layout_of(graph.grids[update.name], update.inputs[0], False)
    seconds = plan.compiled.cluster.seconds(move.kind, [move.group], move.bytes)
    step = {"kind": move.kind, "groups": [move.group], "moved": move.moved, "seconds": seconds, "layout": str(read)}
    tensor = model.tensors[move.tensor]
    path = {"direction": "backward", "tensors": [move.tensor], "count": 1, "sizes": tensor.shape, "dtype": tensor.dtype}
    return draw_paths({"paths": [{**path, "layout": str(made), "steps": [step]}]})


def certificate(plan: ss.Plan) -> str:
    """Return the instructions of two devices, where they meet, and what was found of them."""
    program, lines, y = plan.compiled.program, list[str](), 40
    kinds = Forward | Backward | Collective | Update | Loss
    columns = [[i for i in program.devices[d].instructions if isinstance(i, kinds)] for d in (0, 1)]
    lines += [text(20 + 400 * d, 20, f"device {d}", 'font-weight="bold"') for d in (0, 1)]
    for pair in zip(*columns, strict=True):
        for d, i in enumerate(pair):
            lines.append(text(20 + 400 * d, y, program.describe(i)[:70], 'font-size="10"'))
        if isinstance(pair[0], Collective | Loss):
            lines.append(f'<path d="M370 {y - 4}H412" stroke="#009e73" stroke-width="2"/>')
        y += 18
    found = plan.validate()
    for name in CHECKS:
        lines.append(text(20, y + 10, f"{name.replace('_', ' ')}: {'holds' if found[name] else 'does not hold'}"))
        y += 18
    return page(lines, 790, y + 10)


def pictures() -> dict[str, str]:
    """Return the pictures by their names."""
    captured, large = capture(SMALL), capture(LARGE)
    plain = ss.compile(captured, halves, "local:2")
    ordered, kept, saving = (ss.compile(large, plan, "a100:1x2") for plan in (piped, halves, thrifty))
    return {
        "factors": factors(captured),
        "parts": parts(captured),
        "masks": masks(captured),
        "verbs": steps(("piped: Microbatch(8), a stage on each device, the order of 1F1B", ordered)),
        "rewrites": steps(("halves", kept), ("thrifty: Recompute() of layers.1", saving)),
        "materialization": materialization(plain),
        "certificate": certificate(plain),
    }


def main() -> None:
    for name, drawn in pictures().items():
        (Path(__file__).parent / "images" / f"concept_{name}.svg").write_text(drawn)


if __name__ == "__main__":
    main()
