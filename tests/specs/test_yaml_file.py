"""Tables of users: what is none, or none of the known names, is told in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from superscaler.errors import InputError
from superscaler.specs.yaml_file import parse, read, table


def test_a_table_is_read_as_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "table.yaml"
    file.write_text("mesh: {dp: 2}\nmodules: {}")
    assert table(read(str(file), "here"), "here", {"mesh": {}, "parts": 1, "modules": {}}) == {
        "mesh": {"dp": 2},
        "parts": 1,
        "modules": {},
    }


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: [", "here is not YAML: line 1, column 5: while parsing a flow node, expected the node content"),
        ("a: 1\n\tb: 2", "here is not YAML: line 2, column 1: while scanning for the next token"),
        ("a: 1\na: 2", "the key 'a' is given twice, at line 1 and below"),
        ("a: !!bool x", "here is not YAML: 'x'"),
        ("a: !!timestamp x", "here is not YAML: "),
        ("[1]", r"here is \[1\], but it must be a table of names"),
        ("1: 2", "here is {1: 2}, but it must be a table of names"),
        ("mush: {}", "here: unknown key 'mush'; did you mean 'mesh'"),
        ("mesh: 1", "here: mesh is 1, but it must be a table of names"),
        ("parts: two", "here: parts is 'two', but it must be an integer"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(text: str, told: str) -> None:
    with pytest.raises(InputError, match=told) as error:
        table(parse(text, "here"), "here", {"mesh": {}, "parts": 1})
    assert "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"here cannot be read: .*No such file"):
        read(str(tmp_path / "none.yaml"), "here")
