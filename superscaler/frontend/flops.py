"""Floating-point operations of a call, counted by torch on tensors without data."""

from __future__ import annotations

from typing import Any, cast

from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from superscaler.frontend.trace import reads, target_of

_COUNTED = ("mm", "bmm", "matmul", "linear", "addmm", "baddbmm", "mv", "dot", "conv", "scaled_dot_product", "einsum",
            "ss.attention_dropout", "ss.experts")  # fmt: skip


def flops(node: Node, known: dict[Any, int]) -> int:
    """Return 0 for what is no contraction. Each operator and shape is counted once, and then `known`."""
    name, function = target_of(node), cast(Any, node.target)
    if not name.startswith(("aten.", "ss.")) or not any(word in name for word in _COUNTED):
        return 0
    shapes = tuple((x.meta["val"].shape, x.meta["val"].dtype) for x in reads(node))
    key = (name, shapes, repr(map_arg((node.args, node.kwargs), lambda _: None)))
    if key not in known:
        args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
        with FlopCounterMode(display=False) as counter:
            function(*args, **kwargs)
        known[key] = int(counter.get_total_flops())
    return known[key]
