"""Stages of a V: each device has one on the way in and one on the way out, and the slowest device counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import inf

import numpy as np
from numpy.typing import NDArray

from superscaler.planner.costs import Costs
from superscaler.planner.stages.balance import Allowed, Floats, Ints
from superscaler.planner.stages.moves import Moves

# The accuracy of the slowest device's seconds: halvings of what they can be.
_HALVINGS = 12
# Sums in another order differ by less.
_ROUNDED = 1e-12


class Folded(Moves):
    """The stages of a V of so many devices. `slow`: some that are allowed."""

    def __init__(self, costs: Costs, run_of: Ints, devices: int, allowed: Allowed, slow: Sequence[int]) -> None:
        super().__init__(costs, run_of, "zbv", devices, allowed)
        self.slow = [*slow]
        # The seconds of the blocks from a first one to an end.
        self.inner = np.triu(self.until[None, :] - self.until[:, None]) + np.tril(
            np.full((len(self.until),) * 2, inf), -1
        )
        # The least seconds of a stage of 0, 1, ... blocks.
        count = len(self.until)
        self.shortest = np.maximum.accumulate([self.inner.diagonal(n).min() for n in range(count)])

    @cached_property
    def least(self) -> list[int]:
        """Return the first block of each stage, and the end of the last one, so that the slowest device is fastest."""
        low, high = float(self.until[-1]) / self.devices, self._slowest(self.slow)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._reached(middle)[-1].diagonal().min() < inf else (middle, high)
        high *= 1 + _ROUNDED
        return self._traced(self._reached(high), high)

    def _slowest(self, bounds: Sequence[int]) -> float:
        stages = self.seconds(bounds)
        return max(a + b for a, b in zip(stages[: self.devices], stages[: self.devices - 1 : -1], strict=True))

    def _reached(self, limit: float) -> list[Floats]:
        """Return for 0, 1, ... devices the seconds of the blocks between their stages, by first block and end: infinite
        where their stages cannot have all other blocks within a limit.
        """
        found = [np.full(self.inner.shape, inf)]
        found[0][0, -1] = self.inner[0, -1]
        most = int(np.searchsorted(self.shortest, limit * (1 + _ROUNDED), side="right"))
        for device in range(self.devices):
            into, out = (self.allowed[k] for k in (device, 2 * self.devices - 1 - device))
            # The stage on the way out ends where the later ones begin: the same, from the other end of the model.
            before = _least(_least(found[-1], into, most).T[::-1], out.T[::-1, ::-1], most)[::-1].T
            is_within = before + (0.0 if device else self.rest) <= limit + np.where(self.inner < inf, self.inner, -inf)
            found.append(np.where(is_within, self.inner, inf))
        return found

    def _traced(self, reached: Sequence[Floats], limit: float) -> list[int]:
        """Return stages within a limit, those of a device as equal as can be."""
        middles = np.flatnonzero(reached[-1].diagonal() < inf)
        a = b = int(middles[np.abs(self.until[middles] - self.until[-1] / 2).argmin()])
        bounds = [a]
        for device in reversed(range(self.devices)):
            into, out = self.allowed[device][:, a], self.allowed[2 * self.devices - 1 - device][b]
            last, first = (0.0, 0.0) if device else (self.rest - self.early, self.early)
            is_some = into[:, None] & out[None, :] & (reached[device] + first + last <= limit + self.inner[a, b])
            one, other = self.until[a] - self.until + first, self.until - self.until[b] + last
            table = np.where(is_some, np.abs(one[:, None] - other[None, :]), inf)
            a, b = map(int, np.unravel_index(table.argmin(), table.shape))
            bounds = [a, *bounds, b]
        return bounds


def _least(table: Floats, allowed: NDArray[np.bool_], most: int) -> Floats:
    """Return for each end of a stage the least of the rows of a table at its allowed beginnings, fewer than `most`
    blocks before.
    """
    found = np.full(table.shape, inf)
    for length in range(most):
        rows = np.where(allowed.diagonal(length)[:, None], table[: len(table) - length], inf)
        np.minimum(found[length:], rows, out=found[length:])
    return found
