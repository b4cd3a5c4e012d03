"""Dynamic axial parallelism (FastFold's): a model of two axes is cut along the axis that it does not attend along.

The axes are the factors of the input with the most of them, beside the batch. Attention along one axis is cut along the
other, or along another dim of the same, with an all_to_all on either side.
"""

from __future__ import annotations

from superscaler.plans.lib.products import along_axis
from superscaler.plans.lib.shared import along, attentions, keys_of
from superscaler.verbs import Graph, InputError, Split, op_trans


@along_axis()
def dap(graph: Graph, n: int, axis: str) -> None:
    read = [[f for f in graph.model.tensors[name].factors if f != "batch"] for name in graph.model.inputs]
    axes = list(dict.fromkeys(max(read, key=lambda factors: len(set(factors)))))
    if len(axes) < 2 or any(graph.factors[f].size % n for f in axes):
        sizes = ", ".join(f"{f} of {graph.factors[f].size}" for f in axes)
        raise InputError(
            f"dap over {n} devices cuts two axes of an input beside the batch, but those of this model are {sizes}; "
            "choose a model of two axes, and a number of devices that divides both."
        )
    attended = {op.module: keys_of(graph, op) for op in attentions(graph, "dap")}
    for op in graph.forward_ops:
        avoided = next((f for path, f in attended.items() if f"{op.module}.".startswith(f"{path}.")), ())
        if factor := along(op, sorted(axes, key=lambda f: f in avoided)):
            op_trans(graph, op, Split(factor, n, axis=axis))
