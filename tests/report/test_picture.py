"""The picture of a plan's paths: an SVG that shows every device of every layout and every step, and nothing else."""

from __future__ import annotations

import errno
import functools
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import superscaler as ss
from superscaler.ir.layout import Layout
from superscaler.plan import Plan
from superscaler.report.picture import draw_paths
from superscaler.specs.sizes import duration, size
from tests.helpers.commands import run

SVG = "{http://www.w3.org/2000/svg}"


class Product(torch.nn.Module):
    """A product whose result is far larger than what it is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(48, 8192, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().sum()


@functools.cache
def graph() -> ss.Graph:
    optimizer = torch.optim.SGD((m := Product()).parameters(), lr=1e-2)
    return ss.capture(m, (torch.randn(8192, 48),), optimizer=optimizer, check=False)


def plan_of(before: list[int], after: list[int], cut: str) -> Plan:
    """The product is cut on its contraction or its batch over devices `before`; the rest has copies on `after`."""

    @ss.sprogram
    def plan(graph: ss.Graph, cluster: ss.Cluster) -> None:
        for op in graph.forward_ops:
            is_first = op.module == "first" and op.target != "aten.t.default"
            factor = next((i.factor for i in op.indices if i.mark == cut), "batch")
            algorithm = ss.Split(factor, len(before)) if is_first else ss.Replicate(len(after))
            ss.op_assign(graph, ss.op_trans(graph, op, algorithm), before if is_first else after)

    return ss.compile(graph(), plan, "v100:2x4")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_of([0, 1, 2, 3], [4, 5, 6, 7], "summed")


def texts(root: ElementTree.Element) -> list[str]:
    return [e.text or "" for e in root.iter(SVG + "text")]


def test_every_device_and_every_step_is_drawn(plan: Plan, tmp_path: Path) -> None:
    plan.draw(tmp_path / "paths.svg")
    root = ElementTree.parse(tmp_path / "paths.svg").getroot()
    timeline, *drawn = root.findall(SVG + "g")
    assert {"devices 0 to 3", "devices 4 to 7", "backward"} <= set(texts(timeline))
    paths = plan._account["paths"]
    assert len(drawn) == len(paths) >= 1
    assert [s["kind"] for s in paths[0]["steps"]] == ["reduce_scatter", "move", "all_gather"]
    for path, group in zip(paths, drawn, strict=True):
        found, expected = texts(group), list[str]()
        for step in [None, *path["steps"]]:
            layout = Layout.parse((step or path)["layout"])
            if step is not None:
                count = len(step["groups"])
                groups = f"{count} group{'s' if count > 1 else ''}"
                expected += [step["kind"], f"{groups}, {size(step['moved'])}", duration(step["seconds"])]
            plus = "+" if layout.shape[1] > 1 else ""
            expected.append(str(layout).split(" @ ")[0])
            expected += [f"{device}{plus}" for device in layout.devices.reshape(-1).tolist()]
        assert sorted(found[1:]) == sorted(expected)
    assert sum(len(list(path.iter(SVG + "line"))) for path in drawn) == sum(len(path["steps"]) for path in paths)


def test_equal_parts_have_equal_colours_and_cells_do_not_overlap(plan: Plan) -> None:
    found = {"paths": [{**plan._account["paths"][0], "layout": "R(2)V(2)D(2,3) @ " + json.dumps(list(range(24)))}]}
    group = ElementTree.fromstring(draw_paths(found)).findall(SVG + "g")[0]
    cells = [c for c in group.findall(SVG + "g") if c.find(SVG + "rect") is not None][:24]
    fill, where = {}, set()
    for cell in cells:
        rect = cell.find(SVG + "rect")
        assert rect is not None
        fill[int((cell.findtext(SVG + "text") or "").rstrip("+"))] = rect.get("fill")
        where.add((rect.get("x"), rect.get("y")))
    assert len(where) == 24
    assert all(fill[device] == fill[device + 12] for device in range(12))
    assert len({fill[device] for device in range(12)}) == 12


def test_the_steps_move_what_the_plan_says(plan: Plan) -> None:
    for made in (plan, plan_of([0, 1, 2, 3], [2, 3, 4, 5], "batch"), plan_of([0, 1, 2], [3, 4, 5, 6], "summed")):
        told = sum(s["moved"] * path["count"] for path in made._account["paths"] for s in path["steps"])
        several = [m for m in made.compiled.moves if m.reason.startswith("step ")]
        assert told == sum(move.moved for move in several)


def test_the_command_draws_what_the_plan_draws(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, file = tmp_path / "plan", tmp_path / "b.svg"
    plan.save(directory, evaluation=False)
    assert run("explain", str(directory), "--svg", str(file)) == 0
    assert capsys.readouterr().out == (
        f"the predicted step and {len(plan._account['paths'])} exchanges of several steps drawn in {file}\n"
    )
    plan.draw(tmp_path / "a.svg")
    assert file.read_bytes() == (tmp_path / "a.svg").read_bytes()


def test_wrong_input_is_one_message(plan: Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan.save(tmp_path / "plan", evaluation=False)
    for directory, file, message in (
        ("plan", "missing/a.svg", "name a file in a folder that exists"),
        ("plan", "plan", "name a file in a folder that exists"),
        ("missing", "a.svg", "is not a plan directory"),
        ("plan", "plan/plan.json", "is there and is no drawing of a plan"),
    ):
        assert run("explain", str(tmp_path / directory), "--svg", str(tmp_path / file)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("error: ")
        assert message in err
        assert len(err.splitlines()) == 1
    assert not (tmp_path / "a.svg").exists()


def test_a_full_disk_leaves_the_older_picture(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan.save(tmp_path / "plan", evaluation=False)
    plan.draw(tmp_path / "a.svg")
    before = (tmp_path / "a.svg").read_bytes()

    def full(file: Path, data: bytes) -> None:
        file.write_text(data.decode()[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    assert run("explain", str(tmp_path / "plan"), "--svg", str(tmp_path / "a.svg")) == 2
    assert "a.svg cannot be written: No space left on device; name a file" in capsys.readouterr().err
    assert (tmp_path / "a.svg").read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.svg", "plan"]
