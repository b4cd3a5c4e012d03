"""Traffic between the devices of a plan: the seconds of collectives of stages, and of messages between them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from superscaler.cluster import Cluster
from superscaler.ir.graph import Graph
from superscaler.materialize.buckets import BUCKET_BYTES
from superscaler.planner.menu import Menu
from superscaler.planner.space import Choice
from superscaler.planner.stages.balance import Way, cuts_of, meetings


class Traffic:
    """The prices of traffic on a cluster. Equal communication is priced once."""

    def __init__(self, graph: Graph, cluster: Cluster, menu: Menu) -> None:
        self.graph, self.cluster, self.menu = graph, cluster, menu
        self._sends: dict[tuple[Way, Way, int], float] = {}
        self._prices: dict[tuple[str, int, int, int, float], float] = {}

    def collective(self, c: Choice, kind: str, size: Any, pieces: Any = 1.0) -> Any:
        """Return the seconds of collectives of the data-parallel groups of a stage, one after the other: of some bytes
        of each device in so many pieces, none larger than the largest tensor. The numbers may be arrays.
        """
        most = float(np.max(np.minimum(size, self._largest) if np.max(pieces) > 1 else size))
        start = self._priced(c, kind, 0.0)
        return pieces * start + size * (self._priced(c, kind, most) - start) / most if most else pieces * 0.0

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
        return float(max([BUCKET_BYTES, *(t.gradient_bytes for t in self.graph.model.trained_parameters())]))

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
        ends = [self.graph.model.tensors[block.ops[-1].outputs[0].tensor] for run in self.menu.runs for block in run]
        return max((t.nbytes for t in ends), default=0) / self.menu.batch
