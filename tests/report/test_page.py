"""The page about a plan, in a real browser: it shows the program that was simulated, and asks for nothing."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import superscaler as ss
from superscaler.ir.program import Forward
from superscaler.report import trace
from superscaler.report.kinds import Kind
from superscaler.report.page import write as page
from superscaler.report.page.matrix import bytes_between
from superscaler.report.page.memory_curve import curves
from superscaler.report.pixels import WIDTH, drawing
from superscaler.report.subject import Subject
from superscaler.report.timeline import Lane, Timeline
from tests.helpers.commands import run
from tests.helpers.graphs import graph_of, step_of
from tests.report.browser import event, opened, settled

GPT, MLP = "gpt2:size=tiny,layers=4", "mlp:layers=4,batch=8"
HOSTILE = "<script>hacked=1</script>"


class Named(nn.Module):
    """A module with the name of a tag."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module(HOSTILE, nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, HOSTILE)(x).square().mean()


@functools.cache
def plan() -> ss.Plan:
    return ss.compile(graph_of(GPT), "pipeline_1f1b:stages=4,microbatches=4", "a100:1x4")


def middle_of(subject: Subject, device: int, microbatch: int) -> tuple[float, str]:
    """Return the middle of a forward in the timetable, and its time in words of the page."""
    lane = next(lane for lane in subject.simulation.table.lanes if device in lane.devices)
    works = [
        (float(lane.start[n, 0]), float(lane.end[n, 0]))
        for n, at in enumerate(lane.instruction.tolist())
        if isinstance(i := lane.code[at], Forward) and i.task.microbatch == microbatch and lane.waited[n] < 0
    ]
    start, end = max(works, key=lambda work: work[1] - work[0])
    return (
        start + end
    ) / 2, f"{(end - start) * 1e6:#.4g} us" if end - start < 1e-3 else f"{(end - start) * 1e3:#.4g} ms"


def test_a_page_shows_the_plan_and_asks_for_nothing(tmp_path: Path) -> None:
    first, file = plan()._subject, tmp_path / "plan.html"
    named = ss.compile(step_of(Named(), torch.randn(4, 8)), "data_parallel", "a100:1x2")._subject
    page.save([first, replace(named, title=HOSTILE)], file)
    text = file.read_text()
    assert _without_data(text) < 100_000
    with opened(file, color_scheme="dark") as shown:
        assert shown.evaluate("document.documentElement.dataset.theme") == "dark"
        assert shown.evaluate("window.hacked") is None
        assert HOSTILE in shown.inner_text("h1")
        assert f"{HOSTILE} 2" in " ".join(shown.inner_text("body").split())
        time, words = middle_of(first, 2, 3)
        for _ in range(2):
            shown.mouse.move(*event(shown, "device 2", time))
            lines = shown.inner_text("#hover").splitlines()
            assert lines[0] == "forward of transformer.h.2"
            assert lines[1].startswith(f"forward · microbatch 3 · {words}, from ")
            stage = next(line for line in lines if "op_trans Stage(2, 'pipeline')" in line)
            assert stage.startswith("plan: ")
            assert "place_table.py:" in stage
            # Nearer, as long as it is in sight.
            shown.mouse.click(*event(shown, "device 2", time))
            shown.keyboard.press("Enter")
            settled(shown)
        assert shown.inner_text("#chosen").splitlines()[0] == lines[0]
        # The wait before the backward of stage 2 goes back to the message of stage 3.
        chosen = """() => {
            const t = report.timeline, lane = t.lanes.find((l) => l.compute && l.name === "device 2");
            const columns = lane.track.columns, own = [...Array(lane.count).keys()].map((n) => n + lane.first);
            const k = own.find((n) => columns.kind[n] === 9 && t.detail({ lane, k: n }).title.includes("gradients"));
            return t.lines({ lane, k });
        }"""
        assert "waited for: send gradients of add_15 on device 3" in "\n".join(shown.evaluate(chosen))
        shown.keyboard.press("w")
        settled(shown)
        t0, t1 = shown.evaluate("[report.view.t0, report.view.t1]")
        assert t0 < time < t1
        assert t1 - t0 < 0.5 * first.simulation.table.seconds
        shown.keyboard.press("0")
        settled(shown)
        # Stages of a pipeline are equal but for their devices.
        row = shown.locator("tr:has-text('transformer.h.0 to transformer.h.2 (3 equal)')").first.inner_text()
        assert "0 to 2, 1 each" in row


