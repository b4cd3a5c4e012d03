"""`superscaler validate MODEL DIR`: a plan directory against the module, where its hashes were made anew."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from superscaler.store.folder import digest
from superscaler.store.plan_head import PlanHead
from superscaler.store.tensor_file import tensor_hashes
from tests.helpers.commands import answer, run

SOURCE = """
import torch
import superscaler as ss
from torch import nn


@ss.register("b.. h, h -> b.. h")
def gated(x, weight):
    return x * torch.sigmoid(weight) * 1.5


class Cubes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(6, 8), nn.Parameter(torch.rand(8)), nn.Linear(8, 4)

    def forward(self, x, labels):
        h = gated(self.first(x), self.gate)
        return nn.functional.cross_entropy(self.last(nn.functional.dropout(h.pow(3), 0.25)), labels)


def build():
    torch.manual_seed(3)
    return Cubes(), (torch.randn(8, 6), torch.arange(8) % 4)
"""
PLANS = {"data": "data_parallel", "classes": "tensor_parallel"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model and its plans, one of which computes the loss in other steps."""
    found = tmp_path_factory.mktemp("against")
    (found / "cubes.py").write_text(SOURCE)
    for name, plan in PLANS.items():
        model = f"{found / 'cubes.py'}:build"
        assert run("compile", model, "--plan", plan, "--cluster", "local:2", "--out", found / name) == 0
    return found


def renewed(directory: Path) -> None:
    """Write the hashes of a plan directory anew."""
    plan = json.loads((directory / "plan.json").read_text())
    kept = plan["manifest"]
    kept["files"] = {name: digest((directory / name).read_bytes()) for name in kept["files"]}
    kept["header"], kept["tensors"] = tensor_hashes(directory / "initial.safetensors", "")
    (directory / "plan.json").write_text(json.dumps(PlanHead.signed(plan)))


def text(old: str, new: str, *files: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        for file in (file for name in files for file in directory.glob(name)):
            after, count = re.subn(old, new, file.read_text(), flags=re.MULTILINE)
            assert count, file
            file.write_text(after)

    return change


def doubled(directory: Path) -> None:
    file = directory / "initial.safetensors"
    save_file({name: 2 * x for name, x in load_file(file).items()}, file)


def other_kernel(directory: Path) -> None:
    plan = json.loads((directory / "plan.json").read_text())
    plan["operators"]["ss_cubes.gated.default"]["sha256"] = "0" * 64
    (directory / "plan.json").write_text(json.dumps(plan))


BOTH, COMPILED = ("model.txt", "segments.py"), "compiled_segments.py"
EDITS = {
    "weights doubled": ("data", doubled, r"first\.bias\[0\] is \S+ in initial\.safetensors, but \S+ in the module"),
    "exponent": ("classes", text(r"(pow.*), 3\)", r"\1, 2)", *BOTH), r"op pow_1 is .* 2\).* in model.txt, but .* 3\)"),
    "dropout": (
        "classes",
        text(r"(dropout.*)0\.25", r"\g<1>0.5", *BOTH, COMPILED),
        r"op native_dropout is .*0\.5.* but .*0\.25",
    ),
    "kernel": (
        "classes",
        other_kernel,
        r"ss_cubes\.gated\.default .*sha256 0{12} .*cubes\.py.* in the plan, but sha256",
    ),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_with_new_hashes_holds_alone_but_not_beside_the_model(
    edit: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, change, says = EDITS[edit]
    model, directory = f"{folder / 'cubes.py'}:build", tmp_path / "plan"
    shutil.copytree(folder / plan, directory)
    change(directory)
    assert run("validate", directory) == 2
    renewed(directory)
    assert run("validate", directory) == 0
    capsys.readouterr()
    assert run("validate", model, directory) == 1
    told = capsys.readouterr().out
    assert re.search(says, told), told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_is_that_of_its_model(plan: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{folder / 'cubes.py'}:build"
    found, _ = answer(capsys, "validate", model, folder / plan)
    assert found["equal"]
    assert found["rewritten"] == (plan == "classes")
    assert found["weights"] >= 5
    assert run("validate", model, folder / plan, "--lr", "0.5") == 1
    assert "0.001" in capsys.readouterr().out


def test_other_steps_are_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of a loss that are no longer its steps have no line to be compared with."""
    directory = tmp_path / "plan"
    shutil.copytree(folder / "classes", directory)
    text(r"ignore_index=-100", "ignore_index=1", "model.txt")(directory)
    text(r"(row_losses[^)]*)-100", r"\g<1>1", "segments.py")(directory)
    renewed(directory)
    assert run("validate", directory) == 0
    assert run("validate", f"{folder / 'cubes.py'}:build", directory) == 1
    assert "cross_entropy_loss of the plan is off by" in capsys.readouterr().out
