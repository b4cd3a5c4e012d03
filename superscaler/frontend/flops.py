"""Floating-point operations of a call, counted by torch on tensors without data."""

from __future__ import annotations

from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils.flop_counter import FlopCounterMode

from superscaler.frontend.trace import reads, target_of

_COUNTED = ("mm", "bmm", "matmul", "linear", "addmm", "baddbmm", "mv", "dot", "conv", "scaled_dot_product", "einsum",
            "ss.attention_dropout", "ss.experts")  # fmt: skip


class FlopCounter:
    """Counts each operator and shape once; operators that are no contraction count nothing."""

    def __init__(self) -> None:
        self.known: dict[Any, int] = {}

    def count(self, node: Node) -> int:
        name = target_of(node)
        if not name.startswith(("aten.", "ss.")) or not any(word in name for word in _COUNTED):
            return 0
        values = [x.meta["val"] for x in reads(node)]
        options = repr(map_arg((node.args, node.kwargs), lambda _: None))
        key = (name, tuple((v.shape, v.dtype) for v in values), options)
        if key not in self.known:
            self.known[key] = _count(node)
        return self.known[key]


def _count(node: Node) -> int:
    function: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return int(counter.get_total_flops())
