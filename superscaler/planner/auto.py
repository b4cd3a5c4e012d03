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
    return auto if spec.strip() == AUTO else resolve(spec)


def auto(graph: Graph, cluster: Cluster) -> None:
    """Apply the best plan of a search, and log its text."""
    # It loads torch: texts of plans are read before that.
    from superscaler.planner.search import search

    best = search(graph.copy(), cluster).best
    logging.getLogger(__name__).warning("auto: the plan is %s; give this text to have it again.", best.spec)
    resolve(best.spec)(graph, cluster)
