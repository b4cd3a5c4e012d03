"""Damaged plan directories are refused by all who read them, in one line that names the file; nothing is lost."""

from __future__ import annotations

import copy
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import superscaler as ss
from superscaler.errors import InputError
from superscaler.report.schema import Account
from superscaler.store.folder import Head, check_types, digest
from superscaler.store.plan_head import PlanHead
from tests.faults.damaged import CODE, DAMAGES, EVERY, FILES, at, misfits, put, sealed, text
from tests.helpers.commands import run

MLP = "mlp:layers=1,hidden=4,inputs=4,classes=4,batch=4"
ONE = ["--plan", "single", "--cluster", "local:1"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "plan"
    assert run("compile", MLP, *ONE, "--out", str(folder)) == 0
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "plan"))


def contents(folder: Path) -> dict[str, object]:
    return {str(f): f.read_bytes() if f.is_file() else f.lstat().st_mode for f in folder.rglob("*")}


def test_the_table_has_all_files_of_a_plan(saved: Path) -> None:
    assert {file.name for file in saved.iterdir()} == set(FILES)
    assert len(DAMAGES) > 100


def refusal(reader: str, folder: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the line with which a reader refuses a directory."""
    if reader == "load":
        with pytest.raises(InputError) as error:
            ss.load(folder)
        return str(error.value)
    capsys.readouterr()
    given = {"explain": [folder], "validate": [folder], "diff": [saved, folder]}[reader]
    code = run(reader, *map(str, given))
    out, err = capsys.readouterr()
    assert out == ""
    # A program that does not hold is code 1.
    assert code in ((1, 2) if reader == "validate" else (2,))
    assert err.startswith("error: ")
    return err.removeprefix("error: ").removesuffix("\n")


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused(name: str, folder: Path, saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One reader is asked about each damage, all of them about some: they read by the same functions."""
    damage, number = DAMAGES[name], list(DAMAGES).index(name)
    damage.change(folder)
    before = contents(folder)
    for reader in damage.readers if number % 20 == 0 else damage.readers[number % len(damage.readers) :][:1]:
        told = refusal(reader, folder, saved, capsys)
        assert len(told.splitlines()) == 1, told
        assert str(folder) in told
        assert len(told) < 1000
        if reader != "validate":
            assert damage.told in told
    assert contents(folder) == before


def test_what_may_not_be_read_is_one_line(
    folder: Path, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(file: Path, *given: Any, **more: Any) -> Any:
        if file == folder / "program_0.py":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return opened(file, *given, **more)

    opened = Path.open
    monkeypatch.setattr(Path, "open", denied)
    for reader in ("explain", "diff", "validate", "load"):
        told = refusal(reader, folder, saved, capsys)
        assert told.startswith(f"{folder}/program_0.py cannot be read: Permission denied; write it again")


@pytest.mark.parametrize(("file", "types", "some"), [("plan.json", PlanHead, 80), ("explain.json", Account, 70)])
def test_a_value_of_another_type_is_refused(file: str, types: type[Head], some: int, saved: Path) -> None:
    found = json.loads((saved / file).read_text())
    places = list(misfits(found))[1:]
    assert len(places) > some
    for way, other in places:
        *parents, last = way
        changed = copy.deepcopy(found)
        at(changed, parents)[last] = other
        with pytest.raises(InputError, match=rf"{file} is damaged \({re.escape(', '.join(map(str, parents or way)))}"):
            check_types(saved / file, json.dumps(changed).encode(), types)


def sealed_with(folder: Path, name: str, text: str) -> None:
    """Replace a file, and the hashes in plan.json with it, as one who knows how could."""
    (folder / name).write_text(text)
    sealed(lambda plan: plan["manifest"]["files"].update({name: digest(text)}))(folder)


@pytest.mark.parametrize("is_sealed", [True, False])
def test_looking_at_a_directory_runs_nothing_of_it(
    is_sealed: bool, folder: Path, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    hostile = f"open({str(mark)!r}, 'w')\n"
    for name in (*CODE, "run.py"):
        if is_sealed:
            sealed_with(folder, name, hostile)
        else:
            (folder / name).write_text(hostile)
    for name in ("sitecustomize.py", "torch.py", "json.py", "superscaler.py"):
        (folder / name).write_text(hostile)
    looks = [["explain"], ["diff", str(saved)], ["validate"], ["validate", "--no-manifest"], ["checkpoint", "inspect"]]
    for look in looks:
        is_fine = is_sealed and look[0] in ("explain", "diff")
        assert run(*look, str(folder)) == (0 if is_fine else 2), look
    assert run("compile", MLP, *ONE, "--out", str(folder)) == 0
    capsys.readouterr()
    assert not mark.exists()


@pytest.mark.parametrize("turn", range(4))
def test_compiling_again_repairs_a_damaged_directory(turn: int, folder: Path, saved: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    for number, file in enumerate(FILES[1:], turn):
        EVERY[("missing", "cut short", "a link to itself", "a pipe")[number % 4]][0](folder / file)
    assert run("compile", MLP, *ONE, "--out", str(folder)) == 0
    assert (folder / "notes.txt").read_text() == "mine"
    (folder / "notes.txt").unlink()
    assert {k.removeprefix(str(folder)): v for k, v in contents(folder).items()} == {
        k.removeprefix(str(saved)): v for k, v in contents(saved).items()
    }


def test_edited_code_runs_where_hashes_are_left_out_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "segments.py"
    file.write_text(file.read_text() + "print('edited')\n")
    with pytest.raises(InputError, match=r"segments.py is not what compile wrote there; .* manifest=False"):
        ss.load(folder)
    assert "edited" not in capsys.readouterr().out
    step = ss.load(folder, manifest=False)
    step({"x": torch.ones(4, 4), "labels": torch.zeros(4, dtype=torch.int64)})
    assert "edited" in capsys.readouterr().out


# What is wrong without hashes is told, too.
UNSEALED = {
    "no Python": (text("program_0.py", lambda t: t + "def (\n"), r"program_0.py:\d+ cannot be run: SyntaxError"),
    "another shape": (DAMAGES["weights: another shape"].change, r"head.bias as float32 \(1, 4\), but the plan as"),
    "a weight left out": (DAMAGES["weights: one left out"].change, "is damaged"),
    "an unknown tensor": (put("devices/0/weights/0/tensor", "nothing"), "is damaged"),
    "a group too many": (put("devices/0/weights/0/group", 7), r"plan.json cannot be run: IndexError"),
    "a rate of text": (put("optimizer/groups/0/lr", "fast"), "cannot be run"),
    "no step": (text("program_0.py", lambda t: t.replace("def step", "def steps")), "cannot be run: AttributeError"),
}


@pytest.mark.parametrize("name", UNSEALED)
def test_an_edit_that_cannot_run_is_one_line(name: str, folder: Path) -> None:
    change, told = UNSEALED[name]
    change(folder)
    with pytest.raises(InputError, match=told) as error:
        ss.load(folder, manifest=False)
    assert len(str(error.value).splitlines()) == 1


def test_another_torch_is_told(folder: Path) -> None:
    put("manifest/torch", "2.11.0")(folder)
    told = f"{folder} was compiled by torch 2.11.0, not {torch.__version__}; write it again"
    with pytest.warns(UserWarning, match=re.escape(told)):
        ss.load(folder)


@pytest.mark.dist
def test_ranks_under_torchrun_refuse_damage_in_one_line(folder: Path, tmp_path: Path) -> None:
    (folder / "segments.py").write_text("")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", str(folder / "run.py")]
    known = {**os.environ, "PYTHONPATH": str(Path(ss.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=known, check=False)
    assert done.returncode != 0
    assert f"error: {folder}/segments.py is not what compile wrote there; write it again" in done.stderr
    # What torchrun itself prints has its own frames only.
    assert "superscaler/" not in done.stderr.replace(str(folder), "")
