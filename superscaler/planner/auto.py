"""`--plan auto`: the plan that a search finds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from superscaler.plans import AUTO, resolve

if TYPE_CHECKING:
    from superscaler.cluster import Cluster
    from superscaler.ir.graph import Graph


def plan_of(spec: str) -> Callable[..., Any]:
    """Return the sProgram of a text: `auto`, or one that `superscaler.plans.resolve` knows."""
    return _Auto() if spec.strip() == AUTO else resolve(spec)


class _Auto:
    """The best plan of a search for the first graph, whose text is logged. Later graphs, of the same step at other
    shapes, get the same plan, so that weights rest in the same pieces.
    """

    __name__ = AUTO

    def __init__(self) -> None:
        self._found = ""

    def __call__(self, graph: Graph, cluster: Cluster) -> None:
        # It loads torch: texts of plans are read before that.
        from superscaler.planner.search import search

        if not self._found:
            self._found = search(graph.copy(), cluster).best.spec
            log = logging.getLogger(__name__)
            log.warning("auto: the plan is %s; give this text to have it again.", self._found)
        resolve(self._found)(graph, cluster)
