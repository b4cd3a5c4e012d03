"""Expert parallelism: data parallelism, with the experts of a mixture divided among the devices.

Without `capacity` an expert may be chosen for any token, so all tokens go to all experts. With one (1.25: a quarter
more rows than the even share) tokens go to their experts only, by an all_to_all, and back; choices beyond it are
dropped, which `verify` counts. The batch is cut inside the cuts of all other plans, so that tokens travel among the
devices of one group of experts only.
"""

from __future__ import annotations

from collections.abc import Iterator

from superscaler.plans.lib.products import along_axis
from superscaler.verbs import Dispatch, Graph, InputError, Split, op_trans


@along_axis()
def expert_parallel(graph: Graph, n: int, axis: str, capacity: float | None = None) -> Iterator[None]:
    mixtures = [op for op in graph.forward_ops if op.target == "ss.experts"]
    if not mixtures:
        raise InputError(
            "expert_parallel: the model has no mixture of experts that was captured as one op, as that of Mixtral "
            "(transformers) is; take tensor_parallel."
        )
    experts = {op.indices[i].factor for op in mixtures if (i := op.inputs[3].slots[0]) is not None}
    if capacity is not None:
        op_trans(graph, mixtures, Dispatch(capacity))
    yield
    # Weights that rest in slices already (ZeRO) are cut further; others follow their readers.
    sliced = [op for op in graph.model.holders.values() if graph.grids[op.name].is_touched]
    for op in (*graph.forward_ops, *sliced):
        own = next((f for f in experts if op.find(f) is not None), "batch" if op.is_forward else "")
        if own:
            op_trans(graph, op, Split(own, n, axis=axis))
