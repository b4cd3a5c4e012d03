"""What all tests share: a cache, the generators of random graphs and faults, the flag that rewrites golden files."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

for folder in ("property", "faults", "dist", "materialize/rvd", "verbs"):
    sys.path.insert(0, str(Path(__file__).parent / folder))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write the golden files again")


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory(prefix="superscaler-tests-")
    os.environ["XDG_CACHE_HOME"] = folder.name
    config.add_cleanup(folder.cleanup)
