"""Plans with a rewrite on top of another plan."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import superscaler as ss
from superscaler.plans import resolve
from superscaler.plans.swap import reads_activations
from tests.helpers.ran import SProgram


def on_top(plan: SProgram | str, rewrite: Callable[[ss.Graph], object]) -> SProgram:
    """Return a plan after which a rewrite runs."""

    def sprogram(graph: ss.Graph, cluster: ss.Cluster) -> None:
        (resolve(plan) if isinstance(plan, str) else plan)(graph, cluster)
        rewrite(graph)

    return sprogram


def recomputed(plan: SProgram | str, inside: str = "blocks") -> SProgram:
    """Return a plan that also computes again all blocks, `one` block, a module of each block, or `all`."""

    def rewrite(graph: ss.Graph) -> None:
        own = "" if inside in ("blocks", "one") else f".{inside}"
        for block in graph.blocks[-1 if inside == "one" else 0 :] if inside != "all" else ():
            ss.op_trans(graph, graph.select(module=block.path + own), ss.Recompute())
        if inside == "all":
            ss.op_trans(graph, graph.forward_ops, ss.Recompute())

    return on_top(plan, rewrite)


def halved(plan: SProgram | str, again: bool = False, last: bool = False) -> SProgram:
    """Return a plan with the backward of each block split; `last`: all of W after all of I."""

    def rewrite(graph: ss.Graph) -> None:
        for number, block in enumerate(graph.blocks):
            rewrites = [ss.SplitBackward(), *([ss.Recompute()] if again else [])]
            for one in rewrites[:: -1 if number else 1]:
                ss.op_trans(graph, graph.select(module=block.path), one)
        if last:
            ss.op_order(graph, graph.select(kind="I"), graph.select(kind="W"))

    return on_top(plan, rewrite)


def swapped(plan: SProgram | str) -> SProgram:
    """Return a plan that also keeps the inputs of blocks on the hosts, for when the blocks are computed again."""

    def rewrite(graph: ss.Graph) -> None:
        for block in graph.blocks:
            is_first = not reads_activations(graph, block.ops)
            again = ss.op_trans(graph, graph.select(module=block.path), ss.Recompute())
            if not is_first:
                ss.op_assign(graph, ss.op_trans(graph, again, ss.Insert()), "host")

    return on_top(plan, rewrite)


def offloaded(plan: SProgram | str) -> SProgram:
    """Return a plan that also keeps weights and the optimizer's state on the hosts, and trains them there."""
    return on_top(plan, lambda g: ss.op_assign(g, [op for op in g.ops if op.kind == "optimizer"], "host"))


def regathered(plan: SProgram | str) -> SProgram:
    """Return a plan that also gathers the weights of blocks again for the backward."""
    return on_top(plan, lambda graph: [ss.op_trans(graph, block.ops, ss.Regather()) for block in graph.blocks])


def stale(plan: SProgram | str, again: bool = False) -> SProgram:
    """Return a plan whose weights are read one update late; `again`: blocks are computed again."""

    def sprogram(graph: ss.Graph, cluster: ss.Cluster) -> None:
        ss.op_trans(graph, graph.forward_ops, ss.Stale())
        for block in graph.blocks if again else ():
            ss.op_trans(graph, block.ops, ss.Recompute())
        on_top(plan, lambda graph: None)(graph, cluster)

    return sprogram


def unrolled(plan: SProgram | str, iterations: int = 2) -> SProgram:
    return on_top(plan, lambda graph: graph.unroll(iterations))


def early(plan: str) -> SProgram:
    """Return a plan that also updates the weights of each block before the backward of the block before it."""

    def rewrite(graph: ss.Graph) -> None:
        for before, block in itertools.pairwise(graph.blocks):
            updates = [op for op in graph.ops if not op.is_forward and op.inputs[0].tensor.startswith(block.path)]
            last = 1 if plan.startswith("pipeline") else None
            ss.op_order(graph, updates, graph.select(module=before.path, kind="B", microbatch=last))

    return on_top(plan, rewrite)


def sharded(graph: ss.Graph, cluster: ss.Cluster, ahead: int | None = None) -> None:
    """Data parallel, with weights at rest in slices."""
    resolve("data_parallel")(graph, cluster)
    devices = range(len(cluster.devices))
    for weight, update in graph.updates.items():
        factor = next((i.factor for i in update.indices if i.size % len(devices) == 0), "")
        parts = ss.Split(factor, len(devices)) if factor else ss.Replicate(len(devices))
        ss.place(graph, weight, parts, devices, ahead)
