"""Traffic between the devices of a plan: the seconds of collectives of stages, of those that no work hides, and of
messages between stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import chain, product, takewhile
from math import prod
from typing import Any

import numpy as np

from superscaler.ir.model import Op
from superscaler.materialize.buckets import BUCKET_BYTES
from superscaler.planner.costs import Cost
from superscaler.planner.menu import Menu
from superscaler.planner.space import Choice
from superscaler.simulate.predict import check_speeds

# How a stage has a microbatch: the groups with rows of their own, the parts of the sequence, and the copies of a part.
Way = tuple[int, int, int]
# The share of a block's seconds that its backward takes, beside which gradients are sent; with recomputation.
_BACKWARD = 2 / 3, 3 / 4


def backward_of(c: Choice) -> float:
    """Return the share of a block's seconds that its backward takes."""
    return _BACKWARD[c.recompute != "none"]


class Traffic:
    """The prices of traffic on a cluster. Equal communication is priced once."""

    def __init__(self, menu: Menu) -> None:
        self.menu, self.model, self.cluster = menu, menu.graph.model, menu.cluster
        speeds = check_speeds(self.cluster).speeds
        self._slowdown = speeds.slowdown if speeds else 1.0
        self._sends: dict[tuple[Way, Way, int], float] = {}
        self._prices: dict[tuple[str, int, int, int, float], float] = {}

    def collective(self, c: Choice, kind: str, size: Any, pieces: Any = 1.0) -> Any:
        """Return the seconds of collectives of the data-parallel groups of a stage, one after the other: of some bytes
        of each device in so many pieces, none larger than the largest tensor. The numbers may be arrays.
        """
        most = float(np.max(np.minimum(size, self._largest) if np.max(pieces) > 1 else size))
        start = self._priced(c, kind, 0.0)
        return pieces * start + size * (self._priced(c, kind, most) - start) / most if most else pieces * 0.0

    def exposed(self, c: Choice, stage: Cost) -> Any:
        """Return the seconds that the communication between data-parallel devices takes beside the work: no work hides
        that of the gradients that are ready last, and of the weights that are needed first. Costs may be arrays, of
        stages of all blocks.
        """
        if c.copies == 1:
            return 0.0
        first, own, pieces = self._outside[0] / c.tp, self.collective, stage.pieces
        backward = backward_of(c) * stage.turn
        if c.zero == 0:
            return self._beside(own(c, "all_reduce", stage.gradients, pieces), own(c, "all_reduce", first), backward)
        scatter, gather = own(c, "reduce_scatter", stage.gradients, pieces), own(c, "all_gather", stage.weights / c.dp)
        last, start = own(c, "reduce_scatter", first), own(c, "all_gather", first / c.dp)
        if c.zero == 1:
            return self._beside(scatter, last, backward) + self._beside(gather, start, stage.turn - backward)
        work = c.microbatches * stage.turn
        return self._beside(c.microbatches * (scatter + 2 * gather), last + start, work)

    def _beside(self, every: Any, alone: float, work: Any) -> Any:
        """Return the seconds that communication takes longer than the work beside it, which it slows down: all of it
        but what is `alone`.
        """
        hidden = np.maximum(every - alone, 0.0)
        return alone + np.maximum(hidden * (1 - 1 / self._slowdown), hidden - work)

    def _priced(self, c: Choice, kind: str, size: float) -> float:
        """Return the seconds of one collective."""
        far = (c.pp - 1) * c.dp * c.tp * (c.directions - 1)
        key = kind, c.dp, c.tp, far, size
        if key not in self._prices:
            near = np.arange(c.dp * c.tp).reshape(c.dp, c.tp)
            # Of two directions, the ends of the pipeline have the first stage.
            groups = (np.concatenate([near, near + far]) if far else near).T.tolist()
            lines = self.cluster.way(kind, groups, size).lines
            self._prices[key] = max(latency + slope * size for latency, slope in lines)
        return self._prices[key]

    @cached_property
    def _largest(self) -> float:
        """Return the bytes of the largest piece of gradients."""
        return float(max([BUCKET_BYTES, *(t.gradient_bytes for t in self.model.trained_parameters())]))

    @cached_property
    def _outside(self) -> tuple[float, float, float]:
        """Return the bytes of the gradients of the weights outside of the blocks: those that are read before the first
        block, those that are read later, and of all. They may be the same weights.
        """
        inside = {op.name for block in chain(*self.menu.runs) for op in block.ops}
        every = [op for op in self.model.forward_ops if op.name not in inside]
        before = [*takewhile(lambda op: op.name not in inside, self.model.forward_ops)]
        return self._read(before), self._read(every[len(before) :]), self._read(every)

    @property
    def shares(self) -> tuple[float, float]:
        """Return the shares of the first stage and of the last in the weights outside of the blocks."""
        first, last, total = self._outside
        return (first / total, last / total) if total else (0.0, 1.0)

    def _read(self, ops: Sequence[Op]) -> float:
        """Return the bytes of the gradients of the weights that ops read."""
        names = {o.tensor for op in ops for o in op.inputs}
        return float(sum(t.gradient_bytes for t in self.model.trained_parameters() if t.name in names))

    def send(self, c: Choice, after: Choice) -> float:
        """Return the seconds of the messages of a microbatch from a stage to the next one, which may be cut in another
        way: each device gets what it reads of each that has it.
        """
        key = cuts_of(c), cuts_of(after), c.rows
        if key not in self._sends:
            self._sends[key] = self.cluster.seconds("send", meetings(*key[:2]), self.sent(c, after))
        return self._sends[key]

    def sent(self, c: Choice, after: Choice) -> float:
        """Return the bytes of such a message."""
        parts = max(cuts_of(c)[1], cuts_of(after)[1])
        return self._handed * c.rows * c.dp / max(c.dp, after.dp) / parts

    @cached_property
    def _handed(self) -> float:
        """Return the bytes that a block hands to the next one for a row of the batch."""
        ends = [self.model.tensors[block.ops[-1].outputs[0].tensor] for run in self.menu.runs for block in run]
        return max((t.nbytes for t in ends), default=0) / self.menu.batch


def cuts_of(c: Choice) -> Way:
    """Return the cuts of a microbatch in each stage of a plan."""
    return (c.dp, 1, c.tp) if c.layout == "tensor" else (c.dp, c.tp, 1)


def meetings(one: Way, other: Way) -> list[tuple[int, int]]:
    """Return the pairs of devices of a stage and of the next one that have common elements of a microbatch; of copies,
    one sends.

    >>> meetings((2, 1, 1), (1, 1, 2)), meetings((1, 1, 2), (1, 1, 2))
    ([(0, 2), (0, 3), (1, 2), (1, 3)], [(0, 2), (1, 3)])
    """
    found = list[tuple[int, int]]()
    for receiver, place in enumerate(product(*map(range, other)), prod(one)):
        rows, tokens = (range(place[k] * one[k] // other[k], -(-(place[k] + 1) * one[k] // other[k])) for k in (0, 1))
        senders = ((row * one[1] + token) * one[2] + place[2] % one[2] for row, token in product(rows, tokens))
        found += ((sender, receiver) for sender in senders)
    return sorted(found)