def _without_data(page: str) -> int:
    """Return the length of a page without its data: words, tables, style and script."""
    start = page.index('id="data">')
    return len(page) - (page.index("</script>", start) - start)


def test_what_a_report_draws_is_what_was_simulated(tmp_path: Path) -> None:
    subject = plan()._subject
    own, table = subject.timelines[0], subject.simulation.table
    for device in range(4):
        lane = next(lane for lane in own.lanes if lane.is_compute and device in lane.devices)
        length = lane.end - lane.start
        waits = length[np.isin(lane.kind, [Kind.BUBBLE, Kind.END])].sum()
        assert waits == pytest.approx(table.bubble[device], abs=1e-8)
        assert length[lane.kind == Kind.EXPOSED].sum() == pytest.approx(table.exposed[device], abs=1e-8)
        assert length.sum() == pytest.approx(own.seconds, rel=1e-6)
    moved, _ = bytes_between(plan().compiled.program)
    assert moved.sum() == plan().counts["bytes_moved"]
    for curve in curves(subject):
        assert curve.during.max() == curve.memory.peak
    text = drawing(own, subject.details).splitlines()
    rows = [line.partition("  device ")[2] for line in text[1:5]]
    assert [len(row) for row in rows] == [WIDTH + 3 + 4] * 4
    waits = own.seconds - table.compute[0] - table.optimizer[0] - table.launch[0]
    assert rows[0].endswith(f" {waits / own.seconds:.0%}")
    assert rows[0].index("F0") < rows[1].index("F0") < rows[3].index("F0") < rows[3].index("B0") < rows[0].index("B0")
    trace.save([subject], tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    works = [e for e in found if e["ph"] == "X"]
    assert len(works) == len(own)
    assert max(e["ts"] + e["dur"] for e in works) == pytest.approx(own.seconds * 1e6)
    assert len({e["pid"] for e in works}) == 4
    starts, ends = ({e["id"]: e for e in found if e["ph"] == kind} for kind in "sf")
    assert starts.keys() == ends.keys()
    # What Perfetto drops: a number that is none, an event that overlaps another of its lane, an arrow back in time.
    assert all(type(k) is int and starts[k]["ts"] <= ends[k]["ts"] for k in starts)
    for place in {(e["pid"], e["tid"]) for e in works}:
        own = sorted(
            (round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in works if (e["pid"], e["tid"]) == place
        )
        assert all(a[1] <= b[0] for a, b in pairwise(own))
    between = [(starts[k]["pid"], ends[k]["pid"]) for k in starts if starts[k]["pid"] != ends[k]["pid"]]
    assert {(1, 2), (2, 3), (3, 4), (4, 3), (3, 2), (2, 1)} <= set(between)


def test_a_wait_names_the_device_that_came_late_and_the_lines_of_its_ops(tmp_path: Path) -> None:
    def uneven(graph: ss.Graph, cluster: ss.Cluster) -> None:
        for op in graph.forward_ops:
            ss.op_assign(graph, ss.op_trans(graph, op, ss.Split("batch", sizes=(9, 2999991))), [0, 1])

    # So many rows that the device is slower than its host.
    found = ss.compile(step_of(Named().to("meta"), torch.empty(3000000, 8, device="meta")), uneven, "a100:1x2")._subject
    early, late = (lane for lane in found.timelines[0].lanes if lane.is_compute)
    wait = np.flatnonzero((early.kind == Kind.BUBBLE) & (early.source >= 0))[0]
    at = early.source[wait] - late.first
    assert found.details.found[late.detail[at]].title.startswith("backward of ")
    assert late.end[at] <= early.end[wait] <= late.start[late.kind == Kind.UPDATE]
    for title in ("forward of ", "all_reduce of gradients of "):
        detail = next(d for d in found.details.found if d.title.startswith(title))
        assert any(
            "Split('batch', sizes=(9, 2999991))" in line and f"{Path(__file__).name}:" in line for line in detail.asked
        )


@pytest.mark.dist
def test_measured_steps_have_the_form_of_predicted_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, recorded = tmp_path / "plan", tmp_path / "run"
    given = ["train", MLP, "--plan", "pipeline_1f1b:microbatches=4", "--cluster", "local:2", "--steps", "3"]
    assert run(*given, "--profile", "3", "--run", recorded) == 2
    assert "--profile 3 of 3 steps" in capsys.readouterr().err
    assert run(*given, "--out", folder, "--profile", "2", "--run", recorded) == 0
    from superscaler.verify.plan_dir import subject_of

    subject = subject_of(folder, recorded)
    real, own = subject.timelines
    for a, b in zip(*([lane for lane in t.lanes if lane.is_compute] for t in (real, own)), strict=True):
        works = []
        for lane in (a, b):
            columns = zip(*(c.tolist() for c in (lane.kind, lane.detail, lane.microbatch)), strict=True)
            works.append([(k, d, m) for k, d, m in columns if k <= Kind.WEIGHTS and m >= 0])
        assert works[0] == works[1]
        assert len(works[0]) >= 8
        assert (a.end[:-1] <= a.start[1:] + 1e-6).all()
    total = sum(d.measured for d in subject.differences)
    assert total == pytest.approx(real.seconds, rel=1e-3)
    assert run("report", folder, "--run", recorded, "--out", tmp_path / "a.html", "--trace", tmp_path / "a.json") == 0
    text = (tmp_path / "a.html").read_text()
    assert "Predicted and measured" in text
    # Nothing is known about the memory of processes.
    assert "memory first" not in text
    other = tmp_path / "other"
    assert run("compile", MLP, "--plan", "data_parallel", "--cluster", "local:2", "--out", other) == 0
    assert run("report", other, "--run", recorded, "--out", tmp_path / "b.html") == 2
    assert "rank_0.json is of another plan" in capsys.readouterr().err


@pytest.mark.dist
@pytest.mark.slow
def test_a_compiled_step_is_shown_by_the_works_that_it_has(tmp_path: Path) -> None:
    folder, recorded = tmp_path / "plan", tmp_path / "run"
    given = ["train", "gpt2:size=tiny,layers=1,batch=2", "--plan", "single", "--cluster", "local:1", "--steps", "3"]
    assert run(*given, "--torch-compile", "--out", folder, "--profile", "2", "--run", recorded) == 0
    from superscaler.verify.plan_dir import subject_of

    for timeline in subject_of(folder, recorded).timelines:
        kinds = [k for lane in timeline.lanes if lane.is_compute for k in lane.kind.tolist()]
        assert [k for k in kinds if k in (Kind.FORWARD, Kind.BACKWARD)] == [Kind.FORWARD, Kind.BACKWARD]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "name", "cluster"),
    [
        (f"{GPT},batch=64", "pipeline_1f1b:stages=4,microbatches=64", "a100:1x4"),
        ("gpt3:layers=8,hidden=256,heads=8,seq=64,vocabulary=512,batch=64,device=meta", "1024", "a100:128x8"),
        (GPT, "zero:4,stage=3", "a100:1x4"),
        ("llama:size=tiny", "ring_attention", "a100:1x4"),
        (GPT, "co_shard:parts=2", "a100:1x2"),
    ],
)
def test_pages_of_all_sorts_of_plans_open(spec: str, name: str, cluster: str, tmp_path: Path) -> None:
    name = "hybrid:dp=16,tp=8,pp=8,microbatches=4" if name == "1024" else name
    made = ss.compile(graph_of(spec), name, cluster)
    made.report(tmp_path / "plan.html")
    own = made._subject.timelines[0]
    assert _without_data((tmp_path / "plan.html").read_text()) < 100_000
    with opened(tmp_path / "plan.html") as shown:
        lane = next(lane for lane in own.lanes if lane.is_compute)
        n = int((lane.end - lane.start).argmax())
        middle, label = float(lane.start[n] + lane.end[n]) / 2, shown.evaluate("report.timeline.lanes[0].name")
        shown.mouse.move(*event(shown, label, middle))
        known = made._subject.details.found[int(lane.detail[n])].title if lane.detail[n] >= 0 else "done"
        assert known in shown.inner_text("#hover").splitlines()[0]
        _zoom(shown, lane, made._subject, label)


