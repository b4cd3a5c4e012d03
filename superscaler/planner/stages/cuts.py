"""The stages of plans of a model: those of a schedule that cuts it itself, and the best of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from superscaler.errors import InputError
from superscaler.planner.constraints import Limit
from superscaler.planner.costs import Costs
from superscaler.planner.menu import Menu
from superscaler.planner.space import Choice, Use
from superscaler.planner.stages.balance import Floats, Ints, balanced
from superscaler.planner.stages.folded import Folded
from superscaler.planner.stages.moves import Moves
from superscaler.plans.lib.stages import outer_ends
from superscaler.plans.lib.stages import stages as cut_stages

Bounds = list[int] | None
# Schedules whose stages are improved by moves.
_MOVED = "1f1b", "zb_h1", "zbv"


class Cuts:
    """The first block of each stage of a plan, and the end of the last one. `limits`: on the blocks of stages. `tails`:
    returns the seconds of each stage of a plan after its last work, by first block and end.
    """

    def __init__(
        self,
        menu: Menu,
        run_of: Ints,
        limits: Sequence[Limit],
        tails: Callable[[Choice, Costs], Sequence[Floats]],
    ) -> None:
        self.tails = tails
        self.menu, self.run_of, self.limits = menu, run_of, limits
        self.sizes, self.ends = menu.sizes(), outer_ends(menu.graph)
        self._known: dict[tuple[Use, int, bool], Bounds] = {}
        self._folded: dict[tuple[Use, int], Folded] = {}
        self._best: dict[Choice, list[int]] = {}
        self._parts: dict[int, Bounds] = {}

    def best(self, c: Choice) -> Bounds:
        """Return the stages with the shortest step; None for more than the model has, or limits that none keep."""
        found = self._balanced(c)
        if found is None or c.pp == 1 or c.schedule not in _MOVED:
            return found
        key = replace(c, dp=1, zero=0) if c.schedule == "zbv" else c
        if key not in self._best:
            folded = self._of_v(c, found) if c.schedule == "zbv" else None
            firsts = [folded.least, found] if folded else [found]
            self._best[key] = (folded or self._moves(c)).best(c.microbatches, firsts)
        return self._best[key]

    def least(self, c: Choice) -> Bounds:
        """Return the stages whose slowest device is fastest."""
        found = self._balanced(c)
        return self._of_v(c, found).least if found is not None and c.schedule == "zbv" else found

    def of(self, c: Choice) -> list[int]:
        """Return the stages of a plan that says how many blocks each has."""
        found: list[int] = np.searchsorted(np.cumsum([0, *self.sizes]), np.cumsum([0, *c.blocks])).tolist()
        return found

    def _moves(self, c: Choice) -> Moves:
        costs = self.menu.costs(c.use)
        assert costs is not None
        return Moves(costs, self.run_of, c.schedule, c.pp, self.allowed, self.tails(c, costs))

    def _of_v(self, c: Choice, slow: list[int]) -> Folded:
        key = c.use, c.pp
        if key not in self._folded:
            costs = self.menu.costs(c.use)
            assert costs is not None
            self._folded[key] = Folded(costs, self.run_of, c.pp, self.allowed, slow)
        return self._folded[key]

    def _balanced(self, c: Choice) -> Bounds:
        has_rest = c.schedule != "interlaced"
        if c.is_even and has_rest and c.stages > 1:
            return self.even(c.stages) if c.stages <= len(self.run_of) else None
        key = c.use, c.stages, has_rest
        if key not in self._known and (costs := self.menu.costs(c.use)):
            allowed = partial(self.allowed, has_rest=has_rest)
            self._known[key] = balanced(costs, self.run_of, c.stages, has_rest, allowed)
        return self._known.get(key)

    def allowed(self, stage: int, stages: int, has_rest: bool = True) -> NDArray[np.bool_]:
        """Return whether a stage, one of so many, may have the blocks from a first one up to an end: none, if it is the
        first or the last, and has what is outside of the blocks.
        """
        blocks = np.concatenate([[0], np.cumsum(self.sizes)])
        found = np.triu(np.ones((len(blocks), len(blocks)), dtype=bool), 1)
        found[0, 0] = has_rest and stage == 0 and self.ends[0]
        found[-1, -1] = has_rest and stage == stages - 1 and self.ends[1]
        for limit in self.limits:
            found &= limit.holds(stage, stages, blocks[None, :] - blocks[:, None])
        return found

    def even(self, count: int) -> Bounds:
        """Return the stages as schedules cut the model themselves, whatever these take."""
        if count not in self._parts:
            self._parts[count] = self._cut(count)
        return self._parts[count]

    def _cut(self, count: int) -> Bounds:
        try:
            parts = cut_stages(self.menu.graph, count)
        except InputError:
            return None
        of = {op.name: n for n, block in enumerate(chain(*self.menu.runs)) for op in block.ops}
        firsts = [min((of[op.name] for op in part if op.name in of), default=len(self.run_of)) for part in parts]
        return [0, *(min(firsts[k:]) for k in range(1, count)), len(self.run_of)]
