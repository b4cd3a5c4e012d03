"""Every edit of a saved plan is refused with one message that says where; with its manifest, which has a hash of each
file, one of each file is enough.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from edited import EDITS, PLANS, Edit, save_plan

from superscaler.cli.main import main

NO_MANIFEST = "--no-manifest"


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
    edit.change(folder, other)
    assert contents(folder) != contents(saved[edit.plan])
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {file.name: file.read_bytes() if file.is_file() else None for file in folder.iterdir()}


def validate(folder: Path, *options: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["validate", str(folder), *options])
    return int(ended.value.code or 0)


def test_names_are_unique() -> None:
    assert len({edit.name for edit in EDITS}) == len(EDITS) >= 50


@pytest.mark.parametrize("options", [(), (NO_MANIFEST,)], ids=["manifest", "no_manifest"])
@pytest.mark.parametrize("name", list(PLANS))
def test_a_plan_as_it_was_saved_holds(name: str, options: tuple[str, ...], saved: dict[str, Path]) -> None:
    assert validate(saved[name], *options) == 0


FIRST = {edit.places[0]: edit for edit in reversed(EDITS)}
CASES = [(edit, (NO_MANIFEST,)) for edit in EDITS] + [(edit, ()) for edit in FIRST.values()]


@pytest.mark.parametrize(("edit", "options"), CASES, ids=lambda x: x.name if isinstance(x, Edit) else "".join(x))
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
