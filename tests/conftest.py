"""What all tests share: where the generators of random graphs live, and the flag that rewrites golden files."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "property"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files again")
