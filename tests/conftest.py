"""What all tests share: where the generators of random graphs and faults live, and the flag of golden files."""

import sys
from pathlib import Path

import pytest

for folder in ("property", "faults"):
    sys.path.insert(0, str(Path(__file__).parent / folder))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files again")
