"""Rows of long tables: those that always run, and those of `-m slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def slow(*rows: Any) -> list[ParameterSet]:
    """Return rows of a table that run with `-m slow` only."""
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow) for row in rows]


def few(rows: Iterable[Any], *numbers: int) -> list[Any]:
    """Return rows, those of other numbers than these slow."""
    listed = list(rows)
    assert max(numbers) < len(listed)
    return [row if n in numbers else slow(row)[0] for n, row in enumerate(listed)]
