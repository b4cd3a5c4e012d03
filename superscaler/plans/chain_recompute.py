"""Data parallel, with as few blocks recomputed as a limit of memory allows, or runs of blocks of one length.

limit=BYTES         largest memory of a device: weights, gradients, optimizer state and activations. The recomputed runs
                    of blocks are those that take the least time (`times`: a JSON file of seconds by block; default:
                    FLOPs), the optimum among choices that recompute each block at most once
                    (plans/lib/checkpoint_chain.py)
every=sqrt|NUMBER   runs of so many blocks; sqrt(blocks) keeps the least
"""

from __future__ import annotations

from math import ceil, isfinite, sqrt

from superscaler.plans.gradient_accumulation import gradient_accumulation
from superscaler.plans.lib.checkpoint_chain import cheapest
from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import layers, stretches
from superscaler.verbs import Graph, InputError, Recompute, op_trans


@along_axis(recomputes=True)
def chain_recompute(
    graph: Graph, n: int, axis: str, limit: float = 0, every: str = "", times: str = "", microbatches: int = 1
) -> None:
    if bool(limit) == bool(every) or (times and every):
        raise InputError("chain_recompute needs limit=BYTES (and perhaps times=FILE) or every=sqrt, one of the two.")
    if not isfinite(limit):
        raise InputError(f"chain_recompute:limit={limit}: give a number of bytes.")
    if not layers(graph):
        raise InputError("chain_recompute: the model has no trained blocks, so nothing to recompute.")
    gradient_accumulation.cut(graph, n, axis, microbatches=microbatches)
    chain = stretches(graph)
    if every:
        numbers, size = [n for n, (path, _) in enumerate(chain) if path], _size(every, len(layers(graph)))
        runs = [(numbers[k], numbers[min(k + size, len(numbers)) - 1] + 1) for k in range(0, len(numbers), size)]
    else:
        # The first microbatches may be larger than others.
        batch = graph.factors["batch"].size if "batch" in graph.factors else 1
        runs = cheapest(graph, limit, times, batch // ceil(batch / (n * microbatches)))
    if runs:
        regions = [[op for path, ops in chain[first:end] if path for op in ops] for first, end in runs]
        op_trans(graph, regions, Recompute())


def _size(every: str, count: int) -> int:
    if every != "sqrt" and not (every.isdecimal() and int(every)):
        raise InputError(f"chain_recompute:every={every}: give sqrt, or the number of blocks in a recomputed run.")
    return ceil(sqrt(count)) if every == "sqrt" else int(every)
