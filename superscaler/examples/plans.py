"""Plans to start from: superscaler verify gpt2:size=tiny --plan plans.py:piped --cluster local:2"""

import superscaler as ss


@ss.sprogram
def data_parallel(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Cut every forward op on the batch; keep all weights on all devices."""
    count = len(cluster.devices)
    ss.op_trans(graph, graph.forward_ops, ss.Split("batch", count, axis="dp"))
    ss.op_assign(graph, graph.ops, cluster.mesh(dp=count))


@ss.sprogram
def piped(graph: ss.Graph, cluster: ss.Cluster, microbatches: int = 8) -> None:
    """Give each device a stage, and each stage its microbatches in the order of 1F1B."""
    stages = ss.stages(graph, len(cluster.devices))
    for device, ops in zip(cluster.devices, stages, strict=True):
        parts = ss.op_trans(graph, ops, ss.Microbatch(microbatches))
        ss.op_assign(graph, parts, device)
    order = ss.schedule_1f1b(len(stages), microbatches)
    ss.order(graph, order, stages)


@ss.sprogram
def half(graph: ss.Graph, cluster: ss.Cluster) -> None:
    """Keep the activations of the second half of the blocks, recompute those of the first half."""
    for block in graph.blocks[: len(graph.blocks) // 2]:
        ss.op_trans(graph, block.ops, ss.Recompute())
    data_parallel(graph, cluster)
