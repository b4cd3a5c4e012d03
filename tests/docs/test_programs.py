"""The page for programs that write plans: its judgement of plans that are right, refused, late, or no plan at all."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import run

PAGE = (Path(__file__).parents[2] / "docs" / "programs.md").read_text()
PLANS = """
import superscaler as ss

def right(graph, cluster):
    ss.op_trans(graph, graph.forward_ops, ss.Split("batch", 2, axis="dp"))
    ss.op_assign(graph, graph.ops, cluster.mesh(dp=2))

def late(graph, cluster):
    ss.op_trans(graph, graph.forward_ops, ss.Stale(1))
    ss.op_assign(graph, graph.ops, cluster.devices[0])

def cycle(graph, cluster):
    right(graph, cluster)
    a, b = (graph.select(ops=[graph.updates[name]], kind="C") for name in ("layers.0.weight", "head.weight"))
    ss.op_order(graph, a, b)
    ss.op_order(graph, b, a)

def uneven(graph, cluster):
    ss.op_trans(graph, graph.forward_ops, ss.Split("batch", 3, axis="dp"))

def ends(graph, cluster):
    raise SystemExit(0)
"""


@pytest.mark.parametrize(
    ("plan", "code", "kind", "is_accepted"),
    [
        ("right", 0, None, True),
        ("late", 0, None, False),
        ("cycle", 1, "ScheduleError", False),
        ("uneven", 2, "TransformError", False),
        ("ends", 2, "InputError", False),
        ("missing", 2, "InputError", False),
    ],
)
def test_plans_are_judged_as_the_page_says(
    plan: str, code: int, kind: str | None, is_accepted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (function,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(function, names)
    (tmp_path / "mine.py").write_text(PLANS)
    assert run("verify", "mlp", "--plan", f"{tmp_path / 'mine.py'}:{plan}", "--cluster", "local:2", "--json") == code
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found.get("kind") == kind
    assert names["accepts"](code, out) is is_accepted
    if kind is not None:
        assert f"error: {found['error']}\n" in err


def test_no_answer_is_no_acceptance() -> None:
    (function,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec(function, names)
    assert not names["accepts"](0, "")
    assert not names["accepts"](124, "")
