"""Plans of a user, in the verbs alone, that order updates, copies and offloads between backwards (orders.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import superscaler as ss

# The path of each block that has trained weights, and the updates of these.
Blocks = Sequence[tuple[str, list[ss.Op]]]
SProgram = Callable[[ss.Graph, ss.Cluster], None]


def along_batch(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Cut the batch, and keep all weights on all devices."""
    n = len(cluster.devices)
    ss.op_trans(graph, graph.forward_ops, ss.Split("batch", n, axis="dp"))
    ss.op_assign(graph, graph.ops, cluster.mesh(dp=n))


def of_blocks(graph: ss.Graph) -> Blocks:
    """Return the path of each block that has trained weights, and the updates of these."""
    found = []
    for block in graph.blocks:
        read = {o.tensor for op in block.ops for o in op.inputs}
        found.append((block.path, [op for weight, op in graph.updates.items() if weight in read]))
    return [(path, updates) for path, updates in found if updates]


def early(graph: ss.Graph, every: int = 1, microbatch: int | None = None, blocks: Blocks = ()) -> None:
    """Update each `every` blocks before the backward of the block below them."""
    blocks = blocks or of_blocks(graph)
    for k in range(every, len(blocks), every):
        updates = [op for _, own in blocks[k : k + every] for op in own]
        ss.op_order(graph, updates, graph.select(module=blocks[k - 1][0], kind="B", microbatch=microbatch))


def lomo(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Update each block before the block below runs backward."""
    along_batch(graph, cluster)
    early(graph)


def lora_in_shards(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Shard each weight, frozen ones too, recompute each block, and update its adapters before the next backward."""
    for block in graph.blocks:
        ss.op_trans(graph, block.ops, ss.Recompute())
    ss.op_trans(graph, graph.forward_ops, ss.Split("batch", len(cluster.devices), axis="dp"))
    ss.op_assign(graph, graph.forward_ops, cluster.mesh(dp=len(cluster.devices)))
    for tensor in graph.model.parameters():
        ss.place(graph, tensor, ss.Shard(len(cluster.devices)), cluster.devices, ahead=0)
    early(graph)


def every_second(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Update blocks two by two, in shards, between the backwards."""
    n = len(cluster.devices)
    ss.op_trans(graph, graph.forward_ops, ss.Split("batch", n, axis="dp"))
    for weight in graph.updates:
        ss.op_trans(graph, graph.follow(weight), ss.Shard(n, axis="dp"))
    ss.op_assign(graph, graph.ops, cluster.mesh(dp=n))
    early(graph, 2)


def upper_half(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Update the upper half of the blocks between backwards, and the lower half at the end, the highest first."""
    along_batch(graph, cluster)
    blocks = of_blocks(graph)
    half = len(blocks) // 2
    early(graph, blocks=blocks[half - 1 :])
    ss.order(graph, [[own for _, own in blocks[half - 1 :: -1]]])


def microbatches(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Run two microbatches one after the other, and update each block between the backwards of the second one."""
    ss.op_trans(graph, graph.forward_ops, ss.Microbatch(2))
    along_batch(graph, cluster)
    ss.op_order(graph, graph.select(microbatch=0, kind="B"), graph.select(microbatch=1))
    early(graph, microbatch=1)


def tapes_on_hosts(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Keep one tape of two microbatches on the device, the other on its host, and update between backwards."""
    ss.op_trans(graph, graph.forward_ops, ss.Microbatch(2))
    along_batch(graph, cluster)
    ss.op_order(graph, graph.select(microbatch=0), graph.select(microbatch=1))
    ss.op_order(graph, graph.select(microbatch=1, kind="B"), graph.select(microbatch=0, kind="B"))
    graph.offload_tapes(1)
    early(graph, microbatch=0)


def inputs_on_hosts(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Copy the inputs of each block to the host after the forward of the block, and back one backward before its own;
    update each block before the block below.
    """
    along_batch(graph, cluster)
    for number, block in enumerate(graph.blocks):
        again = ss.op_trans(graph, block.ops, ss.Recompute())
        if number:
            copies = ss.op_trans(graph, again, ss.Insert())
            ss.op_assign(graph, copies, "host")
            ss.op_order(graph, graph.select(module=block.path), copies)
    early(graph)


def weights_on_hosts(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Keep weights and the state of their optimizer on the hosts, copy them to the device for each forward and again
    for each backward, and update them between backwards.
    """
    for block in graph.blocks:
        ss.op_trans(graph, block.ops, ss.Regather())
    along_batch(graph, cluster)
    ss.op_assign(graph, list(graph.updates.values()), "host")
    early(graph)


def halves(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Run the W of each block after the I of the block below, and the updates of a block right after its W."""
    for block in graph.blocks:
        ss.op_trans(graph, block.ops, ss.SplitBackward())
    along_batch(graph, cluster)
    for (below, _), (path, updates) in pairwise(of_blocks(graph)):
        ss.op_order(graph, graph.select(module=below, kind="I"), graph.select(module=path, kind="W"))
        ss.op_order(graph, updates, graph.select(module=below, kind="W"))


def waits(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Let the sums of a block travel under the backward of the block below, and update it after that backward."""
    along_batch(graph, cluster)
    blocks = of_blocks(graph)
    for (lowest, _), (below, _), (_, updates) in zip(blocks, blocks[1:], blocks[2:], strict=False):
        backward = graph.select(module=below, kind="B")
        ss.op_order(graph, graph.select(ops=updates, kind="C"), backward)
        ss.op_order(graph, backward, updates)
        ss.op_order(graph, updates, graph.select(module=lowest, kind="B"))


PLANS = (
    lomo, lora_in_shards, every_second, upper_half, microbatches, tapes_on_hosts, inputs_on_hosts, weights_on_hosts,
    halves, waits,
)  # fmt: skip


def stale(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Read weights of one update ago: other training, which must be found."""
    ss.op_trans(graph, graph.forward_ops, ss.Stale())
    along_batch(graph, cluster)