def _zoom(shown: Any, lane: Lane, subject: Subject, label: str) -> None:
    """Go near to events of a lane, by the wheel and by keys: the pointer there finds these events."""
    own = np.flatnonzero((lane.kind <= Kind.WEIGHTS) & (lane.detail >= 0))
    for n in own[:: max(1, len(own) // 5)].tolist():
        start, end = float(lane.start[n]), float(lane.end[n])
        shown.evaluate("report.view.set(0, report.view.end)")
        settled(shown)
        shown.mouse.move(*event(shown, label, (start + end) / 2))
        shown.keyboard.down("Control")
        while shown.evaluate("report.timeline.scale") * (end - start) < 60:
            shown.mouse.move(*event(shown, label, (start + end) / 2))
            shown.mouse.wheel(0, -300)
            settled(shown)
        shown.keyboard.up("Control")
        shown.mouse.move(*event(shown, label, (start + end) / 2))
        lines = shown.inner_text("#hover").splitlines()
        assert lines[0] == subject.details.found[int(lane.detail[n])].title
        words = f"{(end - start) * 1e6:#.4g} us" if end - start < 1e-3 else f"{(end - start) * 1e3:#.4g} ms"
        assert words.split()[0].rstrip("0")[:4] in lines[1], (words, lines[1])


@pytest.mark.slow
def test_a_hundred_thousand_events_are_seen_within_a_second_and_pan_smoothly(tmp_path: Path) -> None:
    subject, (rows, each) = plan()._subject, (16, 6250)
    start = np.sort(np.random.default_rng(0).random((rows, each)), axis=1)
    end = np.minimum(start + 5e-5, np.append(start[:, 1:], np.ones((rows, 1)), axis=1))
    plain, none = np.arange(each) % 4, np.full(each, -1)
    lanes = [
        Lane((d,), "compute", True, d * each, start[d], end[d], plain, none, none, plain > 4, none) for d in range(rows)
    ]
    page.save([replace(subject, timelines=[Timeline("predicted", 1.0, lanes)])], tmp_path / "many.html")
    with opened(tmp_path / "many.html") as shown:
        first = float(shown.evaluate("document.body.dataset.ready"))
        frames = shown.evaluate(
            """() => new Promise((done) => {
                let count = 0;
                const start = performance.now();
                report.view.set(0.2, 0.6);
                const step = () => {
                    report.view.pan(count % 40 < 20 ? 0.01 : -0.01);
                    count += 1;
                    const ms = performance.now() - start;
                    ms < 2000 ? requestAnimationFrame(step) : done(count / ms * 1000);
                };
                requestAnimationFrame(step);
            })"""
        )
    print(f"\n{rows * each:,} events: first picture after {first:.0f} ms, {frames:.0f} frames a second")
    assert first < 1000
    assert frames > 30
