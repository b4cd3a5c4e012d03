"""The package keeps its rules: plain sentences in docstrings, rooms that are not too large."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.sweeps import UNKNOWN

PACKAGE = Path(__file__).parents[2] / "superscaler"
FILES = sorted(PACKAGE.rglob("*.py"))
RIDDLES = re.compile(r"\b(told|tells?|whom|of which)\b|\bReturn (what|which|how|where)\b")


def test_docstrings_are_plain_sentences() -> None:
    found = []
    for file in (file for file in FILES if RIDDLES.search(file.read_text())):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                found += [f"{file}: {riddle[0]} in {text[:60]!r}" for riddle in RIDDLES.finditer(text)]
    assert found == []


def test_a_room_has_at_most_seventeen_files() -> None:
    """But for the plans, which are one a file."""
    rooms = Counter(file.parent.relative_to(PACKAGE).as_posix() for file in FILES)
    assert {room: count for room, count in rooms.items() if count > 17 and room != "plans"} == {}


def test_covered_rows_are_tests(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.stash[UNKNOWN] == []
