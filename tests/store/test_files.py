"""A file is written whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from superscaler.store.folder import is_inside, replacing, write_file


def test_a_file_takes_the_place_of_another_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    for data in ("one", b"two"):
        write_file(file, data)
        assert file.read_bytes() == (data if isinstance(data, bytes) else data.encode())
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_what_fails_half_way_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_file(file, "old")

    def half(aside: Path) -> None:
        aside.write_text("ne")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), replacing(file) as aside:
        half(aside)
    monkeypatch.setattr(os, "fsync", lambda _: half(tmp_path / "other"))
    with pytest.raises(OSError, match="No space left"):
        write_file(file, "new")
    assert file.read_text() == "old"
    assert {f.name for f in tmp_path.iterdir()} == {"file", "other"}


def test_a_link_is_replaced_and_not_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("keep")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    write_file(tmp_path / "link", "new")
    assert (tmp_path / "theirs").read_text() == "keep"
    assert (tmp_path / "link").read_text() == "new"


def test_a_long_name_can_be_written(tmp_path: Path) -> None:
    write_file(tmp_path / ("x" * 255), "data")
    assert (tmp_path / ("x" * 255)).read_text() == "data"


@pytest.mark.parametrize("name", ["", "/a", "../a", "a/../b", "a//b", "a/.", ".", "a\\b", "a\0b"])
def test_names_that_leave_the_folder(name: str) -> None:
    assert not is_inside(name)
