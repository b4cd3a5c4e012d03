"""`superscaler examples`: what it writes runs, and the picture of a plan shows the plan."""

from __future__ import annotations

import copy
import json
import re
import runpy
import subprocess
import sys
from html import escape
from pathlib import Path

import pytest

from tests.helpers.commands import run
from tests.helpers.graphs import graph_of
from tests.helpers.ran import equal

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("examples")
    assert run("examples", str(found)) == 0
    return found


@pytest.mark.parametrize("plan", ["data_parallel", "piped", "half"])
def test_a_plan_equals_the_model(folder: Path, plan: str) -> None:
    equal(graph_of("gpt2:size=tiny"), f"{folder / 'plans.py'}:{plan}")


def test_the_plan_in_the_readme_equals_the_model(tmp_path: Path) -> None:
    code = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "mine.py").write_text(code)
    equal(graph_of("gpt2:size=tiny"), f"{tmp_path / 'mine.py'}:half")


def test_the_model_is_captured(folder: Path) -> None:
    assert run("validate", f"{folder / 'model.py'}:build", "--plan", "tensor_parallel", "--cluster", "local:2") == 0


@pytest.mark.dist
def test_the_loop_trains(folder: Path) -> None:
    for command in (["loop.py"], ["-m", "torch.distributed.run", "--nproc-per-node", "2", "loop.py"]):
        done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3


@pytest.mark.slow
@pytest.mark.dist
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Its cells run one after the other; those that print have their outputs in the file."""
    kept = json.loads((ROOT / "docs" / "session.ipynb").read_text())
    made = runpy.run_path(str(ROOT / "docs" / "notebook.py"))["run"](copy.deepcopy(kept), tmp_path)
    shown = [["".join(out["text"]) for cell in x["cells"] for out in cell.get("outputs", [])] for x in (made, kept)]
    assert list(map(len, shown)) == [6, 6]
    assert (tmp_path / "plan.html").is_file()
    losses = [float(re.findall(r"loss\D*(\d\.\d+)", text)[-1]) for text in shown[0][-2:]]
    assert max(losses) < 1


def test_files_that_are_there_stay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("examples", str(folder)) == 2
    assert "loop.py exists, and would be replaced; name another folder" in capsys.readouterr().err


def test_the_picture_shows_the_plan_of_the_examples(folder: Path) -> None:
    picture = (ROOT / "docs" / "pipeline.svg").read_text()
    code = (folder / "plans.py").read_text().split("@ss.sprogram\n")[2].strip()
    lines = [line for line in code.splitlines() if '"""' not in line]
    assert len(lines) == 7
    assert all(f">{escape(line)}</text>" in picture for line in lines)


def test_the_pictures_of_concepts_are_those_of_their_plans() -> None:
    for name, drawn in runpy.run_path(str(ROOT / "docs" / "concepts.py"))["pictures"]().items():
        assert (ROOT / "docs" / "images" / f"concept_{name}.svg").read_text() == drawn, "python docs/concepts.py"
