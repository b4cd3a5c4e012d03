"""The boxes that a box meets, however many pairs are compared at once."""

from __future__ import annotations

import numpy as np
import pytest

from superscaler.schedule import joins


@pytest.mark.parametrize("pairs", [1, 7, joins.MOST_PAIRS])
def test_an_index_finds_what_comparing_all_pairs_finds(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joins, "MOST_PAIRS", pairs)
    random = np.random.default_rng(pairs)
    for _ in range(200):
        count, others, slots = random.integers(0, (12, 9, 4))
        lo, other_lo = random.integers(0, 6, (count, slots)), random.integers(0, 6, (others, slots))
        hi, other_hi = (low + random.integers(0, 4, low.shape) for low in (lo, other_lo))
        common = np.maximum(lo, other_lo[:, None]) < np.minimum(hi, other_hi[:, None])
        meets = [np.flatnonzero(row).tolist() for row in common.all(axis=2)]
        assert joins._Index(lo, hi).overlapping(other_lo, other_hi) == meets
