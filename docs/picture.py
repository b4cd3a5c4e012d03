"""Draws docs/pipeline.svg: a plan of eight lines, and beside it the simulated step of GPT-2 on four devices.

python docs/picture.py
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from html import escape
from pathlib import Path

import torch

import superscaler as ss
from superscaler.examples.plans import piped
from superscaler.ir.program import Backward, Forward
from superscaler.models import build
from superscaler.simulate.predict import simulate
from superscaler.simulate.timetable import COMPUTE

MODEL = "gpt2:layers=8,hidden=1024,heads=16,seq=1024,vocab=2048,batch=32,dropout=0,device=meta"
COLORS = {Forward: "#4c8bf5", Backward: "#f5a04c"}
NAMES = {Forward: "forward of a microbatch", Backward: "backward"}
LEFT, WIDTH, ROW, TOP = 690, 500, 36, 34


def code() -> list[str]:
    """Return the lines of the plan, without its docstring."""
    return [line for line in inspect.getsource(piped).splitlines() if '"""' not in line]


def bars(plan: ss.Plan) -> Iterator[tuple[int, float, float, type, int]]:
    """Yield device, start, end, kind and microbatch of what devices compute; times as shares of the step."""
    table = simulate(plan.compiled.program, plan.compiled.cluster).table
    for lane in table.lanes:
        for n, at in enumerate(lane.instruction.tolist()):
            kind = type(lane.code[at])
            if lane.stream[n] == COMPUTE and kind in COLORS:
                for column, device in enumerate(lane.devices.tolist()):
                    start, end = (float(times[n, min(column, times.shape[1] - 1)]) for times in (lane.start, lane.end))
                    yield device, start / table.seconds, end / table.seconds, kind, int(lane.microbatch[n])


def draw(plan: ss.Plan) -> str:
    """Return the picture as SVG."""
    lines, height = code(), TOP + 4 * ROW + 30
    found = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 20}" height="{height}" font-size="13">']
    found.append('<rect width="100%" height="100%" fill="white"/>')
    for n, line in enumerate(lines):
        place = f'x="16" y="{TOP + 20 * n}" font-family="monospace" font-size="12" xml:space="preserve"'
        found.append(f"<text {place}>{escape(line)}</text>")
    for device in range(4):
        y = TOP + ROW * device
        found.append(f'<text x="{LEFT - 62}" y="{y + 4}" font-family="sans-serif">device {device}</text>')
        found.append(f'<rect x="{LEFT}" y="{y - 12}" width="{WIDTH}" height="24" fill="#eeeeee"/>')
    for device, start, end, kind, microbatch in bars(plan):
        x, width, y = LEFT + start * WIDTH, (end - start) * WIDTH, TOP + ROW * device
        tip = f"<title>{NAMES[kind]}{f' {microbatch}' if microbatch >= 0 else ''}</title>"
        box = f'x="{x:.1f}" y="{y - 12}" width="{width:.1f}" height="24" fill="{COLORS[kind]}" stroke="white"'
        found.append(f"<g>{tip}<rect {box}/>")
        if width > 11 and microbatch >= 0:
            where = f'x="{x + width / 2:.1f}" y="{y + 4}" font-size="10" text-anchor="middle"'
            found.append(f'<text {where} font-family="sans-serif" fill="white">{microbatch}</text>')
        found.append("</g>")
    x, y = LEFT, TOP + 4 * ROW + 16
    for kind, color in COLORS.items():
        found.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{color}"/>')
        found.append(f'<text x="{x + 18}" y="{y}" font-family="sans-serif">{NAMES[kind]}</text>')
        x += 60 + 7 * len(NAMES[kind])
    return "\n".join([*found, "</svg>", ""])


def main() -> None:
    built = build(MODEL)
    graph = ss.capture(built.module, built.args, built.kwargs, torch.optim.AdamW(built.module.parameters()))
    plan = ss.compile(graph, piped, "a100:1x4")
    Path(__file__).with_name("pipeline.svg").write_text(draw(plan))


if __name__ == "__main__":
    main()
