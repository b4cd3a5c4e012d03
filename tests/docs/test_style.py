"""The repository keeps its rules: plain sentences in docstrings, rooms that are not too large, one place to share."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "superscaler"
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


def test_a_file_has_at_most_350_lines() -> None:
    lengths = {file.relative_to(PACKAGE).as_posix(): len(file.read_text().splitlines()) for file in FILES}
    assert {name: length for name, length in lengths.items() if length > 350} == {}


def test_tests_and_benchmarks_share_helpers_only() -> None:
    """Tests import no benchmark, and each other by whole names; benchmarks import `tests.helpers` only."""
    own = {file.stem for file in (ROOT / "tests").rglob("*.py")} - sys.stdlib_module_names
    wrong = [(file, name) for file, name in _imports("tests") if name.split(".")[0] in {"benchmarks", *own}]
    wrong += [(file, name) for file, name in _imports("benchmarks") if re.match(r"tests\b(?!\.helpers)", name)]
    assert wrong == []


def _imports(folder: str) -> Iterator[tuple[Path, str]]:
    """Yield each file of a folder with each module that it imports."""
    for file in (ROOT / folder).rglob("*.py"):
        for line in re.findall(r"^\s*((?:import|from)\b.*)", file.read_text(), re.MULTILINE):
            plain = re.fullmatch(r"import (.*)", line)
            names = plain[1].split(",") if plain else re.findall(r"^from (\S*) import\b", line)
            yield from ((file, name.split()[0].lstrip(".")) for name in names)
