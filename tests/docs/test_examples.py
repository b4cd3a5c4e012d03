"""`superscaler examples`: what it writes runs, and the picture of a plan shows the plan."""

from __future__ import annotations

import copy
import json
import re
import runpy
import subprocess
import sys
from functools import cache
from html import escape
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import superscaler as ss
from superscaler.examples import multimodal
from superscaler.ir.program import Load
from superscaler.runtime.step import Step
from tests.helpers.commands import run
from tests.helpers.graphs import graph_of
from tests.helpers.ran import captured, equal, on_ranks

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


@cache
def multimodal_graph() -> ss.Graph:
    return captured(multimodal.build, 1e-3, torch.optim.AdamW)


@pytest.mark.slow
def test_images_and_words_on_two_grids_equal_the_model() -> None:
    equal(multimodal_graph(), multimodal.two_grids, 4)


def test_the_page_shows_the_plan_of_two_grids() -> None:
    page = (ROOT / "docs" / "plans.md").read_text()
    shown = page.partition("<!-- from superscaler/examples/multimodal.py -->\n```python\n")[2].partition("```")[0]
    code = Path(multimodal.__file__).read_text().partition("@ss.sprogram")
    own = "".join(code[1:]).partition("\n\n\ndef")[0].splitlines()
    assert shown.splitlines() == [line for line in own if '"""' not in line]


@pytest.mark.slow
def test_an_encoder_on_all_devices_is_predicted_faster_than_one_in_the_first_stage() -> None:
    plans = (multimodal.two_grids, "hybrid:tp=2,pp=2,microbatches=4")
    own, usual = (ss.compile(multimodal_graph(), plan, "a100:1x4").simulate() for plan in plans)
    assert own.step_seconds < 0.8 * usual.step_seconds


def test_images_and_words_train_on_four_ranks_as_on_one() -> None:
    plan = ss.compile(multimodal_graph(), multimodal.two_grids, "a100:1x4")
    loads = [
        [i.box[0] for i in device.instructions if isinstance(i, Load) and i.tensor == "images"]
        for device in plan.compiled.program.devices
    ]
    assert loads == [[(0, 2)], [(2, 4)], [(4, 6)], [(6, 8)]]

    def train(step: Step) -> tuple[list[float], list[int]]:
        batches = DataLoader(multimodal.rows(), batch_size=8)
        losses = [float(step(batch)) for _, batch in zip(range(3), batches, strict=False)]
        return losses, [w.numel() * w.element_size() for w in step.state.weights.values()]

    losses, held = zip(*on_ranks(plan, train), strict=True)
    torch.manual_seed(0)
    module, _ = multimodal.build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    for k, batch in zip(range(3), DataLoader(multimodal.rows(), batch_size=8), strict=False):
        loss = module(**batch)
        assert [own[k] for own in losses] == pytest.approx([loss.item()] * 4, rel=1e-5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # A GPU's allocator gives multiples of 512 bytes.
    held_bytes = [sum(-(-each // 512) * 512 for each in own) for own in held]
    assert held_bytes == [each.memory["weights"] for each in plan.simulate().devices]


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


@pytest.mark.slow
def test_the_pictures_of_concepts_are_those_of_their_plans() -> None:
    for name, drawn in runpy.run_path(str(ROOT / "docs" / "concepts.py"))["pictures"]().items():
        assert (ROOT / "docs" / "images" / f"concept_{name}.svg").read_text() == drawn, "python docs/concepts.py"
