"""Malformed files of users, each refused with exit code 2 and one line; nothing is written and nothing is removed."""

from __future__ import annotations

from pathlib import Path

import pytest
from malformed import CLUSTERS, MODELS, PLANS, Case

from superscaler.cli.main import main

MLP = "mlp:layers=1,hidden=4,inputs=4,classes=4,batch=4"


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    """Return the one line with which a command refuses its arguments."""
    before = contents(folder)
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 2, err
    assert out == ""
    assert err.startswith("error: ")
    assert len(err.splitlines()) == 1, err
    assert len(err) < 1500
    assert contents(folder) == before
    return err


def contents(folder: Path) -> dict[str, bytes]:
    files = (file for file in folder.rglob("*") if file.is_file() and file.parent.name != "__pycache__")
    return {str(file): file.read_bytes() for file in files}


def written(folder: Path, name: str, text: str | bytes) -> Path:
    file = folder / name
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return file


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", PLANS.values(), ids=PLANS)
def test_a_plan(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "mine.py", case.text)
    given = "--plan", f"{file}:{case.function}", "--cluster", "local:1", "--out", str(tmp_path / "out")
    assert case.told in refused(capsys, tmp_path, "compile", MLP, *given)


@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS)
def test_a_model(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "mine.py", case.text)
    given = "--plan", "single", "--cluster", "local:1", "--out", str(tmp_path / "out")
    assert case.told in refused(capsys, tmp_path, "compile", f"{file}:{case.function}", *given)


@pytest.mark.parametrize("case", CLUSTERS.values(), ids=CLUSTERS)
def test_a_cluster(case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = written(tmp_path, "lab.yaml", case.text)
    given = "--plan", "single", "--cluster", str(file), "--out", str(tmp_path / "out")
    told = refused(capsys, tmp_path, "compile", MLP, *given)
    assert case.told in told
    assert str(file) in told or "cluster 'lab'" in told
