"""Costs of blocks: seconds and bytes, which are added, and compared with those of other uses of devices."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from superscaler.planner.memory import NONE, Beyond

# The first fields of a cost: seconds.
_TIMES = 8
# Kernels take the time where many rows take so many times the seconds of few, or more.
_BUSY = 3.2


class Cost(NamedTuple):
    """Of a block, or of what is outside of the blocks, on a device: the seconds of a microbatch, `work`: those without
    communication; `once`: of the communication of gradients after the last one; of gradients that are `copied` to sums,
    and `added` to them; `update`: of a step's update; `host`: of the host, which starts the work of a microbatch, and
    `idle`: those in which a device waits for it at the begin of a step; bytes of `weights`, of their `gradients`, of
    the `optimizer`'s state, and `kept` of a microbatch until its backward; the `pieces` in which gradients are sent; of
    the seconds, those `early` in the model: before the first block, and after its backward.
    """

    seconds: float
    work: float
    once: float
    copied: float
    added: float
    update: float
    host: float
    idle: float
    weights: float
    gradients: float
    optimizer: float
    kept: float
    pieces: float = 0.0
    early: float = 0.0

    @property
    def turn(self) -> Any:
        """Return the seconds from one of many microbatches to the next: of the device, or of its host. They may be an
        array.
        """
        return np.maximum(self.seconds, self.host)

    def __sub__(self, other: Cost) -> Cost:
        """Return the difference to a smaller model, never below 0."""
        return Cost(*(max(a - b, 0.0) for a, b in zip(self, other, strict=True)))

    def plus(self, other: Cost, times: float) -> Cost:
        """Return the cost with so many others."""
        return Cost(*(a + times * b for a, b in zip(self, other, strict=True)))

    def faster(self, pace: float) -> Cost:
        """Return the cost with all work in so many of its seconds."""
        saved, copied, added, update = ((1 - pace) * x for x in (self.work, self.copied, self.added, self.update))
        return self._replace(
            seconds=self.seconds - saved, work=self.work - saved, copied=self.copied - copied,
            added=self.added - added, update=self.update - update,
        )  # fmt: skip

    def least(self, times: float) -> Cost:
        """Return so many times the seconds of the device, and nothing else."""
        return NOTHING._replace(seconds=times * self.seconds, work=times * self.work, early=times * self.early)

    def towards(self, other: Cost, share: float) -> Cost:
        """Return the cost at a share of the way to another one."""
        return Cost(*(max(a + share * (b - a), 0.0) for a, b in zip(self, other, strict=True)))


NOTHING = Cost(*(0.0 for _ in Cost._fields))


class Costs(NamedTuple):
    """The costs of a use: of a block of each run, of the rest, and the bytes beyond these at the peak."""

    runs: tuple[Cost, ...]
    rest: Cost
    beyond: Beyond

    def faster(self, pace: float) -> Costs:
        """Return the costs with all work in so many of its seconds."""
        return Costs(tuple(run.faster(pace) for run in self.runs), self.rest.faster(pace), self.beyond)

    def least(self, times: float) -> Costs:
        """Return so many times the seconds of the device, and nothing else."""
        return Costs(tuple(run.least(times) for run in self.runs), self.rest.least(times), NONE)

    def unkept(self) -> Costs:
        """Return the costs without what is kept of a microbatch, and without the bytes beyond weights."""
        return Costs(tuple(run._replace(kept=0.0) for run in self.runs), self.rest, NONE)

    def of_rows(self, other: Costs, times: float) -> Costs:
        """Return the costs with the bytes beyond them of so many times the rows of others."""
        return self._replace(beyond=other.beyond.of_rows(times))

    def changed(self, before: Costs, after: Costs, is_added: bool) -> Costs:
        """Return the costs, changed in the ratio of others, or `is_added`, with the difference of their work."""
        triples = zip((*self.runs, self.rest), (*before.runs, before.rest), (*after.runs, after.rest), strict=True)
        if is_added:
            *blocks, rest = (
                own._replace(work=own.work + b.work - a.work, seconds=own.seconds + b.work - a.work)
                for own, a, b in triples
            )
            return Costs(tuple(blocks), rest, self.beyond.plus(before.beyond, after.beyond))
        *blocks, rest = (
            Cost(*(y * x / a if a else y for x, a, y in zip(own, first, last, strict=True)))
            for own, first, last in triples
        )
        return Costs(tuple(blocks), rest, self.beyond.changed(before.beyond, after.beyond))

    def towards(self, other: Costs, share: float) -> Costs:
        """Return the costs at a share of the way to other ones."""
        blocks = tuple(a.towards(b, share) for a, b in zip(self.runs, other.runs, strict=True))
        return Costs(blocks, self.rest.towards(other.rest, share), self.beyond.towards(other.beyond, share))


def differences(base: Cost, pairs: Sequence[tuple[Cost, Cost]], held: Sequence[Beyond]) -> Costs:
    """Return the costs of a block of each run, and of what is left of a model with one of each: what that keeps is in
    the bytes beyond the costs. `pairs`: with a block more, and with one less. `held`: what that model and the larger
    ones hold beside their weights.
    """
    blocks, rest = tuple(more - less for more, less in pairs), base
    for cost in blocks:
        rest -= cost
    kept = sum(cost.kept for cost in blocks)
    own = (held[0].less(kept), *(some.less(kept + cost.kept) for some, cost in zip(held[1:], blocks, strict=True)))
    return Costs(blocks, rest._replace(kept=0.0), reduce(Beyond.most, own))


def between(slow: Costs, fast: Costs, share: float) -> Costs:
    """Return the costs on devices between slow and fast ones: their rates are on a line."""

    def of(a: Cost, b: Cost) -> Cost:
        pairs = zip(a[:_TIMES], b[:_TIMES], strict=True)
        return Cost(*(1 / ((1 - share) / x + share / y) if x and y else x for x, y in pairs), *a[_TIMES:])

    return Costs(tuple(map(of, slow.runs, fast.runs)), of(slow.rest, fast.rest), slow.beyond)


def is_busy(few: Costs, many: Costs) -> bool:
    """Return whether kernels take the time of the blocks, not their starts."""
    less, more = (sum(run.seconds for run in costs.runs) for costs in (few, many))
    return more >= _BUSY * less


def spans(costs: Costs, run_of: NDArray[np.int64]) -> Cost:
    """Return the costs of the blocks of all stages: each number is an array, by the first block and the end."""
    total = np.cumsum([np.zeros(len(Cost._fields)), *(np.array(costs.runs[n]) for n in run_of)], axis=0)
    return Cost(*np.moveaxis(total[None, :] - total[:, None], -1, 0))


def outside(rest: Cost, share: float, is_last: bool) -> Cost:
    """Return the cost on the last stage, or on the first, of what is outside of the blocks: it has a share of the
    weights, and of the work what is early or late in the model.
    """
    seconds, once = (rest.seconds - rest.early, rest.once) if is_last else (rest.early, 0.0)
    part = seconds / rest.seconds if rest.seconds else 0.0
    own = NOTHING.plus(rest, share)
    return own._replace(seconds=seconds, work=rest.work * part, host=rest.host * part, once=once, early=0.0)


@lru_cache(maxsize=2**10)
def total_of(costs: Costs, blocks: tuple[int, ...]) -> Cost:
    """Return the cost of a model with so many blocks in its runs."""
    return reduce(lambda cost, pair: cost.plus(*pair), zip(costs.runs, blocks, strict=True), costs.rest)
