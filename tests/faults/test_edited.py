"""Every edit of a saved plan is refused with one message that says where, with its manifest and without."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import pytest
from edited import EDITS, PLANS, Edit, save_plan

from superscaler.cli.main import main
from superscaler.cli.validate import validate as command

NEEDED = pytest.mark.skipif("no_manifest" not in inspect.signature(command).parameters, reason="needs validate DIR")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {name: tmp_path_factory.mktemp("plans") / name for name in PLANS}
    for name, folder in found.items():
        save_plan(name, folder)
    return found


def edited(edit: Edit, saved: dict[str, Path], tmp_path: Path) -> Path:
    """Return a copy of the plan with an edit."""
    folder, other = tmp_path / "plan", next(saved[name] for name in PLANS if name != edit.plan)
    shutil.copytree(saved[edit.plan], folder)
    if edit.needs and not (folder / edit.needs).exists():
        pytest.skip(f"needs {edit.needs}")
    edit.change(folder, other)
    return folder


def validate(folder: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(folder), *options])
    return int(ended.value.code or 0)


def test_names_are_unique() -> None:
    assert len({edit.name for edit in EDITS}) == len(EDITS) >= 50


@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.name.replace(" ", "_"))
def test_an_edit_changes_the_plan(edit: Edit, saved: dict[str, Path], tmp_path: Path) -> None:
    folder = edited(edit, saved, tmp_path)

    def contents(of: Path) -> dict[str, bytes | None]:
        return {f.name: f.read_bytes() if f.is_file() else None for f in of.iterdir()}

    assert contents(folder) != contents(saved[edit.plan])


@NEEDED
@pytest.mark.parametrize("options", [(), ("--no-manifest",)], ids=["manifest", "no_manifest"])
@pytest.mark.parametrize("name", list(PLANS))
def test_a_plan_as_it_was_saved_holds(name: str, options: tuple[str, ...], saved: dict[str, Path]) -> None:
    assert validate(saved[name], *options) == 0


@NEEDED
@pytest.mark.parametrize("options", [(), ("--no-manifest",)], ids=["manifest", "no_manifest"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda e: e.name.replace(" ", "_"))
def test_an_edit_is_refused_and_its_place_told(
    edit: Edit,
    options: tuple[str, ...],
    saved: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = edited(edit, saved, tmp_path)
    capsys.readouterr()
    code = validate(folder, *options)
    told = capsys.readouterr().err
    if code == 0 and options:
        assert edit.is_other, "it holds"
        return
    assert code in (1, 2)
    assert told.startswith("error: ")
    assert told.count("error: ") == 1
    assert any(place in told for place in edit.places), told


@NEEDED
@pytest.mark.parametrize("what", ["missing", "empty", "a file"])
def test_what_is_no_plan(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "plan"
    if what == "empty":
        folder.mkdir()
    elif what == "a file":
        folder.write_text("{}")
    assert validate(folder) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "plan" in told
