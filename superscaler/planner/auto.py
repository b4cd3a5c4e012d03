"""`--plan auto`: the plan that a search finds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from superscaler.plans import AUTO, resolve

if TYPE_CHECKING:
    from superscaler.cluster import Cluster
    from superscaler.ir.graph import Graph
    from superscaler.simulate.system import System


def plan_of(spec: str, memory: int | None = None, system: System | None = None) -> Callable[..., Any]:
    """Return the sProgram of a text: `auto`, or one that `superscaler.plans.resolve` knows. The search is for devices
    of so much memory, and for steps that run on this system.
    """
    return _Auto(memory, system) if is_auto(spec) else resolve(spec)


def is_auto(spec: str) -> bool:
    """Return whether a text is `auto`."""
    return spec.strip() == AUTO


class _Auto:
    """The best plan of a search for the first graph, whose text is logged. Later graphs, of the same step at other
    shapes, get the same plan, so that weights rest in the same pieces.
    """

    __name__ = AUTO

    def __init__(self, memory: int | None, system: System | None) -> None:
        self._memory, self._system, self._found = memory, system, ""

    def __call__(self, graph: Graph, cluster: Cluster) -> None:
        # It loads torch: texts of plans are read before that.
        from superscaler.planner.search import search
        from superscaler.simulate.system import PLAIN

        if not self._found:
            # Ctrl-C ends the work that the plan is for.
            answer = search(graph.copy(), cluster, self._memory, system=self._system or PLAIN, is_kept=False)
            self._found = answer.best.spec
            log = logging.getLogger(__name__)
            log.warning("auto: the plan is %s; give this text to have it again.", self._found)
        resolve(self._found)(graph, cluster)
