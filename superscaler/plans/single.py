"""Everything on one device: the reference that all other plans must equal."""

from __future__ import annotations

from superscaler.verbs import Cluster, Graph, op_assign, sprogram


@sprogram
def single(graph: Graph, cluster: Cluster) -> None:
    op_assign(graph, graph.ops, cluster.devices[0])
